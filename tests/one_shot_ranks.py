"""Ranks of the one_shot merge, simulated one after the other in one process, and what their results must be."""

import math

import torch
from one_shot_inputs import as_splits
from slab_ranks import SimulatedSlabs

from distdec.merge import column_range, padded_columns
from distdec.ops.one_shot_triton import one_shot
from distdec.ops.one_shot_words_triton import word_width
from distdec.ops.partial import Partial
from distdec.ops.splits import Splits


class Simulation(SimulatedSlabs):
    """Ranks of the merge; with `words` partials come as splits, few enough to travel as words."""

    def __init__(self, num_ranks, *, words=False, **how):
        super().__init__(num_ranks, **({"channels": 32} if words else {}), **how)
        self.words = words

    def launch(self, rank, inputs, *, scatter=False, payload=torch.float32, sinks=None, push=True, merge=True):
        """One rank's launch; `inputs` is a `Partial`, `Splits` or a `Workspace`."""
        size = len(self.slabs)
        if isinstance(inputs, Partial):
            splits = as_splits(inputs) if self.words else Splits.of(inputs)
        else:
            splits = inputs if isinstance(inputs, Splits) else inputs.splits
        columns = padded_columns(splits.num_q_heads * splits.head_dim, size) if scatter else 0
        assert not self.words or word_width(self.slabs[rank], splits, payload, columns)
        tokens, heads, dim = splits.num_tokens, splits.num_q_heads, splits.head_dim
        start, stop = column_range(heads * dim, size, rank) if scatter else (0, heads * dim)
        out = torch.full((tokens, stop - start), math.nan)
        lse = torch.full((tokens, heads), math.nan)
        one_shot(
            self.slabs[rank],
            splits,
            out,
            lse,
            payload=payload,
            spin_limit=self.spin_limit,
            columns=columns,
            sinks=sinks,
            push=push,
            merge=merge,
        )
        return out, lse


def check(results, want, *, scatter=False, rtol=1e-5, atol=1e-5):
    out, lse = want
    flat = out.flatten(1)
    for rank, (got_out, got_lse) in enumerate(results):
        start, stop = column_range(flat.shape[1], len(results), rank) if scatter else (0, flat.shape[1])
        torch.testing.assert_close(got_out.double(), flat[:, start:stop], rtol=rtol, atol=atol, equal_nan=True)
        torch.testing.assert_close(got_lse.double(), lse, rtol=1e-5, atol=1e-5, equal_nan=True)
    if not scatter:
        for got_out, got_lse in results[1:]:
            assert torch.equal(got_out.view(torch.int32), results[0][0].view(torch.int32))
            assert torch.equal(got_lse.view(torch.int32), results[0][1].view(torch.int32))

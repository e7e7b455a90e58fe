"""Whole steps of a model as CUDA graphs: embedding, all layers with their merges, and the head.

A step is padded to the next captured number of decode rows and, where it has prefill rows, of prefill tokens, and
replayed. Padding rows and tokens hold no key, store nothing and belong to nobody; their logits are cut off. Steps
larger than any captured one run eagerly, over the same static buffers. On a device without graphs the captured
callables are called instead, padding and all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from distdec.batch import StepBatch
from distdec.graphs import GraphKey, StepGraphs, mixed_buckets, row_buckets
from distdec.hf.attention import EngineBinding
from distdec.hf.sharding import rank_sum_of
from distdec.request import StepPlan
from distdec.row_tables import NO_PADDING, Padding
from distdec.sharded_cache import ShardedCache


class ModelGraphs:
    """Captured steps by padded decode rows and prefill tokens.

    Args:
        binding: the model on its attention; the merge and its buffers live as long as the graphs.
        inputs: token ids, positions and needed tokens of a step, [3, capacity] int64; a captured step reads its first
            columns where they are.
        max_rows: most rows of a step.
        max_tokens: most tokens of any step, eager ones too: the buffers are made for it now, and never move.
        max_prefills: most prefill rows of a captured step, to which all of them are padded; 0: only steps of nothing
            but decode rows are captured.
        num_draft_tokens: most drafts of a row. Above 0, steps with speculative rows are captured too, all decode rows
            filled up to so many tokens more.
        progress: called with the number of captured steps, and of all.

    Notes:
        Collective: every rank makes it at the same time, with the same numbers.
    """

    def __init__(
        self,
        binding: EngineBinding,
        inputs: Tensor,
        *,
        max_rows: int,
        max_tokens: int,
        max_prefills: int,
        num_draft_tokens: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.binding = binding
        self.cache: ShardedCache = binding.attention.cache
        mesh, merge, buffers = binding.attention.mesh, binding.attention.merge, self.cache.buffers
        self._max_prefills = max_prefills
        self._q_len = 1 + num_draft_tokens
        self._paddings = paddings(max_rows, max_tokens, max_prefills, num_draft_tokens)
        frames = self.cache.layout.num_frames[mesh.kvp_rank]
        # a view lies in a chunk of its own, unless prefixes are shared: then this may not do, see `stale`
        rows = max_rows + max_prefills
        buffers.reserve(tokens=inputs.shape[1], rows=rows, views=frames + 2 * rows)
        self._generation = buffers.generation
        total = rank_sum_of(binding.model)
        talkers = [merge] if total is None else [merge, total]
        self._graphs = StepGraphs(
            mesh.device,
            barrier=mesh.barrier if mesh.world_size > 1 else None,
            moved=lambda: buffers.generation,
            checks=[check for talker in talkers if (check := getattr(talker, "check", None))],
            keep=[binding.attention, total],
        )
        # asked twice a step, about the same few steps; all is captured once
        self._pick = lru_cache(maxsize=1024)(self._graphs.pick)
        self._inputs = inputs
        # forwards launched from Python: a replay is none
        self.num_forwards = 0
        self._capture(progress)

    def _capture(self, progress: Callable[[int, int], None] | None) -> None:
        steps = {}
        # the largest step last, as the buffers then hold its rows: any of the steps may then warm up
        for pad in self._paddings:
            batch = self.cache.buffers.fill([], q_len=pad.q_len, pad=pad)
            ids, positions, needed = self._inputs
            decode = pad.decode_rows * pad.q_len
            tokens, logits = decode + pad.prefill_tokens, decode + pad.prefill_rows
            steps[_key(pad)] = (self._step_of(batch), (ids[:tokens], positions[:tokens], needed[:logits]))
        self._inputs.zero_()
        with torch.no_grad():
            self._graphs.capture(steps, progress)

    def _step_of(self, batch: StepBatch) -> Callable[..., Tensor]:
        # the batch of a padded step has the same addresses every time, so this one serves all later ones
        def step(ids: Tensor, positions: Tensor, needed: Tensor) -> Tensor:
            return self._forward(ids, positions, needed, batch)

        return step

    def _forward(self, ids: Tensor, positions: Tensor, needed: Tensor, batch: StepBatch) -> Tensor:
        self.num_forwards += 1
        # part of the captured step: two launches less
        self.cache.buffers.derive(batch)
        self.binding.set_step(batch)
        return self.binding.forward(ids, positions, logits_to_keep=needed)

    def padding(self, plan: StepPlan) -> Padding:
        """Return up to what a step is padded; the same on every rank, as nothing but the plan counts."""
        rows, prefills = plan.num_decode, plan.rows[plan.num_decode :]
        if not plan.rows or len(prefills) > self._max_prefills:
            return NO_PADDING
        q_len = self._q_len if 1 < plan.q_len <= self._q_len else plan.q_len
        key = self._pick(rows, q_len, prefill_tokens=sum([len(row.token_ids) for row in prefills]))
        if key is None:
            return NO_PADDING
        return Padding(key.rows, self._max_prefills if prefills else 0, key.prefill_tokens, key.q_len)

    @property
    def stale(self) -> bool:
        """Whether this rank's buffers had to move. Its steps then run eagerly, padded as on the other ranks."""
        return self.cache.buffers.generation != self._generation

    def run(self, pad: Padding, inputs: tuple[Tensor, Tensor, Tensor], batch: StepBatch) -> Tensor:
        """Run a padded step and return the logits of its needed tokens, padding included.

        Shapes:
            inputs: token ids [T], positions [T] and needed tokens [N], int64, padded
            returns [N, vocabulary], valid until the next step

        Notes:
            In-place: writes the pool. Collective: as the model's forward. Host sync: none.
        """
        if self.stale:
            return self._forward(*inputs, batch)
        return self._graphs.replay(_key(pad), *inputs)

    def close(self) -> None:
        """Drop the graphs; before the merge and the process group go."""
        self._graphs.close()


def paddings(max_rows: int, max_tokens: int, max_prefills: int, num_draft_tokens: int = 0) -> list[Padding]:
    """Return what the captured steps are padded to; arguments as for `ModelGraphs`."""
    mixed = mixed_buckets(max_rows, max_tokens) if max_prefills else []
    found = [Padding(rows) for rows in row_buckets(max_rows)]
    found += [Padding(r, max_prefills, t) for r, t in mixed]
    if num_draft_tokens:
        q_len = 1 + num_draft_tokens
        found += [Padding(rows, q_len=q_len) for rows in row_buckets(max_rows)]
        found += [Padding(r, max_prefills, t, q_len) for r, t in mixed if r]
    return found


def _key(pad: Padding) -> GraphKey:
    return GraphKey(pad.decode_rows, pad.q_len, prefill_tokens=pad.prefill_tokens)

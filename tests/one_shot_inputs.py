"""Inputs of the one_shot merge and their truth: unmerged splits as a decode kernel leaves them, and joined partials."""

import math

import torch

from distdec.ops.partial import Partial
from distdec.ops.spans import derive_spans, empty_schedule
from distdec.ops.splits import Splits
from distdec.ops.tables import KVTables

NEG_INF = -math.inf


class Workspace:
    """What a decode kernel leaves on one rank: partials of every unit, numbered as its schedule numbers them."""

    def __init__(self, tiles, num_spans, q_len, num_kv_heads, group, dim, generator, split_tiles=0):
        rows, ends = q_len * group, torch.tensor(tiles).cumsum(0)
        begins = ends - torch.tensor(tiles)
        cum = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        tile_table = torch.zeros(max(1, sum(tiles)), 4)
        tables = KVTables(*(x.to(torch.int32) for x in (tile_table, torch.stack([begins, ends], 1), cum)))
        schedule = empty_schedule(len(tiles), num_kv_heads, num_spans, len(tile_table), "cpu", split_tiles)
        derive_spans(tables, schedule)
        self.ranges = schedule.ranges
        # leftovers of earlier calls, where nothing is written
        self.out = torch.full((sum(tiles) * num_kv_heads + num_spans + 64, rows, dim), math.nan)
        self.lse2 = torch.full(self.out.shape[:2], math.nan)
        shape = (len(tiles), num_kv_heads, q_len, group)
        self.splits = Splits(self.out, self.lse2, self.ranges, *shape, num_spans, split_tiles)
        tokens, heads = self.splits.num_tokens, self.splits.num_q_heads
        self.partial = Partial(torch.zeros(tokens, heads, dim), torch.full((tokens, heads), NEG_INF))
        for unit, (first, last) in enumerate(self.ranges.tolist()):
            if first < last:
                numbers = list(range(first, last))
                self._fill(unit // num_kv_heads, unit % num_kv_heads, numbers, q_len, group, generator)

    def _fill(self, row, head, numbers, q_len, group, generator):
        lse2 = torch.randn(len(numbers), q_len * group, generator=generator) * 4
        out = torch.randn(len(numbers), q_len * group, self.out.shape[2], generator=generator)
        lse2[-1, -1], out[-1, -1] = NEG_INF, math.nan
        self.lse2[numbers], self.out[numbers] = lse2, out
        lse = lse2.double() * math.log(2)
        weights = torch.softmax(lse.nan_to_num(neginf=-1e300), 0) * (lse != NEG_INF)
        joined = (weights[..., None] * out.double().nan_to_num()).sum(0)
        where = slice(row * q_len, (row + 1) * q_len), slice(head * group, (head + 1) * group)
        self.partial.out[where] = joined.view(q_len, group, -1).float()
        self.partial.lse[where] = torch.logsumexp(lse, 0).view(q_len, group).float()


def random_partials(num_ranks, tokens, heads, dim, seed=0):
    """Partials with uneven weights; of several tokens the first has no key on rank 0, the last none on any rank."""
    g = torch.Generator().manual_seed(seed)
    partials = [
        Partial(torch.randn(tokens, heads, dim, generator=g), torch.randn(tokens, heads, generator=g) * 3)
        for _ in range(num_ranks)
    ]
    for rank, partial in enumerate(partials if tokens > 1 else []):
        for token in [0, tokens - 1] if rank == 0 else [tokens - 1]:
            partial.out[token], partial.lse[token] = math.nan, NEG_INF
    return partials


def truth(partials, sinks=None):
    """Merge in float64: (out [T, Hq, D], lse [T, Hq])."""
    lses = torch.stack([p.lse for p in partials]).double()
    outs = torch.stack([p.out for p in partials]).double()
    outs = outs.masked_fill((lses == NEG_INF)[..., None], 0.0)
    empty = (lses == NEG_INF).all(0)
    if sinks is not None:
        lses = torch.cat([lses, sinks.double().expand_as(lses[:1])])
        outs = torch.cat([outs, torch.zeros_like(outs[:1])])
    lse = torch.logsumexp(lses, 0).masked_fill(empty, NEG_INF)
    weights = torch.exp(lses - lse.masked_fill(lse == NEG_INF, 0.0))
    return (weights[..., None] * outs).sum(0), lse


def as_splits(partial):
    """The partial as splits that are not joined yet, one a row; LSEs tell of rows that are not finite."""
    tokens, heads, dim = partial.out.shape
    lse = partial.lse.masked_fill(~partial.out.isfinite().all(-1) & (partial.lse != NEG_INF), math.nan)
    ends = torch.arange(1, tokens * heads + 1, dtype=torch.int32, device=lse.device)
    ranges = torch.stack([ends - 1, ends], 1)
    outs = partial.out.reshape(tokens * heads, 1, dim).contiguous()
    return Splits(outs, lse.reshape(-1, 1) / math.log(2), ranges, tokens, heads, 1, 1, tokens * heads)

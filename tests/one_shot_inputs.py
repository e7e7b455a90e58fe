"""Inputs of the one_shot merge and their truth: unmerged splits as a decode kernel leaves them, and joined partials."""

import math

import torch

from distdec.ops.partial import Partial
from distdec.ops.splits import Splits

NEG_INF = -math.inf


class Workspace:
    """What a decode kernel leaves on one rank: partials of every unit, numbered as its schedule numbers them."""

    def __init__(self, tiles, num_spans, q_len, num_kv_heads, group, dim, generator, split_tiles=0):
        rows = q_len * group
        self.cum_tiles = torch.tensor([0, *tiles]).cumsum(0).to(torch.int32)
        # leftovers of earlier calls, where nothing is written
        self.out = torch.full((sum(tiles) * num_kv_heads + num_spans + 64, rows, dim), math.nan)
        self.lse2 = torch.full(self.out.shape[:2], math.nan)
        shape = (len(tiles), num_kv_heads, q_len, group)
        self.splits = Splits(self.out, self.lse2, self.cum_tiles, *shape, num_spans, split_tiles)
        tokens, heads = self.splits.num_tokens, self.splits.num_q_heads
        self.partial = Partial(torch.zeros(tokens, heads, dim), torch.full((tokens, heads), NEG_INF))
        for row, count in enumerate(tiles):
            for head in range(num_kv_heads):
                numbers = self._numbers(row, head, count, num_spans, num_kv_heads, split_tiles)
                if numbers:
                    self._fill(row, head, numbers, q_len, group, generator)

    def _numbers(self, row, head, count, num_spans, num_kv_heads, split_tiles):
        """Partials of a unit, counted from the definition: every tile of the line, and the span that owns it."""
        before = int(self.cum_tiles[row])
        if split_tiles:
            pieces = -(-count // split_tiles)
            first = (before // split_tiles + row) * num_kv_heads + head * pieces
            return list(range(first, first + pieces))
        line = int(self.cum_tiles[-1]) * num_kv_heads
        spans = min(num_spans, line)
        tiles = range(before * num_kv_heads + head * count, before * num_kv_heads + (head + 1) * count)
        owners = {next(p for p in range(spans) if line * p // spans <= x < line * (p + 1) // spans) for x in tiles}
        return [p + row * num_kv_heads + head for p in sorted(owners)]

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

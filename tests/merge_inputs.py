"""Partials of ragged rows over uneven shards, and their truth in float64, for the tests of the merge."""

import torch

from distdec.ops.partial import Partial

INF = float("inf")
NAN = float("nan")


def attend(scores, values):
    """Softmax attention in float64: scores [Hq, n], values [n, Hq, Dv] -> out [Hq, Dv], lse [Hq]; empty: 0, -inf."""
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -INF, 0.0, lse).unsqueeze(-1))
    return torch.einsum("hn,nhd->hd", weights, values), lse


def split_unevenly(length, num_shards, generator):
    """Cut `length` into contiguous shards of very different sizes, some of them empty."""
    shares = torch.rand(num_shards, generator=generator) ** 6
    shares[torch.rand(num_shards, generator=generator) < 0.2] = 0
    edges = (length * shares.cumsum(0) / shares.sum().clamp(min=1e-9)).round().long().tolist()
    return [0, *edges[:-1], length]


def make_rows(lengths, num_heads=6, head_dim=5, seed=0, spread=4.0):
    """Random scores and values of one query token a row, float64; the scores wander along the sequence."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        drift = torch.linspace(-spread, spread, length, dtype=torch.float64)
        scores = torch.randn(num_heads, length, generator=generator, dtype=torch.float64) * 2 + drift
        rows.append((scores, torch.randn(length, num_heads, head_dim, generator=generator, dtype=torch.float64)))
    return rows


def truth_of(rows, sinks=None):
    """Float64 (out [T, Hq * Dv], lse [T, Hq]) over all keys of each row."""
    outs, lses = zip(*(attend(scores, values) for scores, values in rows), strict=True)
    out, lse = torch.stack(outs), torch.stack(lses)
    if sinks is not None:
        with_sinks = torch.logaddexp(lse, sinks.double())
        out, lse = out * torch.exp(lse - with_sinks).unsqueeze(-1), with_sinks
    return out.flatten(1), lse


def shard(rows, num_ranks, seed=0, poison=None):
    """Partials of contiguous uneven shards, float32; `poison` fills `out` where a rank has no key of a row."""
    generator = torch.Generator().manual_seed(seed + 1)
    edges = [split_unevenly(values.shape[0], num_ranks, generator) for _, values in rows]
    partials = []
    for rank in range(num_ranks):
        outs, lses = [], []
        for (scores, values), cuts in zip(rows, edges, strict=True):
            keys = slice(cuts[rank], cuts[rank + 1])
            out, lse = attend(scores[:, keys], values[keys])
            outs.append(torch.full_like(out, poison) if poison is not None and keys.start == keys.stop else out)
            lses.append(lse)
        partials.append(Partial(torch.stack(outs).float(), torch.stack(lses).float()))
    return partials


def assemble(results):
    """Put the ranks' columns side by side (scatter modes), or take rank 0's (replicated)."""
    if all(result.columns == results[0].columns for result in results):
        return results[0].out
    return torch.cat([result.out for result in results], 1)


def same_bits(a, b):
    """True where two tensors are equal, NaN in the same places."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5))


def in_8_bits(partials):
    """Partials whose rows travel in 8 bits without loss: Triton's interpreter rounds those numbers wrongly.

    A row is rounded to e4m3 times a power of two, and its first element made the largest, so that its scale is that
    power.
    """
    rounded = []
    for out, lse in partials:
        seen = (lse != -INF)[..., None]
        finite = torch.where(seen, out, 1.0)
        scale = torch.exp2(torch.ceil(torch.log2(finite.abs().amax(-1, keepdim=True) / 448)))
        eighths = (finite / scale).to(torch.float8_e4m3fn).float()
        eighths[..., 0] = 448.0
        rounded.append(Partial(torch.where(seen, eighths * scale, out), lse))
    return rounded

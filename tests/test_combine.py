"""Joining a rank's own partials."""

import importlib
import math

import pytest
import torch
from compare import close_partial, nan_filled_empty

from distdec.ops.splits import Splits

IMPLEMENTATIONS = ["combine", "combine_triton"]


def make(device: str = "cpu", dim: int = 24):
    """Partials of three rows on two KV heads: none, one and many, with an empty partial full of NaN among them."""
    generator = torch.Generator().manual_seed(5)
    counts = [3, 1, 0, 0, 37, 2]
    rows = 2 * 3
    out = torch.randn(60, rows, dim, generator=generator)
    lse2 = torch.randn(60, rows, generator=generator) * 10
    ranges, at = [], 4
    for n in counts:
        ranges.append([at, at + n])
        at += n + 1
    used = [n for begin, end in ranges for n in range(begin, end)]
    unused = [n for n in range(60) if n not in used]
    out[unused], lse2[unused] = math.nan, math.nan
    lse2[5], out[5] = -math.inf, math.nan
    lse2[9:11, 1] = -math.inf
    lse2[ranges[5][0] : ranges[5][1], 4] = -math.inf
    return out.to(device), lse2.to(device), torch.tensor(ranges, dtype=torch.int32, device=device)


def by_hand(out, lse2, ranges):
    """Join in fp64, one query head at a time."""
    out, lse2 = out.double().cpu(), lse2.double().cpu()
    want_out = torch.zeros(6, 6, out.shape[2], dtype=torch.float64)
    want_lse = torch.full((6, 6), -math.inf, dtype=torch.float64)
    for unit, (begin, end) in enumerate(ranges.tolist()):
        row, head = divmod(unit, 2)
        for token in range(2):
            for member in range(3):
                at = token * 3 + member
                alive = [n for n in range(begin, end) if lse2[n, at] > -math.inf]
                if not alive:
                    continue
                lse = lse2[alive, at] * math.log(2)
                weights = lse.softmax(0)
                want_out[row * 2 + token, head * 3 + member] = weights @ out[alive, at]
                want_lse[row * 2 + token, head * 3 + member] = lse.logsumexp(0)
    return want_out, want_lse


def check(module: str, device: str, dim: int = 24) -> None:
    combine = importlib.import_module(f"distdec.ops.{module}").combine
    inputs = make(device, dim)
    with nan_filled_empty():
        got = combine(*inputs, num_kv_heads=2, q_len=2, group_size=3)
    close_partial(got, type(got)(*by_hand(*inputs)))


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@pytest.mark.parametrize("dim", [16, 24, 128])
def test_combine_equals_the_weighted_sum(module, dim):
    check(module, "cpu", dim)


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_a_nan_partial_poisons_only_its_own_row(module):
    combine = importlib.import_module(f"distdec.ops.{module}").combine
    out, lse2, ranges = make()
    want_out, want_lse = by_hand(out, lse2, ranges)
    lse2[4, 3], out[4, 3] = math.nan, math.nan
    # the only partial of a unit
    lse2[8, 0] = math.nan
    want_out[1, 0], want_lse[1, 0] = math.nan, math.nan
    want_out[0, 3], want_lse[0, 3] = math.nan, math.nan
    got = combine(out, lse2, ranges, 2, 2, 3)
    close_partial(got, type(got)(want_out, want_lse))


def make_ranks(dtype=torch.float32, dim=24):
    """Three ranks' partials of 4 tokens on 5 heads: token 0 has a key on rank 2 only, token 3 on none."""
    generator = torch.Generator().manual_seed(3)
    outs = torch.randn(3, 4, 5, dim, generator=generator).to(dtype)
    lses = torch.randn(3, 4, 5, generator=generator) * 5
    outs[:2, 0], lses[:2, 0] = math.nan, -math.inf
    outs[:, 3], lses[:, 3] = math.nan, -math.inf
    return outs, lses, torch.randn(5, generator=generator)


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_are_folded_and_finished(module, with_sinks, num_ranks):
    fold = importlib.import_module(f"distdec.ops.{module}").fold_ranks
    outs, lses, sinks = make_ranks()
    outs, lses, sinks = outs[-num_ranks:], lses[-num_ranks:], sinks if with_sinks else None
    # faults in rows of their own: an LSE that is NaN beside ranks without keys, NaN out, infinite LSE, and an infinity
    # whose weight is 0
    lses[-1, 0, 2] = math.nan
    outs[0, 1, 1, 3], lses[-1, 2, 0], outs[-1, 2, 4, 0], lses[-1, 2, 4] = math.nan, math.inf, math.inf, -1e4
    weights = torch.softmax(torch.cat([lses, sinks.expand(1, 4, 5)]) if with_sinks else lses, 0).double()[:num_ranks]
    total = torch.logsumexp(torch.cat([lses, sinks.expand(1, 4, 5)]) if with_sinks else lses, 0)
    want = (weights[..., None] * outs.double().masked_fill((lses == -math.inf)[..., None], 0.0)).sum(0)
    want[3], total[3] = 0.0, -math.inf
    for token, head in ((0, 2), (1, 1), (2, 0), (2, 4)):
        want[token, head], total[token, head] = math.nan, math.nan
    out, lse = torch.full((4, 5, 24), 7.0, dtype=torch.float16), torch.full((4, 5), 7.0)
    fold(outs, lses, out=out, lse=lse, sinks=sinks)
    torch.testing.assert_close(out.double(), want, rtol=2e-3, atol=2e-3, equal_nan=True)
    torch.testing.assert_close(lse, total, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_finishing_combine_is_a_combine_and_a_fold_of_one_rank(with_sinks):
    triton, reference = (importlib.import_module(f"distdec.ops.{name}") for name in ("combine_triton", "combine"))
    out, lse2, ranges = make()
    lse2[4, 3], out[4, 3] = math.nan, math.nan
    # as decode marks a row with one infinity
    out[20, 2, 7], lse2[20, 2] = math.inf, math.nan
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(2)) if with_sinks else None
    partial = reference.combine(out, lse2, ranges, 2, 2, 3)
    want, got = ((torch.full((6, 6, 24), 7.0, dtype=torch.float16), torch.full((6, 6), 7.0)) for _ in range(2))
    reference.fold_ranks(partial.out[None], partial.lse[None], out=want[0], lse=want[1], sinks=sinks)
    triton.combine_splits(Splits(out, lse2, ranges, 3, 2, 2, 3), out=got[0], lse=got[1], finish=True, sinks=sinks)
    assert want[1].isnan().sum() == 2
    torch.testing.assert_close(got[0], want[0], rtol=2e-3, atol=2e-3, equal_nan=True)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [24, 128])
def test_combine_on_a_gpu(dim):
    check("combine_triton", "cuda", dim)

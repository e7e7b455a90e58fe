"""The checks of the one-kernel sum over ranks, for `check_one_shot.py`: numbers, graphs beside the merge, late and lost
ranks, and its time next to the collective library's.
"""

import itertools
import math
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from check_ranks import SLEEP_CYCLES, captured, raised, same_on_all, timed
from one_shot_inputs import random_partials, truth

from distdec.one_shot import OneShotMerge
from distdec.ops.partial import Partial
from distdec.ops.splits import Splits
from distdec.rank_sum import OneShotSum

# one number, a row of a decode step, odd ends, many rows, and what is left to the library
SIZES = (1, 4096, 4097, 5 * 4096 + 3, 32 * 4096, 500_000, 1_500_000)
KINDS = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest error of one rounded sum, as a share of the largest."""
REPLAYS = 1000


def addends(mesh, numel, dtype, seed):
    """All ranks' tensors, on this rank's device."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=g).to(dtype).to(mesh.device) for _ in range(mesh.world_size)]


def expect(got, parts, unit):
    """Compare with the sum in float64."""
    want = sum(part.double() for part in parts)
    worst = (got.double() - want).abs().max().item()
    assert worst <= unit * want.abs().max().item(), f"off by {worst} at {tuple(got.shape)} {got.dtype}"


def check_sum(mesh):
    """All dtypes and sizes against float64 and the library, equal bits on all ranks, faults in their place, epochs."""
    kernel = OneShotSum(mesh)
    for dtype, unit in KINDS.items():
        for use, numel in enumerate(SIZES):
            parts = addends(mesh, numel, dtype, use)
            mine = parts[mesh.rank].clone()
            got = kernel(mine)
            assert torch.equal(mine, parts[mesh.rank]), "the addend was changed"
            expect(got, parts, unit)
            same_on_all(mesh, got)
            library = mine.clone()
            dist.all_reduce(library, group=mesh.group)
            # two addends have one sum, however it is rounded; of more the library's rings round on the way
            if mesh.world_size == 2:
                assert torch.equal(got, library), "other bits than the library's"
            expect(library, parts, unit * mesh.world_size)
        for value in (math.nan, math.inf):
            parts = addends(mesh, 4096, dtype, 1)
            parts[-1][1000] = value
            got = kernel(parts[mesh.rank])
            assert (~torch.isfinite(got)).nonzero().flatten().tolist() == [1000], "a fault did not stay in its place"
    kernel.check()
    kernel.close()
    for first in (2**16 - 3, 2**31 - 3):
        kernel = OneShotSum(mesh, first_epoch=first)
        for use in range(6):
            parts = addends(mesh, 4096, torch.bfloat16, use)
            expect(kernel(parts[mesh.rank]), parts, KINDS[torch.bfloat16])
        kernel.close()


def check_sum_replays(mesh):
    """Graphs of sums and merges in turn, as a layer has them, with new inputs and now and then a late rank.

    Some of both fetch what follows them, which must change nothing.
    """
    merge, kernel = OneShotMerge(mesh), OneShotSum(mesh)
    steps = [random_partials(mesh.kvp_size, 2, 32, 128, seed=step) for step in range(5)]
    first = mesh.rank - mesh.kvp_rank
    parts = [addends(mesh, 2 * 4096, torch.bfloat16, step) for step in range(5)]
    outs = [step[mesh.kvp_rank].out.to(mesh.device) for step in steps]
    lses = [step[mesh.kvp_rank].lse.to(mesh.device) for step in steps]
    static = Partial(outs[0].clone(), lses[0].clone())
    x = parts[0][mesh.rank].clone()
    following = torch.randn(4096, 4096, dtype=torch.bfloat16, device=mesh.device)

    def layers():
        found = []
        for weight in (None, following, None):
            merged = merge.merge_splits(Splits.of(static), following=weight)
            found += [merged.out, kernel(x), kernel(x[:4096], following)]
        return found

    replay, found = captured(layers)
    wanted = [
        [t.clone() for t in layers_of(layers, static, x, outs[i], lses[i], parts[i][mesh.rank])] for i in range(5)
    ]
    for i in range(5):
        torch.testing.assert_close(wanted[i][0].double().cpu(), truth(steps[i])[0].flatten(1), rtol=1e-5, atol=1e-5)
        expect(wanted[i][1], parts[i], KINDS[torch.bfloat16])
    wrong = torch.zeros((), dtype=torch.int64, device=mesh.device)
    for turn in range(REPLAYS):
        i = turn % 5
        if turn % 250 == 100 and mesh.rank == first:
            torch.cuda._sleep(SLEEP_CYCLES)
        for target, new in ((static.out, outs[i]), (static.lse, lses[i]), (x, parts[i][mesh.rank])):
            target.copy_(new)
        replay()
        for got, want in zip(found, wanted[i], strict=True):
            wrong += (got != want).sum()
    assert wrong.item() == 0, f"{wrong.item()} numbers of {REPLAYS} replays differ from the eager ones"
    same_on_all(mesh, *found[1::3])
    # a graph goes before what it was captured with
    del replay
    for one in (merge, kernel):
        one.check()
        one.close()


def layers_of(layers, static, x, out, lse, addend):
    """Call `layers` with these inputs."""
    for target, new in ((static.out, out), (static.lse, lse), (x, addend)):
        target.copy_(new)
    return layers()


def check_sum_lost(mesh):
    """A rank that does not come ends in an error on the others, and later in one on itself; no GPU hangs."""
    kernel = OneShotSum(mesh, timeout_s=2.0)
    parts = addends(mesh, 4096, torch.bfloat16, 0)
    mine = parts[mesh.rank]
    expect(kernel(mine), parts, KINDS[torch.bfloat16])
    torch.cuda.synchronize()
    mesh.barrier()
    lost = mesh.world_size - 1
    if mesh.rank != lost:
        begin = time.perf_counter()
        assert kernel(mine).isnan().all()
        assert time.perf_counter() - begin < 20.0
        told = raised(lambda: kernel(mine))
        assert f"ranks [{lost}] did not come" in told, told
    mesh.barrier()
    if mesh.rank == lost:
        expect(kernel(mine), parts, KINDS[torch.bfloat16])
        assert kernel(mine).isnan().all()
        assert "did not come in time" in raised(kernel.check)
    kernel.close()


def check_sum_times(mesh):
    """Time of a sum in a graph of twenty, next to the library's."""
    kernel = OneShotSum(mesh)
    for rows in (1, 4, 8, 32, 64, 128):
        y = torch.randn(rows, 4096, dtype=torch.bfloat16, device=mesh.device)
        ours = timed(mesh, lambda y=y: kernel(y))
        library = timed(mesh, lambda y=y: dist.all_reduce(y, group=mesh.group))
        if mesh.rank == 0:
            how = "one kernel" if kernel.fits(y.numel(), y.dtype) else "library"
            told = f"{how} {ours:.2f}, all-reduce of the library {library:.2f}"
            print(f"  sum of {rows} rows of 4,096 bfloat16 ({rows * 8} KiB), us: {told}", flush=True)
    y = torch.randn(1, 4096, dtype=torch.bfloat16, device=mesh.device)
    # more than the cache holds, so that every product reads memory
    weights = [torch.randn(7168, 4096, dtype=torch.bfloat16, device=mesh.device) for _ in range(4)]
    for name, fetch in (("not fetched", False), ("fetched", True)):
        turns = itertools.cycle(weights)

        def summed_and_multiplied(turns=turns, fetch=fetch):
            weight = next(turns)
            return F.linear(kernel(y, weight if fetch else None), weight)

        us = timed(mesh, summed_and_multiplied)
        if mesh.rank == 0:
            print(f"  sum of a row, then a product with 56 MiB that the sum has {name}: {us:.2f} us", flush=True)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(200):
        kernel(y)
    host_us = (time.perf_counter() - begin) * 1e6 / 200
    torch.cuda.synchronize()
    if mesh.rank == 0:
        print(f"  host time of an eager sum: {host_us:.1f} us", flush=True)
    kernel.check()
    kernel.close()


SUM_CHECKS = {
    "sum": check_sum,
    "sum_replays": check_sum_replays,
    "sum_lost": check_sum_lost,
    "sum_times": check_sum_times,
}

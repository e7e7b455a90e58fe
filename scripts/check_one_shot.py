"""Check the merges on real GPUs: all modes; one_shot in all forms, in graphs, with late and lost ranks, and its time.

    torchrun --standalone --nproc-per-node 2 scripts/check_one_shot.py
    torchrun --standalone --nproc-per-node 2 scripts/check_one_shot.py --only lost,times
    torchrun --standalone --nproc-per-node 2 scripts/check_one_shot.py --only sum,sum_replays,sum_lost,sum_times

Every rank makes all ranks' inputs from the same seeds, so it knows the truth without asking; what must be bit-identical
across ranks is compared by hash. Prints one line a check on rank 0 and exits with 1 if any failed on any rank.
"""

import argparse
import math
import sys
import time
import traceback
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

from check_rank_sum import SUM_CHECKS  # noqa: E402
from check_ranks import SLEEP_CYCLES, captured, raised, same_on_all, timed  # noqa: E402
from one_shot_inputs import Workspace, as_splits, random_partials, truth  # noqa: E402

from distdec.graphs import GraphKey, StepGraphs  # noqa: E402
from distdec.merge import MODES, make_merge  # noqa: E402
from distdec.mesh import Mesh, all_gather  # noqa: E402
from distdec.one_shot import OneShotMerge  # noqa: E402
from distdec.ops.one_shot_words_triton import word_width  # noqa: E402
from distdec.ops.partial import Partial  # noqa: E402
from distdec.ops.splits import Splits  # noqa: E402
from distdec.slabs import POLLS_PER_S, Peers, why_not  # noqa: E402

UNITS = {"float32": 0.0, "bfloat16": 2**-8, "float8_e4m3": 2**-4}
"""Largest error of a rounded number, as a share of its row's largest."""
SHAPES = [(1, 32, 128), (3, 9, 80), (37, 28, 64), (2, 71, 64), (5, 8, 256), (256, 64, 128)]


def on(mesh, partial):
    """Copy a partial to this rank's device."""
    return Partial(partial.out.to(mesh.device), partial.lse.to(mesh.device))


def splits_on(mesh, splits):
    """Copy splits to this rank's device."""
    moved = {name: getattr(splits, name).to(mesh.device) for name in ("out", "lse", "ranges")}
    return splits._replace(**moved)


def expect(mesh, merged, want, *, rtol=1e-5, atol=1e-5):
    """Compare with the truth, NaN where the truth has NaN; replicated results have the same bits on all ranks."""
    start, stop = merged.columns
    out, lse = merged.out.double().cpu(), merged.lse.double().cpu()
    torch.testing.assert_close(out, want[0].flatten(1)[:, start:stop], rtol=rtol, atol=atol, equal_nan=True)
    torch.testing.assert_close(lse, want[1], rtol=1e-5, atol=1e-5, equal_nan=True)


def merged_by(merge, mesh, partial, words, **how):
    """Merge a partial as it is, by flags, or as splits that are not joined yet: by words where it is small.

    What does not fit the slab is merged as it is: only that goes through a collective instead.
    """
    mine = on(mesh, partial)
    fits = merge.fits(*partial.out.shape)
    return merge.merge_splits(as_splits(mine), **how) if words and fits else merge(mine, **how)


def by_words(merge, partial):
    """Tell whether a partial, as splits, travels as words."""
    return word_width(merge._slab, as_splits(partial), merge._payload, 0 if merge.replicated else 1) > 0


def check_forms(mesh):
    """Both forms, all transports, joined partials and workspaces, head counts and sizes of all kinds."""
    size, me, seen = mesh.kvp_size, mesh.kvp_rank, []
    for transport, unit in UNITS.items():
        for scatter in (False, True):
            merge = OneShotMerge(mesh, scatter=scatter, transport=transport)
            for tokens, heads, dim in SHAPES:
                partials = random_partials(size, tokens, heads, dim, seed=tokens)
                sinks = torch.linspace(-3.0, 5.0, heads) if tokens == 3 else None
                largest = max(p.out.nan_to_num().abs().max().item() for p in partials)
                atol = 1e-5 + unit * largest
                seen.append(by_words(merge, partials[me]))
                for words in (False, True):
                    on_device = None if sinks is None else sinks.to(mesh.device)
                    merged = merged_by(merge, mesh, partials[me], words, sinks=on_device)
                    expect(mesh, merged, truth(partials, sinks), atol=atol)
                    if not scatter:
                        same_on_all(mesh, merged.out, merged.lse)
            for q_len, kv_heads, group, split_tiles in ((1, 8, 4, 0), (3, 2, 5, 0), (1, 4, 7, 4), (8, 8, 8, 0)):
                g = torch.Generator().manual_seed(q_len)
                spaces = [
                    Workspace([40 - rank, 0, 3 + 5 * rank], 33 + rank, q_len, kv_heads, group, 128, g, split_tiles)
                    for rank in range(size)
                ]
                merged = merge.merge_splits(splits_on(mesh, spaces[me].splits), out_dtype=torch.float32)
                atol = 1e-5 + unit * 5
                expect(mesh, merged, truth([s.partial for s in spaces]), atol=atol)
                if not scatter:
                    same_on_all(mesh, merged.out, merged.lse)
            merge.check()
            merge.close()
    assert any(seen) and not all(seen), "no shape goes by words, or all do"


def check_modes(mesh):
    """All modes and transports against the truth, eager and replayed, with faults; and what `auto` measures."""
    size, me = mesh.kvp_size, mesh.kvp_rank
    for mode, transport in [(mode, name) for mode in MODES for name in UNITS]:
        if transport == "float8_e4m3" and MODES[mode].reduces:
            continue
        merge = make_merge(mode, mesh, transport=transport)
        for tokens, heads, dim in SHAPES:
            partials = random_partials(size, tokens, heads, dim, seed=tokens)
            sinks = torch.linspace(-3.0, 5.0, heads)
            largest = max(p.out.nan_to_num().abs().max().item() for p in partials)
            atol = 1e-5 + UNITS[transport] * largest * (size if MODES[mode].reduces else 1)
            mine, on_device = on(mesh, partials[me]), sinks.to(mesh.device)
            merged = merge(mine, sinks=on_device)
            expect(mesh, merged, truth(partials, sinks), atol=atol)
            if merge.replicated:
                same_on_all(mesh, merged.out, merged.lse)
            replay, again = captured(lambda m=merge, p=mine, s=on_device: m(p, sinks=s))
            replay()
            assert torch.equal(again.out, merged.out) and torch.equal(again.lse, merged.lse), "a replay has other bits"
            mine.out[0, 1, 2] += math.nan if me == size - 1 else 0.0
            bad = merge(mine)
            assert bad.lse[0, 1].isnan() and not bad.lse[1:].isnan().any(), "a fault did not stay in its token"
        if isinstance(merge, OneShotMerge):
            merge.close()
    for replicated in (True, False):
        merge = make_merge("auto", mesh, replicated=replicated)
        if mesh.rank == 0:
            print(f"  {merge.reason}", flush=True)
        if isinstance(merge, OneShotMerge):
            merge.close()


def check_many_rows(mesh):
    """More rows than programs, call sizes that rise and fall, and calls that are too large for the slab."""
    merge = OneShotMerge(mesh)
    channels = merge._slab.channels
    for step, tokens in enumerate([1, channels // 32 * 4, 3, 0, channels // 4, 2, 1, 600, 1]):
        heads = 32 if tokens < 600 else 64
        partials = random_partials(mesh.kvp_size, tokens, heads, 128, seed=step) if tokens else None
        if partials is None:
            empty = Partial(torch.zeros(0, heads, 128), torch.zeros(0, heads))
            assert merge(on(mesh, empty)).out.shape == (0, heads * 128)
            continue
        assert merge.fits(tokens, heads, 128) == (tokens < 600)
        merged = merge(on(mesh, partials[mesh.kvp_rank]))
        expect(mesh, merged, truth(partials))
        same_on_all(mesh, merged.out, merged.lse)
    merge.check()
    merge.close()


def check_not_finite(mesh):
    """NaN in empty partials is ignored; NaN and inf in valid ones fail that row on every rank, in both forms."""
    for scatter, words in ((False, False), (True, False), (False, True), (True, True)):
        merge = OneShotMerge(mesh, scatter=scatter)
        for name, value in (("out", math.nan), ("out", math.inf), ("lse", math.nan), ("lse", math.inf)):
            clean = random_partials(mesh.kvp_size, 5, 8, 128, seed=7)
            assert by_words(merge, clean[0])
            out, lse = truth(clean)
            out[2, 1], lse[2, 1] = math.nan, math.nan
            tensor = getattr(clean[1], name)
            tensor[(2, 1, -1)[: tensor.dim()]] = value
            expect(mesh, merged_by(merge, mesh, clean[mesh.kvp_rank], words), (out, lse))
        merge.close()


def check_epochs(mesh):
    """Epochs run past 2^16 and past the end of int32, by flags, by words and by both in turns."""
    for first in (2**16 - 3, 2**31 - 3):
        for turns in ("ffffff", "wwwwww", "wfwwff"):
            merge = OneShotMerge(mesh, first_epoch=first)
            for step, turn in enumerate(turns):
                partials = random_partials(mesh.kvp_size, 2, 8, 64, seed=step)
                assert by_words(merge, partials[0])
                expect(mesh, merged_by(merge, mesh, partials[mesh.kvp_rank], turn == "w"), truth(partials))
            merge.close()


def check_delays(mesh):
    """Either rank late, by far or by a little, with many calls in flight on both: by flags, by words, in turns."""
    merge = OneShotMerge(mesh)
    calls = [random_partials(mesh.kvp_size, 1 + step % 5, 16, 128, seed=step) for step in range(12)]
    assert by_words(merge, calls[0][0])
    mine = [on(mesh, partials[mesh.kvp_rank]) for partials in calls]
    splits = [as_splits(partial) for partial in mine]
    g = torch.Generator().manual_seed(mesh.rank)
    for late in range(mesh.kvp_size):
        for turns in ("f", "w", "wfwwf"):
            results = []
            if mesh.kvp_rank == late:
                torch.cuda._sleep(SLEEP_CYCLES)
            for step in range(300):
                if step % 7 == 0:
                    torch.cuda._sleep(int(torch.randint(100_000, (1,), generator=g)))
                i = step % len(mine)
                words = turns[step % len(turns)] == "w"
                results.append(merge.merge_splits(splits[i]) if words else merge(mine[i]))
            torch.cuda.synchronize()
            for step, merged in enumerate(results):
                expect(mesh, merged, truth(calls[step % len(calls)]))
    merge.check()
    merge.close()


def check_replays(mesh):
    """Two replays back to back with changed inputs, replays between eager calls, and 200 replays with a late rank.

    Replays go by words, eager calls by flags; then replays by flags too.
    """
    for scatter, words in ((False, True), (True, True), (False, False)):
        merge = OneShotMerge(mesh, scatter=scatter)
        merge._slab = merge._slab if words else merge._slab._replace(words=0)
        g = torch.Generator().manual_seed(1)
        spaces = [
            [Workspace([30 + step, 2, 9 - step], 16, 1, 4, 4, 128, g) for _ in range(mesh.kvp_size)]
            for step in range(6)
        ]
        ready = [splits_on(mesh, step[mesh.kvp_rank].splits) for step in spaces]
        size = max(s.out.shape[0] for s in ready)
        static = Splits(
            torch.full((size, *ready[0].out.shape[1:]), math.nan, device=mesh.device),
            torch.full((size, ready[0].lse.shape[1]), math.nan, device=mesh.device),
            ready[0].ranges.clone(),
            *ready[0][3:],
        )
        assert words == (word_width(merge._slab, static, torch.float32, int(scatter)) > 0)
        inputs = (static.out, static.lse, static.ranges)
        for tensor, new in zip(inputs, ready[0][:3], strict=True):
            tensor[: new.shape[0]] = new
        graphs = StepGraphs(mesh.device, barrier=mesh.barrier, checks=[merge.check], keep=[merge])
        key = GraphKey(3)
        graphs.capture({key: (lambda *tensors, m=merge, s=static: m.merge_splits(Splits(*tensors, *s[3:])), inputs)})
        got = []
        for turn in range(200):
            if turn == 100 and mesh.kvp_rank == 0:
                torch.cuda._sleep(SLEEP_CYCLES)
            merged = graphs.replay(key, *ready[turn % 6][:3])
            got.append(merged._replace(out=merged.out.clone(), lse=merged.lse.clone()))
            if turn % 50 == 49:
                partials = random_partials(mesh.kvp_size, 7, 16, 128, seed=turn)
                expect(mesh, merge(on(mesh, partials[mesh.kvp_rank])), truth(partials))
        torch.cuda.synchronize()
        for turn, merged in enumerate(got):
            expect(mesh, merged, truth([s.partial for s in spaces[turn % 6]]))
        if not scatter:
            same_on_all(mesh, *(m.out for m in got))
        graphs.close()
        merge.close()


def check_lost(mesh):
    """A rank that does not come ends in an error on the others, and later in one on itself; no GPU hangs."""
    for words in (False, True):
        lose_a_rank(mesh, words)


def lose_a_rank(mesh, words):
    """The last rank misses a call."""
    merge = OneShotMerge(mesh, timeout_s=2.0)
    partials = random_partials(mesh.kvp_size, 4, 32, 128)
    assert by_words(merge, partials[0])
    call = lambda: merged_by(merge, mesh, partials[mesh.kvp_rank], words)  # noqa: E731
    expect(mesh, call(), truth(partials))
    mesh.barrier()
    lost = mesh.kvp_size - 1
    if mesh.kvp_rank != lost:
        begin = time.perf_counter()
        merged = call()
        torch.cuda.synchronize()
        waited = time.perf_counter() - begin
        assert merged.out.isnan().all() and merged.lse.isnan().all()
        told = raised(call)
        assert f"kvp ranks [{lost}] did not come" in told, told
        if mesh.rank == 0:
            print(f"  gave up after {waited:.2f} s: {2.0 * POLLS_PER_S / waited:,.0f} polls a second", flush=True)
        # a launch that the host check did not stop neither waits nor pushes
        merge._alarm[0] = 0
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        assert time.perf_counter() - begin < 1.0
    mesh.barrier()
    if mesh.kvp_rank == lost:
        expect(mesh, call(), truth(partials))
        assert call().out.isnan().all()
        assert "did not come in time" in raised(merge.check)
    begin = time.perf_counter()
    merge.close()
    assert time.perf_counter() - begin < 30.0


def uniform_splits(mesh, rows, q_heads, kv_heads, num_splits, dim=128):
    """Splits of equal rows, `num_splits` a unit."""
    units, group = rows * kv_heads, q_heads // kv_heads
    out = torch.randn(units * (num_splits + 1), group, dim, device=mesh.device)
    lse = torch.randn(units * (num_splits + 1), group, device=mesh.device)
    begin = torch.arange(units, device=mesh.device) * (num_splits + 1)
    ranges = torch.stack([begin, begin + num_splits], 1).to(torch.int32)
    return Splits(out, lse, ranges, rows, kv_heads, 1, group, units * num_splits)


def check_times(mesh):
    """Time of the kernel with the splits' join; the aim is 6 us up to 64 KiB. And the host's time of a call."""
    merges = {name: OneShotMerge(mesh, transport=name) for name in UNITS}
    merges["scatter"] = OneShotMerge(mesh, scatter=True)
    # small calls in float32 go by words everywhere else
    merges["float32 by flags"] = OneShotMerge(mesh)
    merges["float32 by flags"]._slab = merges["float32 by flags"]._slab._replace(words=0)
    sizes = [(1, 32, 8, 16), (1, 32, 8, 32), (1, 32, 8, 49), (1, 64, 8, 49)]
    sizes += [(4, 32, 8, 12), (8, 32, 8, 6), (32, 32, 8, 1)]
    for rows, q_heads, kv_heads, num_splits in sizes:
        splits = uniform_splits(mesh, rows, q_heads, kv_heads, num_splits)
        told = []
        for name, merge in merges.items():
            us = timed(mesh, lambda m=merge, s=splits: m.merge_splits(s, out_dtype=torch.bfloat16))
            told.append(f"{name} {us:.2f}")
        if mesh.rank == 0:
            kib = rows * q_heads * 128 * 4 / 1024
            print(f"  rows {rows} x {q_heads} heads ({kib:.0f} KiB), {num_splits} splits, us: " + ", ".join(told))
    splits = uniform_splits(mesh, 1, 32, 8, 16)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(200):
        merges["float32"].merge_splits(splits)
    host_us = (time.perf_counter() - begin) * 1e6 / 200
    torch.cuda.synchronize()
    if mesh.rank == 0:
        print(f"  host time of an eager call: {host_us:.1f} us", flush=True)
    for merge in merges.values():
        merge.check()
        merge.close()


CHECKS = {
    "modes": check_modes,
    "forms": check_forms,
    "rows": check_many_rows,
    "finite": check_not_finite,
    "epochs": check_epochs,
    "delays": check_delays,
    "replays": check_replays,
    "lost": check_lost,
    "times": check_times,
    **SUM_CHECKS,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CHECKS), help="checks to run, by name")
    args = parser.parse_args()
    mesh = Mesh.create()
    reason = why_not(Peers.kvp(mesh))
    if reason is not None:
        sys.exit(f"one_shot is not possible here: {reason}")
    failed = []
    for name in args.only.split(","):
        begin = time.perf_counter()
        fault = ""
        try:
            CHECKS[name](mesh)
        except Exception:
            fault = traceback.format_exc()
        rows = torch.empty(mesh.world_size, dtype=torch.int64)
        all_gather(rows, torch.tensor([int(bool(fault))]), mesh.control_group)
        if fault:
            print(f"rank {mesh.rank}, {name}:\n{fault}", flush=True)
        if mesh.rank == 0:
            verdict = "FAILED" if rows.any() else "ok"
            print(f"{name}: {verdict} ({time.perf_counter() - begin:.1f} s)", flush=True)
        if rows.any():
            failed.append(name)
    begin = time.perf_counter()
    mesh.close()
    assert time.perf_counter() - begin < 30.0, "ending the process group took too long"
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

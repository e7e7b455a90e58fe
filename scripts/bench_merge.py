"""Merges of partial attention across ranks, with the join of the local splits included, beside other people's.

    torchrun --standalone --nproc-per-node 2 scripts/bench_merge.py --out out/merge.jsonl --seconds 200

Every variant starts from the splits that decode leaves in its workspace (two to sixteen a unit) and ends with merged
rows: on every rank (replicated), or a share of the columns on each (scattered). `payload_kb` is one rank's output rows
in float32. Times are the maximum over the ranks. One rank alone runs only the join.

Sections: graph (replayed), eager (enqueued call by call), floor (the bare collectives and an empty barrier, which no
merge made of them can beat).
"""

import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from bench_merge_inputs import Splits
from bench_merge_peers import Peer, peers, pointwise
from bench_run import Bench, Variant, open_mesh, parse, run_sections
from bench_timing import compare, host_us
from benchlib import Refused

from distdec import merge as merges
from distdec.merge_modes import TRANSPORTS
from distdec.mesh import Mesh
from distdec.ops.splits import Splits as WorkspaceSplits

# rows and query heads: 4 KB, 16 KB, 64 KB, 256 KB, 1 MB, 4 MB of float32 output a rank
SIZES = [(1, 8), (1, 32), (4, 32), (16, 32), (64, 32), (256, 32), (1, 64), (8, 64)]
CANONICAL = "two all-reduces"


class Merges:
    """One merge object per mode and transport, made once: they own slabs and buffers."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.made: dict[tuple[str, str], Any] = {}

    def get(self, mode: str, transport: str = "float32") -> Any:
        """Return the merge, or raise Refused where the machine has no such mode. Collective."""
        key = (mode, transport)
        if key not in self.made:
            try:
                self.made[key] = merges.make_merge(mode, self.mesh, transport=transport)
            except (RuntimeError, ValueError) as error:
                self.made[key] = error
        if isinstance(self.made[key], Exception):
            raise Refused(str(self.made[key])) from self.made[key]
        return self.made[key]

    def close(self) -> None:
        for merge in self.made.values():
            if hasattr(merge, "close"):
                merge.close()


def our_variants(owned: Merges, splits: Splits, num_ranks: int) -> list[Variant]:
    """Return every mode of ours, and the modes again with each compressed transport that they take."""
    variants = []
    for mode in [*merges.MODES, "auto"]:
        for transport, dtype in TRANSPORTS.items():
            if mode == "auto" and transport != "float32":
                continue
            if mode != "auto" and dtype.itemsize == 1 and merges.MODES[mode].reduces:
                continue
            variants.append(our_variant(owned, splits, num_ranks, mode, transport))
    return variants


def our_variant(owned: Merges, splits: Splits, num_ranks: int, mode: str, transport: str) -> Variant:
    """Return one mode: fused with the join of the splits where the merge can, else after it."""

    def call(copy: int):
        merge = owned.get(mode, transport)
        fits = getattr(merge, "fits", None)
        if fits is not None and fits(splits.rows, splits.num_q_heads, splits.dim) and splits.out.is_cuda:
            sizes = (splits.rows, splits.num_kv_heads, 1, splits.group)
            left = WorkspaceSplits(splits.out, splits.lse2, splits.ranges, *sizes, splits.num_spans)
            return merge.merge_splits(left)
        return merge(splits.combine())

    def check(merged) -> dict[str, Any]:
        out, lse = splits.truth(num_ranks)
        start, stop = merged.columns
        stop = min(stop, out.shape[1])
        found = compare(merged.out[:, : stop - start], out[:, start:stop], TRANSPORTS[transport], merged.lse, lse)
        merge = owned.get(mode, transport)
        if merge.replicated and num_ranks > 1:
            # raises where any rank holds other bits
            merge.check_replicated(merged)
        return {**found, "merge": merge.mode, "reason": merge.reason}

    config = {"transport": transport}
    name = mode if transport == "float32" else f"{mode} {transport}"
    return Variant(name, call, check, "distdec", config, baseline=CANONICAL)


def peer_variant(peer: Peer, splits: Splits, mesh: Mesh) -> Variant:
    """Return one peer, the join of the splits included."""

    def call(copy: int):
        out, lse = splits.combine()
        return peer.merge(out.flatten(0, 1), lse.flatten())

    def check(rows: torch.Tensor) -> dict[str, Any]:
        want = splits.truth(mesh.kvp_size)[0].view(-1, splits.dim)
        if peer.scattered:
            want = want.view(mesh.kvp_size, -1, splits.dim)[mesh.kvp_rank]
        return compare(rows, want, torch.float32)

    return Variant(peer.name, call, check, "torch", peer=True, baseline=CANONICAL)


def join_variant(splits: Splits) -> Variant:
    """Return the join of the local splits alone: what one GPU does."""

    def check(partial) -> dict[str, Any]:
        alone = splits.local_truth()
        return compare(partial.out.flatten(1), alone[0], torch.float32, partial.lse, alone[1])

    return Variant("join of local splits alone", lambda copy: splits.combine(), check, "distdec", baseline=CANONICAL)


def sized(bench: Bench) -> list[Splits]:
    """Return the inputs of all sizes; splits a unit fall as rows grow, as decode's schedule has it."""
    rank, device = bench.mesh.kvp_rank, bench.device
    if bench.smoke:
        return [Splits(2, 16, 3, rank, device)]
    return [
        Splits(rows, heads, max(1, min(16, 396 // (8 * rows))), rank, device)
        for rows, heads in SIZES
        if rows * heads % bench.mesh.kvp_size == 0
    ]


def describe(splits: Splits) -> dict[str, Any]:
    return {
        "rows": splits.rows,
        "num_q_heads": splits.num_q_heads,
        "head_dim": splits.dim,
        "splits": splits.num_splits,
        "payload_kb": splits.payload_bytes // 1024,
        "dtype": "float32",
    }


def measure_merges(bench: Bench, section: str, *, eager: bool) -> None:
    """Measure ours and the peers at every size."""
    owned = Merges(bench.mesh)
    compiled = bench.device.type == "cuda" and not bench.args.no_compile
    parts = pointwise(compiled)
    for splits in sized(bench):
        config = describe(splits)
        with bench.point(section, config) as go:
            if not go:
                continue
            variants = [join_variant(splits)]
            if bench.mesh.world_size > 1:
                variants += [peer_variant(peer, splits, bench.mesh) for peer in peers(bench.mesh, splits, parts)]
                variants += our_variants(owned, splits, bench.mesh.kvp_size)
            timer = bench.timer(sample_us=2000.0, max_calls=100, eager=eager)
            bench.measure(section, config, variants, timer=timer, compiled_pointwise=compiled)
    owned.close()


def graph(bench: Bench) -> None:
    """Merges as a captured step runs them."""
    measure_merges(bench, "graph", eager=False)


def eager(bench: Bench) -> None:
    """Merges enqueued call by call: the device waits for the host."""
    measure_merges(bench, "eager", eager=True)


def floor(bench: Bench) -> None:
    """The bare collectives over the same payload."""
    if bench.mesh.world_size == 1:
        return
    group, size, device = bench.mesh.kvp_group, bench.mesh.kvp_size, bench.device
    for num_bytes in (4096,) if bench.smoke else (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20):
        config = {"payload_kb": num_bytes // 1024, "dtype": "float32"}
        with bench.point("floor", config) as go:
            if not go:
                continue
            count = num_bytes // 4 // size * size
            mine = torch.zeros(count, device=device)
            wide, narrow = torch.zeros(count * size, device=device), torch.zeros(count // size, device=device)
            calls = {
                "all-reduce sum": lambda x=mine: dist.all_reduce(x, group=group),
                "all-reduce max": lambda x=mine: dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group),
                "all-gather": lambda x=mine, y=wide: dist.all_gather_into_tensor(y, x, group=group),
                "reduce-scatter": lambda x=mine, y=narrow: dist.reduce_scatter_tensor(y, x, group=group),
                "all-to-all": lambda x=mine, y=wide: dist.all_to_all_single(y[: len(x)], x, group=group),
            }
            variants = [bare(name, run) for name, run in calls.items()]
            bench.measure("floor", config, variants, timer=bench.timer(sample_us=2000.0))


def bare(name: str, run: Any) -> Variant:
    """Return a collective of zeros; there is nothing to check but that it ends."""
    return Variant(name, lambda copy: run(), lambda _: {"checked": False}, "torch", peer=True)


def host(bench: Bench) -> None:
    """Microseconds of the host per eager merge, one row of 32 heads."""
    if bench.mesh.world_size == 1:
        return
    owned = Merges(bench.mesh)
    splits = sized(bench)[0]
    passed = bench.checked("host", describe(splits), our_variants(owned, splits, bench.mesh.kvp_size))
    for name, (variant, found) in passed.items():
        timing = host_us(lambda call=variant.call: call(0), bench.device, calls=5 if bench.smoke else 50)
        fields = {**asdict(timing), **found, "backend": variant.backend}
        bench.recorder.write("host", name, {**describe(splits), **variant.config}, **fields)
    owned.close()


SECTIONS = {"graph": graph, "eager": eager, "host": host, "floor": floor}


def add_arguments(parser) -> None:
    parser.add_argument("--no-compile", action="store_true", help="leave the peers' pointwise parts uncompiled")


def main(argv: list[str] | None = None) -> int:
    args = parse(__doc__, list(SECTIONS), argv, add_arguments)
    with open_mesh(args) as mesh:
        return run_sections(Bench("bench_merge", args, mesh), SECTIONS)


if __name__ == "__main__":
    sys.exit(main())

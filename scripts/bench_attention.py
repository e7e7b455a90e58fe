"""The attention layer (store, decode, merge) on one GPU and on several, through the real allocator's tables.

    torchrun --standalone --nproc-per-node 2 scripts/bench_attention.py --out out/attention.jsonl --seconds 240
    python3 scripts/bench_attention.py --sections layer,graphs

Every rank runs the one-GPU layer over whole sequences too, so that the speed-up is taken in one process and run.
Sections: layer (speed-up over contexts and batches), breakeven (small contexts: from where on sharding pays), eager
(without graphs), graphs (300 steps: replay gives the bits of the eager call), overlap (the layer with each value of
parallel.overlap).
"""

import sys
from dataclasses import asdict, replace
from typing import Any

import torch
from bench_graphs import replay_steps
from bench_inputs import RAGGED16, Inputs, Shape
from bench_merge import Merges
from bench_run import Bench, Variant, open_mesh, parse, run_sections
from bench_timing import compare, host_us, rotations_for
from torch import Tensor

from distdec.attention import DistributedAttention
from distdec.mesh import Mesh

KIB = 1024
ONE = "1 GPU"


def layer_variant(
    inputs: Inputs, merge: Any = "auto", name: str = "attention layer", q: Tensor | None = None
) -> Variant:
    """Return the layer with a merge, a mode's name or an object; `q` replaces the queries."""
    q = inputs.q if q is None else q
    layer = DistributedAttention(inputs.mesh, inputs.cache, merge=merge)
    mode = layer.merge.mode

    def call(copy: int):
        return layer(q, inputs.k_new, inputs.v_new, inputs.batch, copy)

    def check(merged) -> dict[str, Any]:
        out, lse = inputs.reference(q)
        start, stop = merged.columns
        stop = min(stop, out[0].numel())
        found = compare(merged.out[:, : stop - start], out.flatten(1)[:, start:stop], q.dtype, merged.lse, lse)
        if layer.merge.replicated and inputs.mesh.kvp_size > 1:
            # raises where any rank holds other bits
            layer.merge.check_replicated(merged)
        return found

    local = inputs.cache.local_tokens()
    num_bytes = inputs.shape.kv_bytes * local // max(1, inputs.shape.tokens)
    fields = {
        "own_apart": inputs.batch.own_apart,
        "merge": mode,
        "kvp": inputs.mesh.kvp_size,
        "local_tokens": local,
        **inputs.describe(),
    }
    return Variant(name, call, check, inputs.ops.name, {"merge": mode}, num_bytes=num_bytes, fields=fields)


def refused_variant(name: str, reason: str) -> Variant:
    """Return a mode that this machine does not have, so that the records say so."""
    from benchlib import Refused

    def call(copy: int):
        raise Refused(reason)

    return Variant(name, call, dict, "distdec", {"merge": name})


def layers(bench: Bench, owned: Merges, shape: Shape, modes: list[str]) -> tuple[list[Variant], list[Inputs]]:
    """Return the one-GPU layer and the sharded layer with each merge mode, over the same sequences."""
    copies = 2 if bench.smoke else rotations_for(shape.kv_bytes // bench.mesh.kvp_size)
    whole = Inputs(Mesh.single(bench.device), shape, backend=bench.backend, copies=copies, own_apart=True)
    variants = [layer_variant(whole, "auto", ONE)]
    variants[0].config = {"merge": "none"}
    made = [whole]
    if bench.mesh.world_size > 1:
        shard = Inputs(bench.mesh, shape, backend=bench.backend, copies=copies, own_apart=True)
        # the same queries: made from the same seed in both, but the one-GPU inputs came first
        shard.q.copy_(whole.q)
        made.append(shard)
        for mode in modes:
            name = f"{bench.mesh.kvp_size} GPUs {mode}"
            try:
                variant = layer_variant(shard, owned.get(mode), name)
            except RuntimeError as error:
                variant = refused_variant(name, str(error))
            variants.append(replace(variant, baseline=ONE))
    return variants, made


def layer(bench: Bench) -> None:
    """Speed-up of the sharded layer over contexts and batches."""
    points = [(1, 32), (1, 128), (1, 512), (8, 8), (8, 32), (8, 128), (32, 8), (1, 64), (1, 256), (32, 32)]
    shapes = [Shape((context * KIB,) * batch) for batch, context in points]
    shapes.insert(3, Shape((512 * KIB,), num_q_heads=64))
    shapes.insert(4, Shape(RAGGED16))
    if bench.smoke:
        shapes = [Shape((300, 170), num_q_heads=8, num_kv_heads=2, head_dim=64)]
    measure_layers(bench, "layer", shapes, bench.args.modes.split(","))


def breakeven(bench: Bench) -> None:
    """Small contexts at batch 1, and the context from which on the sharded layer is faster."""
    contexts = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64)
    shapes = [Shape((256 if bench.smoke else context * KIB,)) for context in contexts]
    found = measure_layers(bench, "breakeven", shapes[:2] if bench.smoke else shapes, ["all_gather", "one_shot"])
    for name in sorted({name for times in found.values() for name in times} - {ONE}):
        points = [
            (tokens, times[ONE] - times[name]) for tokens, times in sorted(found.items()) if {ONE, name} <= set(times)
        ]
        told = crossing(points)
        value = {"break_even": told, "gain_us": [[tokens, round(gain, 2)] for tokens, gain in points]}
        bench.recorder.write("breakeven", name, {"batch": 1}, "derived", value=value)


def crossing(points: list[tuple[int, float]]) -> str:
    """Say from how many tokens on the gain stays positive; points are (tokens, us gained), ascending.

    Example: [(4096, -2.0), (8192, 2.0)] crosses at 6144.
    """
    if not points:
        return "not measured"
    if points[-1][1] <= 0:
        return f"above {points[-1][0]} tokens"
    after = len(points) - 1
    while after > 0 and points[after - 1][1] > 0:
        after -= 1
    if after == 0:
        return f"at most {points[0][0]} tokens"
    (low, loss), (high, gain) = points[after - 1], points[after]
    return f"{low + (high - low) * -loss / (gain - loss):.0f} tokens"


def measure_layers(bench: Bench, section: str, shapes: list[Shape], modes: list[str]) -> dict[int, dict[str, float]]:
    """Measure all shapes; return the median us by number of tokens and variant."""
    owned = Merges(bench.mesh)
    found: dict[int, dict[str, float]] = {}
    for shape in shapes:
        with bench.point(section, shape.config()) as go:
            if go:
                variants, made = layers(bench, owned, shape, modes)
                ceiling = bench.meter.call(made[0].pools(), shape.kv_bytes)
                timer = bench.timer(rotations=made[0].copies)
                times = bench.measure(section, shape.config(), variants, ceiling=ceiling, timer=timer)
                found[shape.tokens] = {name: timing.median_us for name, timing in times.items()}
                if bench.mesh.rank == 0 and ONE in times:
                    told = {n: round(times[ONE].median_us / t.median_us, 3) for n, t in times.items() if n != ONE}
                    print(f"SPEED-UP {shape.config()['batch']} x {shape.config()['context']}: {told}", flush=True)
                del variants, made
    owned.close()
    return found


def overlap(bench: Bench) -> None:
    """The layer on one GPU and on all with `parallel.overlap` none and store; before a product also with fetch."""
    owned = Merges(bench.mesh)
    shapes = [Shape((context * KIB,) * batch) for context in (8, 32) for batch in (1, 8, 32)]
    if bench.smoke:
        shapes = [Shape((300, 170), num_q_heads=8, num_kv_heads=2, head_dim=64)]
    mode = bench.args.modes.split(",")[0]
    for shape in shapes:
        with bench.point("overlap", shape.config()) as go:
            if go:
                copies = 2 if bench.smoke else rotations_for(shape.kv_bytes // bench.mesh.kvp_size)
                meshes = {ONE: (Mesh.single(bench.device), "auto")}
                if bench.mesh.world_size > 1:
                    meshes[f"{bench.mesh.kvp_size} GPUs"] = (bench.mesh, owned.get(mode))
                variants = []
                for name, (mesh, merge) in meshes.items():
                    for value in ("none", "store"):
                        inputs = Inputs(mesh, shape, backend=bench.backend, copies=copies, own_apart=value == "store")
                        variants.append(layer_variant(inputs, merge, f"{name} {value}"))
                        variants[-1].config["overlap"] = value
                    variants[-1].baseline = f"{name} none"
                if len(meshes) > 1:
                    variants += projected_variants(inputs, merge, name)
                bench.measure("overlap", shape.config(), variants, timer=bench.timer(rotations=copies))
    owned.close()


def projected_variants(inputs: Inputs, merge: Any, name: str) -> list[Variant]:
    """Return the layer and the product behind it, without and with its weight fetched during the merge."""
    width, q = inputs.shape.num_q_heads * inputs.shape.head_dim, inputs.q
    columns = width // inputs.mesh.kvp_size
    weights = [torch.randn(width, columns, dtype=q.dtype, device=q.device) for _ in range(inputs.copies)]
    layer = DistributedAttention(inputs.mesh, inputs.cache, merge=merge)
    made = []
    for value in ("store", "both"):

        def call(copy: int, fetched: bool = value == "both"):
            weight = weights[copy]
            following = weight if fetched else None
            merged = layer(q, inputs.k_new, inputs.v_new, inputs.batch, copy, following=following)
            return merged, torch.nn.functional.linear(merged.out[:, :columns], weight)

        variant = layer_variant(inputs, merge, f"{name} {value}, product")
        variant.call, variant.check = call, lambda results, check=variant.check: check(results[0])
        variant.config["overlap"] = value
        made.append(variant)
    made[1].baseline = made[0].name
    return made


def eager(bench: Bench) -> None:
    """The layer enqueued call by call, and what the host spends on it."""
    owned = Merges(bench.mesh)
    shape = Shape((300,), 8, 2, 64) if bench.smoke else Shape((8 * KIB,))
    with bench.point("eager", shape.config()) as go:
        if go:
            variants, made = layers(bench, owned, shape, bench.args.modes.split(","))
            timer = bench.timer(rotations=made[0].copies, eager=True)
            bench.measure("eager", shape.config(), variants, timer=timer)
            for name, (variant, found) in bench.checked("host", shape.config(), variants).items():
                timing = host_us(lambda call=variant.call: call(0), bench.device, calls=5 if bench.smoke else 50)
                config, fields = {**shape.config(), **variant.config}, {**asdict(timing), **found, **variant.fields}
                bench.recorder.write("host", name, config, backend=variant.backend, **fields)
    owned.close()


def graphs(bench: Bench) -> None:
    """Replays across chunk boundaries, against the eager call: same bits at each of 300 steps."""
    owned = Merges(bench.mesh)
    modes = ["auto"] if bench.mesh.world_size == 1 else [*bench.args.modes.split(",")]
    for mode in modes:
        with bench.point("graphs", {"mode": mode}) as go:
            if go:
                try:
                    merge = owned.get(mode)
                except RuntimeError as error:
                    bench.recorder.write("graphs", mode, {"mode": mode}, "unavailable", reason=str(error))
                    continue
                for own_apart in (False, True):
                    replay_steps(bench, merge, mode, 8 if bench.smoke else 300, own_apart)
    owned.close()


SECTIONS = {"layer": layer, "breakeven": breakeven, "eager": eager, "graphs": graphs, "overlap": overlap}


def add_arguments(parser) -> None:
    parser.add_argument("--modes", default="one_shot,all_gather,all_reduce,auto", help="merge modes of the layer")


def main(argv: list[str] | None = None) -> int:
    args = parse(__doc__, list(SECTIONS), argv, add_arguments)
    with open_mesh(args) as mesh:
        return run_sections(Bench("bench_attention", args, mesh), SECTIONS)


if __name__ == "__main__":
    sys.exit(main())

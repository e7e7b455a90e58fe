"""The landscape of decode's launch parameters, for fitting the cost rule: times per shape, and the best of each."""

from dataclasses import replace
from typing import Any

import torch
from bench_inputs import RAGGED16, Inputs, Shape
from bench_run import Bench, Variant, watch_plans
from bench_timing import Timing, compare

from distdec.ops.backends import OpsBackend, get_backend

# (tokens of a table's tile, BLOCK_N, warps, stages)
KERNELS = [
    (128, 128, 4, 3),
    (128, 128, 8, 3),
    (128, 128, 8, 4),
    (128, 64, 4, 3),
    (128, 64, 4, 4),
    (128, 64, 8, 3),
    (128, 32, 4, 4),
]
SHAPES = [
    Shape((8192,)),
    Shape((32768,)),
    Shape((131072,)),
    Shape(RAGGED16),
    Shape((8192,) * 8),
    Shape((32768,) * 8),
    Shape((8192,) * 32),
    Shape((16384,)),
    Shape((65536,)),
    Shape((524288,)),
    Shape((8192,), num_q_heads=64),
    Shape((131072,), num_q_heads=64),
    Shape((131072,), num_q_heads=64, q_len=8),
]


def sweep(bench: Bench) -> None:
    """Time decode at every shape: first all kernels at few spans, then all spans for the three fastest kernels."""
    kernels, shapes = KERNELS, SHAPES
    if bench.smoke:
        kernels, shapes = [(64, 64, 4, 3), (128, 64, 4, 3)], [Shape((256, 300, 40), 4, 2, 64, dtype="float32")]
    for shape in shapes:
        with bench.point("sweep", shape.config()) as go:
            if go:
                sweep_shape(bench, shape, kernels)


def sweep_shape(bench: Bench, shape: Shape, kernels: list[tuple[int, int, int, int]]) -> None:
    """Sweep one shape and print its five fastest launches."""
    own = get_backend(bench.backend, bench.device)
    tiles = sorted({kernel[0] for kernel in kernels})
    made = {tile: bench.inputs(shape, backend=replace(own, preferred_tile_tokens=tile)) for tile in tiles}
    # the cost rule's own launch needs tables cut at its own tile
    first = made.get(own.preferred_tile_tokens) or bench.inputs(shape)
    num_sms = 132
    if bench.device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(bench.device).multi_processor_count
    units = len(shape.lengths) * shape.num_kv_heads
    spans = span_choices(units, num_sms)
    few = [spans[0], spans[len(spans) // 2], spans[-1]] if not bench.smoke else spans[:1]
    with watch_plans() as plans:
        default(first).call(0)
    rule = plans[-1] if plans else {}
    timer = bench.timer(rotations=first.copies, rounds=5, sample_us=400)
    ceiling = bench.meter.call(first.pools(), shape.kv_bytes)
    round_one = [launch(made[k[0]], own, k, count, rule) for k in kernels for count in few]
    times = bench.measure(
        "sweep",
        shape.config(),
        [default(first), *round_one],
        ceiling=ceiling,
        timer=timer,
        **first.describe(),
    )
    ranked = sorted((v for v in round_one if v.name in times), key=lambda v: times[v.name].median_us)
    fastest: dict[Any, None] = {}
    for variant in ranked:
        fastest.setdefault(variant.config["kernel"])
    best = [tuple(int(x) for x in kernel.split("/")) for kernel in list(fastest)[:3]]
    more = [launch(made[k[0]], own, k, count, rule) for k in best for count in spans if count not in few]
    times.update(bench.measure("sweep", shape.config(), more, ceiling=ceiling, timer=timer, **first.describe()))
    report(bench, shape, times)


def span_choices(units: int, num_sms: int) -> list[int]:
    """Return multiples of the multiprocessors (stream-K) and of the units (uniform split), ascending.

    Example: 8 units on 132 multiprocessors: 132, 264, 396, 528, 792 and 8 x (16, 33, 49, 66, 99).
    """
    waves = (1, 2, 3, 4, 6)
    choices = {num_sms * wave for wave in waves}
    choices |= {units * max(1, num_sms * wave // units) for wave in waves}
    return sorted(choices)


def launch(
    inputs: Inputs, own: OpsBackend, kernel: tuple[int, int, int, int], num_spans: int, rule: dict[str, Any]
) -> Variant:
    """Return decode with one launch in place of the cost rule's, `rule`."""
    tile, block_n, warps, stages = kernel
    shape, q, pools, tables, positions = inputs.shape, inputs.q, inputs.pools(), inputs.tables, inputs.q_positions
    options: dict[str, Any] = {}
    if own.name == "triton":
        from distdec.ops.decode_triton import DecodePlan
        from distdec.ops.spans_triton import with_schedule

        # as a step does, once for all layers
        tables = with_schedule(tables, shape.num_kv_heads, num_spans)

        # what is not swept stays as the cost rule has it
        changed = {"num_spans": num_spans, "block_n": block_n, "num_warps": warps, "num_stages": stages}
        options = {"plan": DecodePlan(**{**rule, **changed}), "tile_tokens": tile}

    def call(copy: int):
        return own.decode(q, *pools[copy], tables, positions, shape.q_len, scale=shape.head_dim**-0.5, **options)

    def check(partial) -> dict[str, Any]:
        out, lse = inputs.reference()
        return compare(partial.out, out, q.dtype, partial.lse, lse)

    config = {"kernel": "/".join(map(str, kernel)), "num_spans": num_spans}
    name = f"{config['kernel']} x {num_spans}"
    return Variant(name, call, check, own.name, config, num_bytes=shape.kv_bytes, baseline="default")


def default(inputs: Inputs) -> Variant:
    """Return decode as the cost rule launches it."""
    shape, q, pools = inputs.shape, inputs.q, inputs.pools()
    tables, positions, scale = inputs.tables, inputs.q_positions, shape.head_dim**-0.5

    def call(copy: int):
        return inputs.ops.decode(q, *pools[copy], tables, positions, shape.q_len, scale=scale)

    def check(partial) -> dict[str, Any]:
        out, lse = inputs.reference()
        return compare(partial.out, out, q.dtype, partial.lse, lse)

    return Variant("default", call, check, inputs.ops.name, num_bytes=shape.kv_bytes)


def report(bench: Bench, shape: Shape, times: dict[str, Timing]) -> None:
    """Print the fastest launches of a shape beside the default."""
    ranked = sorted(times, key=lambda name: times[name].median_us)
    what = f"B {len(shape.lengths)} context {shape.config()['context']} Hq {shape.num_q_heads} q_len {shape.q_len}"
    best = "; ".join(f"{name}: {times[name].median_us:.1f}" for name in ranked[:5])
    usual = f"{times['default'].median_us:.1f}" if "default" in times else "-"
    if bench.mesh.rank == 0:
        print(f"BEST {what} | default {usual} | {best}", flush=True)

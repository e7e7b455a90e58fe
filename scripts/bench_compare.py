"""Our decode attention beside its peers, in one process, replayed in turn, on the same keys and values.

    python3 scripts/bench_compare.py --out out/compare.jsonl --sections grid,ragged,flex,host --seconds 300

Ours runs on view tables of the real allocator after random traffic: `decode` is the local op (split kernel and
combine), `attention layer` is DistributedAttention with the store of the step's token. Peers read contiguous keys and
values, FlashInfer our own pool in pages of 16. `time_over_baseline` of ours is over the fastest peer at that point.
"""

import sys
from dataclasses import asdict, replace
from functools import partial

import torch
from bench_attention import layer_variant
from bench_inputs import RAGGED16, Inputs, Shape
from bench_ops import KIB, decode_variant
from bench_peers import (
    SDPA,
    flashinfer_peers,
    flex_peers,
    flex_ragged_peers,
    sdpa_kernel,
    sdpa_peers,
    sdpa_row_peers,
    sdpa_store_peer,
)
from bench_run import BEST_PEER, Bench, Variant, open_mesh, parse, run_sections
from bench_timing import host_us
from torch.nn.functional import scaled_dot_product_attention as sdpa

MAX_TWICE = 20 << 30
"""Bytes of keys and values that are held a second time, for the layer with its tables, as the engine runs it."""


def ours(inputs: Inputs, q: torch.Tensor, apart: Inputs) -> list[Variant]:
    """Return the variants of ours, related to the fastest peer; `apart` is for the layer."""
    variants = [decode_variant(inputs, q=q), layer_variant(apart, q=q)]
    return [replace(variant, baseline=BEST_PEER) for variant in variants]


def for_the_layer(bench: Bench, inputs: Inputs) -> Inputs:
    """Return the same inputs with new tokens apart, as the engine's default is; the inputs themselves where too big."""
    if inputs.shape.kv_bytes > MAX_TWICE:
        return inputs
    return bench.inputs(inputs.shape, copies=inputs.copies, own_apart=True)


def sdpa_names(bench: Bench) -> list[str]:
    return ["sdpa math"] if bench.device.type == "cpu" else ["sdpa cudnn", "sdpa flash", "sdpa efficient"]


def queries(inputs: Inputs, num_heads: int) -> torch.Tensor:
    shape = (inputs.q.shape[0], num_heads, inputs.shape.head_dim)
    return torch.randn(shape, device=inputs.device).to(inputs.q.dtype)


def grid(bench: Bench) -> None:
    """The uniform grid: batch 1, 8, 32, contexts 8K to 512K within 60 GB, 32 and 64 query heads."""
    contexts = [512] if bench.smoke else [8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, 16 * KIB, 64 * KIB, 256 * KIB]
    for context in contexts:
        for batch in (1, 2) if bench.smoke else (1, 8, 32):
            shape = Shape((context,) * batch)
            if shape.kv_bytes > 60e9:
                continue
            with bench.point("grid", shape.config()) as go:
                if go:
                    grid_point(bench, shape)


def grid_point(bench: Bench, shape: Shape) -> None:
    """Measure ours and the peers at one batch and context, for both numbers of query heads."""
    inputs = bench.inputs(shape)
    apart = for_the_layer(bench, inputs)
    stacked = inputs.stacked()
    ceiling = bench.meter.call(inputs.pools(), shape.kv_bytes)
    for num_heads in (16,) if bench.smoke else (32, 64):
        q = queries(inputs, num_heads)
        config = {**shape.config(), "num_q_heads": num_heads}
        names = sdpa_names(bench)
        variants = [*ours(inputs, q, apart), *sdpa_peers(inputs, q, names, stacked)]
        variants.append(sdpa_store_peer(inputs, q, names[0], stacked))
        variants += flashinfer_peers(inputs, q) if "flashinfer" in bench.args.peers else []
        timer = bench.timer(rotations=inputs.copies)
        bench.measure("grid", config, variants, ceiling=ceiling, timer=timer, **inputs.describe())


def flex(bench: Bench) -> None:
    """FlexAttention, default and tuned, at a few points of the grid (it compiles some seconds a variant)."""
    points = [(1, 8 * KIB), (1, 128 * KIB), (32, 8 * KIB), (8, 32 * KIB), (1, 32 * KIB), (1, 512 * KIB)]
    for batch, context in [] if bench.smoke else points:
        shape = Shape((context,) * batch)
        with bench.point("flex", shape.config()) as go:
            if not go:
                continue
            inputs = bench.inputs(shape)
            stacked = inputs.stacked()
            variants = [
                *ours(inputs, inputs.q, for_the_layer(bench, inputs)),
                *flex_peers(inputs, inputs.q, stacked, tuned=True),
            ]
            ceiling = bench.meter.call(inputs.pools(), shape.kv_bytes)
            timer = bench.timer(rotations=inputs.copies)
            bench.measure("flex", shape.config(), variants, ceiling=ceiling, timer=timer, **inputs.describe())


def ragged(bench: Bench) -> None:
    """Rows of 128 to 131072 tokens in one batch."""
    shape = Shape((300, 17, 1000, 128) if bench.smoke else RAGGED16)
    with bench.point("ragged", shape.config()) as go:
        if not go:
            return
        inputs = bench.inputs(shape)
        apart = for_the_layer(bench, inputs)
        ceiling = bench.meter.call(inputs.pools(), shape.kv_bytes)
        for num_heads in (32,) if bench.smoke else (32, 64):
            q = queries(inputs, num_heads)
            variants = [*ours(inputs, q, apart), *sdpa_row_peers(inputs, q, sdpa_names(bench)[:2])]
            variants += flashinfer_peers(inputs, q) if "flashinfer" in bench.args.peers else []
            if bench.device.type == "cuda" and num_heads == 32:
                variants += flex_ragged_peers(inputs, q, tuned=True)
            config = {**shape.config(), "num_q_heads": num_heads}
            timer = bench.timer(rotations=inputs.copies)
            bench.measure("ragged", config, variants, ceiling=ceiling, timer=timer, **inputs.describe())


def host(bench: Bench) -> None:
    """Microseconds of the host per eager call, one row of 1024 tokens."""
    shape = Shape((1024,))
    with bench.point("host", shape.config()) as go:
        if not go:
            return
        inputs = bench.inputs(shape, copies=1)
        stacked = inputs.stacked()
        names = sdpa_names(bench)
        variants = bench.checked(
            "host",
            shape.config(),
            [
                *ours(inputs, inputs.q, for_the_layer(bench, inputs)),
                *sdpa_peers(inputs, inputs.q, names, stacked),
                *(flashinfer_peers(inputs, inputs.q) if "flashinfer" in bench.args.peers else []),
            ],
        )
        for name, (variant, found) in variants.items():
            if name in SDPA:
                # the choice of the backend is made once, outside: only the call itself is timed
                with sdpa_kernel(SDPA[name]):
                    timing = host_us(partial(sdpa, inputs.q[:, :, None], *stacked[0], enable_gqa=True), bench.device)
            else:
                timing = host_us(partial(variant.call, 0), bench.device)
            bench.recorder.write("host", name, shape.config(), backend=variant.backend, **asdict(timing), **found)


SECTIONS = {"grid": grid, "ragged": ragged, "host": host, "flex": flex}


def add_arguments(parser) -> None:
    parser.add_argument("--peers", default="sdpa,flashinfer", help="families of peers in grid and ragged")


def main(argv: list[str] | None = None) -> int:
    args = parse(__doc__, list(SECTIONS), argv, add_arguments)
    with open_mesh(args) as mesh:
        return run_sections(Bench("bench_compare", args, mesh), SECTIONS)


if __name__ == "__main__":
    sys.exit(main())

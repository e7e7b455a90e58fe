"""A slice of a prompt against a long cached past: our prefill op beside the SDPA backends."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from bench_inputs import Inputs, Shape
from bench_peers import SDPA
from bench_run import BEST_PEER, Bench, Variant
from bench_timing import compare, reference_row
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from distdec.ops.backends import get_backend

NUM_Q_HEADS = 32


# (tokens of a table's tile, BLOCK_M, BLOCK_N, warps, stages, most registers a thread or 0, copy engine)
KERNELS = [
    (128, 128, 128, 8, 3, 0, 1),
    (128, 128, 64, 8, 4, 0, 1),
    (128, 128, 64, 8, 3, 0, 1),
    (128, 128, 128, 8, 3, 0, 0),
    (128, 128, 64, 8, 3, 0, 0),
    (64, 128, 64, 8, 3, 0, 1),
    (128, 128, 32, 8, 4, 128, 1),
    (128, 128, 32, 4, 4, 0, 1),
    (128, 128, 128, 8, 2, 0, 1),
    (128, 64, 128, 4, 2, 0, 1),
    (128, 64, 64, 4, 3, 0, 1),
    (128, 64, 64, 4, 2, 0, 1),
    (128, 64, 64, 4, 4, 0, 1),
    (128, 64, 128, 4, 3, 0, 1),
    (128, 64, 32, 4, 4, 0, 1),
    (64, 64, 64, 4, 3, 0, 1),
    (128, 64, 64, 4, 3, 168, 1),
]


def sweep_prefill(bench: Bench) -> None:
    """Time prefill's kernels over a long cached part, beside the SDPA backends, and print them by speed."""
    slice_len, cached = (8, 100) if bench.smoke else (2048, 64 * 1024)
    shape = Shape((cached,), NUM_Q_HEADS)
    config = {**shape.config(), "q_len": slice_len, "part": "cached"}
    with bench.point("sweep_prefill", config) as go:
        if not go:
            return
        own = get_backend(bench.backend, bench.device)
        kernels = KERNELS[:1] if bench.smoke else KERNELS
        tiles = sorted({kernel[0] for kernel in kernels})
        made = {n: bench.inputs(shape, copies=1, backend=replace(own, preferred_tile_tokens=n)) for n in tiles}
        first = made.get(own.preferred_tile_tokens) or bench.inputs(shape, copies=1)
        q = torch.randn(slice_len, NUM_Q_HEADS, shape.head_dim, device=bench.device).to(first.q.dtype)
        positions = torch.arange(cached, cached + slice_len, dtype=torch.int32, device=bench.device)
        variants = [ours(first, q, positions, "cached", "default"), *peers(bench, first, q, "cached")]
        if own.name == "triton":
            from distdec.ops.prefill_triton import PrefillPlan

            for kernel in kernels:
                tile, block_m, block_n, warps, stages, registers, engine = kernel
                plan = PrefillPlan(block_m, block_n, 1, warps, stages, registers or None, bool(engine))
                options = {"plan": plan, "tile_tokens": tile}
                name = "/".join(map(str, kernel))
                variants.append(ours(made[tile], q, positions, "cached", name, **options))
        for variant in variants:
            variant.flops = 4.0 * NUM_Q_HEADS * shape.head_dim * slice_len * cached
        timer = bench.timer(rounds=5, max_calls=4)
        times = bench.measure("sweep_prefill", config, variants, timer=timer)
        for name in sorted(times, key=lambda name: times[name].median_us):
            print(f"BEST FIRST {name}: {variants[0].flops / times[name].median_us / 1e6:.0f} TFLOP/s", flush=True)


def prefill_point(bench: Bench, slice_len: int, cached: int) -> None:
    """Measure the cached part alone (every key is visible), then the slice against the cache and itself."""
    for part in ("cached", "whole"):
        length = cached + (slice_len if part == "whole" else 0)
        shape = Shape((length,), NUM_Q_HEADS, q_len=slice_len if part == "whole" else 1)
        config = {**shape.config(), "q_len": slice_len, "part": part}
        with bench.point("prefill", config) as go:
            if go:
                inputs = bench.inputs(shape, copies=1, prefill=part == "whole")
                q = torch.randn(slice_len, NUM_Q_HEADS, shape.head_dim, device=bench.device).to(inputs.q.dtype)
                positions = torch.arange(cached, cached + slice_len, dtype=torch.int32, device=bench.device)
                variants = [ours(inputs, q, positions, part), *peers(bench, inputs, q, part)]
                pairs = slice_len * cached + (slice_len * (slice_len + 1) // 2 if part == "whole" else 0)
                for variant in variants:
                    variant.flops = 4.0 * NUM_Q_HEADS * shape.head_dim * pairs
                timer = bench.timer(rounds=3 if bench.smoke else 9, max_calls=4)
                bench.measure("prefill", config, variants, timer=timer, **inputs.describe())


@lru_cache(maxsize=4)
def truth(inputs: Inputs, q: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the float32 result, some query tokens at a time: scores of all would not fit."""
    parts = [
        reference_row(q[i : i + 128], *inputs.rows[0], positions[i : i + 128], q.shape[-1] ** -0.5)
        for i in range(0, len(q), 128)
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def ours(inputs: Inputs, q: Tensor, positions: Tensor, part: str, name: str = "prefill", **options: Any) -> Variant:
    """Return our prefill op; `options` go to it."""
    tables = inputs.batch.tables("prefill" if part == "whole" else "decode", 0)
    indptr = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
    pool, ops, scale = inputs.pools()[0], inputs.ops, q.shape[-1] ** -0.5

    def call(copy: int):
        return ops.prefill(q, *pool, tables, positions, indptr, len(q), scale=scale, **options)

    def check(partial) -> dict[str, Any]:
        out, lse = truth(inputs, q, positions)
        return compare(partial.out, out, q.dtype, partial.lse, lse)

    return Variant(name, call, check, ops.name, baseline=BEST_PEER)


def peers(bench: Bench, inputs: Inputs, q: Tensor, part: str) -> list[Variant]:
    """Return the SDPA backends; for the whole slice the mask is causal, aligned to the last key."""
    k, v = (x[None] for x in inputs.rows[0])
    query = q.transpose(0, 1)[None].contiguous()
    names = ["sdpa math"] if bench.device.type == "cpu" else ["sdpa cudnn", "sdpa flash", "sdpa efficient"]
    length = k.shape[2]
    positions = torch.arange(length - len(q), length, device=q.device)
    wide = [x.repeat_interleave(NUM_Q_HEADS // x.shape[1], 1) for x in (k, v)]

    def make(name: str) -> Variant:
        # the efficient backend refuses grouped heads and the mask object does not carry them: repeat them beforehand
        grouped = name != "sdpa efficient" and part == "cached"
        keys, values = (k, v) if grouped else wide
        mask = causal_lower_right(len(q), length) if part == "whole" else None

        def call(copy: int) -> Tensor:
            with sdpa_kernel(SDPA[name]):
                return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=grouped)

        def check(out: Tensor) -> dict[str, Any]:
            # without a mask the peers see every key, as ours does of the cached part
            at = positions if part == "whole" else positions + len(q)
            return compare(out[0].transpose(0, 1), truth(inputs, q, at)[0], q.dtype)

        return Variant(name, call, check, name, peer=True, fields={"grouped_heads": grouped})

    return [make(name) for name in names]

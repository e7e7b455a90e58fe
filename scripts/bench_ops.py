"""Local attention ops on one GPU: decode, prefill, page gather, host cost, and the launch parameters' landscape.

    python3 scripts/bench_ops.py --out out/ops.jsonl --sections grid,ragged --seconds 200
    python3 scripts/bench_ops.py --sections sweep --out out/sweep.jsonl

Sections: grid (uniform batches), ragged, chunks (chunk size, shuffled against one run), splits (tokens a split),
nosplit (one program per row and KV head against the default), groups, dims, qlen, prefill, gather, host,
deterministic, parts (the layer's launches one by one); not by default: sweep and sweep_prefill (launch parameters).
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from bench_inputs import RAGGED16, Chunking, Inputs, Shape
from bench_parts import parts
from bench_prefill import prefill_point, sweep_prefill
from bench_run import Bench, Variant, open_mesh, parse, run_sections
from bench_sweep import sweep
from bench_synthetic import SyntheticInputs
from bench_timing import compare, host_us

from distdec.attention import DistributedAttention

KIB = 1024


def decode_variant(
    inputs: Inputs | SyntheticInputs, name: str = "decode", q: torch.Tensor | None = None, **options: Any
) -> Variant:
    """Return our decode op on these inputs; `options` go to the op, and `q` replaces the queries."""
    q = inputs.q if q is None else q
    shape, ops = inputs.shape, inputs.ops
    tables, positions, pools = inputs.tables, inputs.q_positions, inputs.pools()
    scale = shape.head_dim**-0.5
    if ops.plan_spans is not None and (tables.schedule is None or {"num_spans", "split_tiles"} & options.keys()):
        from distdec.ops.spans_triton import with_schedule

        # as a step does, once for all layers
        what = (len(shape.lengths), shape.num_kv_heads, shape.q_len, shape.head_dim, q.dtype)
        group = q.shape[1] // shape.num_kv_heads
        spans = options.get("num_spans") or ops.plan_spans(*what, tables.tile_table.shape[0], q.device, group)
        options["num_spans"] = spans
        tables = with_schedule(tables, shape.num_kv_heads, spans, options.get("split_tiles", 0))

    def call(copy: int):
        return ops.decode(q, *pools[copy], tables, positions, shape.q_len, scale=scale, **options)

    def check(partial):
        out, lse = inputs.reference(q)
        return compare(partial.out, out, q.dtype, partial.lse, lse)

    return Variant(name, call, check, ops.name, num_bytes=shape.kv_bytes)


def grid(bench: Bench) -> None:
    """Uniform batches over the grid of batch and context that the goals name."""
    contexts = [256] if bench.smoke else [8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB]
    for batch in (1, 3) if bench.smoke else (1, 8, 32):
        for context in contexts:
            shape = Shape((context,) * batch)
            if shape.kv_bytes <= 60e9:
                uniform_point(bench, "grid", shape, heads=(32, 64))


def uniform_point(bench: Bench, section: str, shape: Shape, *, heads: tuple[int, ...], **options: Any) -> None:
    """Measure decode for several numbers of query heads over the same cache, beside the read ceiling."""
    with bench.point(section, shape.config()) as go:
        if not go:
            return
        inputs = bench.inputs(shape)
        variants = []
        for num_heads in heads:
            q = torch.randn(inputs.q.shape[0], num_heads, shape.head_dim, device=bench.device).to(inputs.q.dtype)
            variant = decode_variant(inputs, f"decode Hq={num_heads}", q, **options)
            variants.append(replace(variant, config={"num_q_heads": num_heads}))
        ceiling = bench.meter.call(inputs.pools(), shape.kv_bytes)
        timer = bench.timer(rotations=inputs.copies)
        bench.measure(section, shape.config(), variants, ceiling=ceiling, timer=timer, **inputs.describe())


def ragged(bench: Bench) -> None:
    """Sixteen rows of 128 to 131072 tokens, and the same without the longest row."""
    lengths = (300, 17, 1000, 128) if bench.smoke else RAGGED16
    for some in (lengths, lengths[1:]):
        uniform_point(bench, "ragged", Shape(some), heads=(32, 64))


def chunks(bench: Bench) -> None:
    """Chunks of 64 to 4096 tokens in random order, against one contiguous run of the same tokens."""
    points = [(2, 256)] if bench.smoke else [(1, 8 * KIB), (1, 32 * KIB), (1, 128 * KIB), (8, 8 * KIB), (8, 32 * KIB)]
    sizes = (64, 128) if bench.smoke else (64, 128, 256, 512, 1024, 2048, 4096)
    for batch, context in points:
        shape = Shape((context,) * batch)
        with bench.point("chunks", shape.config()) as go:
            if not go:
                continue
            inputs = SyntheticInputs(bench.device, shape, bench.backend, copies=2 if bench.smoke else None)
            variants = [decode_variant(inputs.cut(None), "one run")]
            for size in sizes:
                for shuffled in (False, True):
                    name = f"chunk {size}{' shuffled' if shuffled else ''}"
                    variant = decode_variant(inputs.cut(size, shuffled=shuffled), name)
                    config = {"chunk": size, "shuffled": shuffled}
                    variants.append(replace(variant, config=config, baseline="one run"))
            ceiling = bench.meter.call(inputs.pools(), shape.kv_bytes)
            timer = bench.timer(rotations=inputs.copies)
            bench.measure("chunks", shape.config(), variants, ceiling=ceiling, timer=timer, tables="synthetic")
    allocator_chunks(bench)


def allocator_chunks(bench: Bench) -> None:
    """The same question asked of the real allocator: frames and chunks of one size, after random traffic."""
    shape = Shape((256, 300)) if bench.smoke else Shape((32 * KIB,) * 4)
    for size in (128,) if bench.smoke else (128, 256, 512, 1024):
        with bench.point("chunks", {**shape.config(), "chunk": size}) as go:
            if not go:
                continue
            inputs = bench.inputs(shape, Chunking(size, size))
            variants = [replace(decode_variant(inputs, f"allocator, chunk {size}"), config={"chunk": size})]
            ceiling = bench.meter.call(inputs.pools(), shape.kv_bytes)
            timer = bench.timer(rotations=inputs.copies)
            bench.measure("chunks", shape.config(), variants, ceiling=ceiling, timer=timer, **inputs.describe())


def splits(bench: Bench) -> None:
    """Time against tokens per split: where the overhead of a split eats its gain."""
    for context in (256,) if bench.smoke else (8 * KIB, 32 * KIB, 128 * KIB):
        shape = Shape((context,))
        with bench.point("splits", shape.config()) as go:
            if not go:
                continue
            inputs = bench.inputs(shape)
            variants = [decode_variant(inputs, "default")]
            for tokens in (64, 128, 192, 256, 512, 1024, 2048, 4096, 8192):
                count = context // tokens
                if count * shape.num_kv_heads > 8192 or count < 1:
                    continue
                variant = decode_variant(inputs, f"split {tokens}", num_spans=count * shape.num_kv_heads)
                variants.append(replace(variant, config={"split_tokens": tokens}, baseline="default"))
            ceiling = bench.meter.call(inputs.pools(), shape.kv_bytes)
            timer = bench.timer(rotations=inputs.copies)
            bench.measure("splits", shape.config(), variants, ceiling=ceiling, timer=timer, **inputs.describe())


def nosplit(bench: Bench) -> None:
    """One program per row and KV head against the default, for batches of 1 to 64."""
    for batch in (1, 2) if bench.smoke else (1, 2, 4, 8, 16, 32, 64):
        shape = Shape((256 if bench.smoke else 8 * KIB,) * batch)
        with bench.point("nosplit", shape.config()) as go:
            if not go:
                continue
            inputs = bench.inputs(shape)
            single = decode_variant(inputs, "no split", num_spans=batch * shape.num_kv_heads)
            variants = [decode_variant(inputs, "split"), replace(single, baseline="split")]
            ceiling = bench.meter.call(inputs.pools(), shape.kv_bytes)
            timer = bench.timer(rotations=inputs.copies)
            bench.measure("nosplit", shape.config(), variants, ceiling=ceiling, timer=timer, **inputs.describe())


def deterministic(bench: Bench) -> None:
    """What it costs that a row's bits do not depend on its batch mates: cuts at fixed multiples of tiles."""
    points = [(2, 256)] if bench.smoke else [(1, 8 * KIB), (1, 128 * KIB), (8, 32 * KIB), (32, 8 * KIB)]
    for batch, context in points:
        shape = Shape((context,) * batch)
        with bench.point("deterministic", shape.config()) as go:
            if not go:
                continue
            inputs = bench.inputs(shape)
            variants = [decode_variant(inputs, "free")]
            for tiles in (8, 16, 32, 64):
                variant = decode_variant(inputs, f"split_tiles {tiles}", split_tiles=tiles)
                variants.append(replace(variant, config={"split_tiles": tiles}, baseline="free"))
            ceiling = bench.meter.call(inputs.pools(), shape.kv_bytes)
            timer = bench.timer(rotations=inputs.copies)
            bench.measure("deterministic", shape.config(), variants, ceiling=ceiling, timer=timer, **inputs.describe())


def groups(bench: Bench) -> None:
    """Query heads per KV head, common and odd, at 512 MB of keys and values."""
    for group in (1, 3) if bench.smoke else (1, 2, 3, 5, 6, 7, 8, 16, 71):
        num_kv = 2 if bench.smoke else 1 if group == 71 else 8
        context = 300 if bench.smoke else 128 * KIB * 8 // num_kv
        shape = Shape((context,), num_q_heads=group * num_kv, num_kv_heads=num_kv)
        uniform_point(bench, "groups", shape, heads=(group * num_kv,))


def dims(bench: Bench) -> None:
    """Head sizes, at 512 MB of keys and values."""
    for dim in (64, 80) if bench.smoke else (64, 80, 96, 128, 192, 256):
        context = 300 if bench.smoke else 128 * KIB * 128 // dim
        uniform_point(bench, "dims", Shape((context,), head_dim=dim), heads=(32,))


def qlen(bench: Bench) -> None:
    """Several query tokens a row, as speculative decoding verifies them, against one."""
    for group in (4, 8):
        for context in (300,) if bench.smoke else (8 * KIB, 128 * KIB):
            config = Shape((context,), num_q_heads=8 * group).config()
            config.pop("q_len")
            with bench.point("qlen", config) as go:
                if not go:
                    continue
                variants, made = [], []
                for q_len in (1, 2) if bench.smoke else (1, 2, 4, 8, 16):
                    shape = Shape((context,), num_q_heads=8 * group, q_len=q_len)
                    made.append(bench.inputs(shape))
                    variant = decode_variant(made[-1], f"q_len {q_len}")
                    baseline = "q_len 1" if q_len > 1 else None
                    variants.append(replace(variant, config={"q_len": q_len}, baseline=baseline))
                timer = bench.timer(rotations=made[0].copies)
                ceiling = bench.meter.call(made[0].pools(), made[0].shape.kv_bytes)
                bench.measure("qlen", config, variants, ceiling=ceiling, timer=timer, **made[0].describe())


def prefill(bench: Bench) -> None:
    """A slice of a prompt against the cached part alone (no mask bites) and against the whole, beside SDPA."""
    cases = [(8, 100)] if bench.smoke else [(2048, 128 * KIB), (512, 128 * KIB), (2048, 32 * KIB)]
    for slice_len, cached in cases:
        prefill_point(bench, slice_len, cached)


def gather(bench: Bench) -> None:
    """What copying a sequence's pages into contiguous memory before attention would cost."""
    for batch, context in [(2, 300)] if bench.smoke else [(1, 32 * KIB), (1, 128 * KIB), (8, 32 * KIB), (32, 8 * KIB)]:
        shape = Shape((context,) * batch)
        with bench.point("gather", shape.config()) as go:
            if not go:
                continue
            inputs = bench.inputs(shape)
            kv = inputs.cache.kv
            slots = [torch.as_tensor(kv.slots(seq, 0, context, 0), dtype=torch.int64) for seq in range(batch)]
            slots = torch.cat(slots).to(bench.device)
            shape_out = (shape.tokens, shape.num_kv_heads, shape.head_dim)
            target = [torch.empty(shape_out, dtype=inputs.q.dtype, device=bench.device) for _ in range(2)]
            variants = [decode_variant(inputs), gather_variant(inputs, slots, target)]
            timer = bench.timer(rotations=inputs.copies)
            bench.measure("gather", shape.config(), variants, timer=timer, **inputs.describe())


def gather_variant(inputs: Inputs, slots: torch.Tensor, target: list[torch.Tensor]) -> Variant:
    """Return the copy of all tokens of the step's sequences, in order, by torch's index_select."""
    pools = inputs.pools()

    def copy_pages(copy: int):
        for pool, contiguous in zip(pools[copy], target, strict=True):
            torch.index_select(pool, 0, slots, out=contiguous)
        return target

    def check(got):
        want = torch.cat([k.transpose(0, 1) for k, _ in inputs.rows])
        return compare(got[0].flatten(1), want.flatten(1), want.dtype)

    return Variant("copy pages", copy_pages, check, "torch", num_bytes=inputs.shape.kv_bytes, baseline="decode")


def host(bench: Bench) -> None:
    """Microseconds the host spends per eager call, and per step, whatever the device does."""
    shape = Shape((300, 200)) if bench.smoke else Shape((1024, 900, 500, 2000))
    with bench.point("host", shape.config()) as go:
        if not go:
            return
        inputs = bench.inputs(shape, copies=1)
        ops, pool = inputs.ops, inputs.cache.pool.layer(0)
        layer = DistributedAttention(bench.mesh, inputs.cache)
        decode = decode_variant(inputs)
        slots = inputs.batch.slot_mapping
        rows = [(seq, 1) for seq in range(len(shape.lengths))]

        def local():
            ops.store_kv(inputs.k_new, inputs.v_new, slots, *pool)
            return decode.call(0)

        calls: dict[str, Callable[[], Any]] = {
            "store_kv": lambda: ops.store_kv(inputs.k_new, inputs.v_new, slots, *pool),
            "decode": lambda: decode.call(0),
            "local ops (store_kv + decode)": local,
            "attention layer, one rank": lambda: layer(inputs.q, inputs.k_new, inputs.v_new, inputs.batch, 0),
            "fill of a step": lambda: inputs.cache.buffers.fill(rows, q_len=1),
        }
        found = decode.check(local())
        times = {name: host_us(call, bench.device, calls=3 if bench.smoke else 50) for name, call in calls.items()}
        for name, timing in times.items():
            fields = {**asdict(timing), "timer": "host", "backend": ops.name, "kernels": [], **found}
            bench.recorder.write("host", name, shape.config(), **fields)


SECTIONS = {
    "grid": grid,
    "ragged": ragged,
    "chunks": chunks,
    "splits": splits,
    "nosplit": nosplit,
    "groups": groups,
    "dims": dims,
    "qlen": qlen,
    "prefill": prefill,
    "gather": gather,
    "host": host,
    "deterministic": deterministic,
    "parts": parts,
    "sweep": sweep,
    "sweep_prefill": sweep_prefill,
}


def main(argv: list[str] | None = None) -> int:
    args = parse(__doc__, list(SECTIONS), argv)
    with open_mesh(args) as mesh:
        return run_sections(Bench("bench_ops", args, mesh), SECTIONS)


if __name__ == "__main__":
    sys.exit(main())

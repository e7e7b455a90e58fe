"""Where a short call's time goes on the device: the attention layer's launches one by one, each in its own graph."""

from typing import Any

import torch
from bench_attention import layer_variant
from bench_inputs import Inputs, Shape
from bench_merge_inputs import Splits
from bench_run import Bench, Variant
from bench_timing import compare
from benchlib import CheckFailed

from distdec.ops.partial import Partial


def parts(bench: Bench) -> None:
    """Store, decode, join and one-rank merge alone, beside the whole layer, at small and middle contexts."""
    points = [(2, 256)] if bench.smoke else [(1, 8192), (1, 32768), (8, 8192), (32, 8192)]
    for batch, context in points:
        shape = Shape((context,) * batch)
        with bench.point("parts", shape.config()) as go:
            if go:
                inputs = bench.inputs(shape)
                variants = [store(inputs), decode(inputs), join(inputs), merge(inputs), layer_variant(inputs)]
                timer = bench.timer(rotations=inputs.copies)
                bench.measure("parts", shape.config(), variants, timer=timer, **inputs.describe())


def store(inputs: Inputs) -> Variant:
    """Return the store of the step's tokens."""
    pools, slots = inputs.pools(), inputs.batch.slot_mapping

    def call(copy: int):
        inputs.ops.store_kv(inputs.k_new, inputs.v_new, slots, *pools[copy])
        return pools[copy]

    def check(pool: Any) -> dict[str, Any]:
        if not (torch.equal(pool[0][slots], inputs.k_new) and torch.equal(pool[1][slots], inputs.v_new)):
            raise CheckFailed("the pool does not hold the stored keys and values")
        return {}

    return Variant("store_kv", call, check, inputs.ops.name)


def decode(inputs: Inputs) -> Variant:
    """Return the decode op: the kernel over the keys and the join of its splits."""
    pools, tables, scale = inputs.pools(), inputs.tables, inputs.shape.head_dim**-0.5

    def call(copy: int):
        return inputs.ops.decode(inputs.q, *pools[copy], tables, inputs.q_positions, inputs.shape.q_len, scale=scale)

    def check(partial: Partial) -> dict[str, Any]:
        out, lse = inputs.reference()
        return compare(partial.out, out, inputs.q.dtype, partial.lse, lse)

    return Variant("decode", call, check, inputs.ops.name)


def join(inputs: Inputs) -> Variant:
    """Return the join of as many splits as a full device gives each unit."""
    rows = len(inputs.shape.lengths)
    splits = Splits(rows, inputs.shape.num_q_heads, max(1, min(49, 396 // (8 * rows))), 0, inputs.device)

    def check(partial: Partial) -> dict[str, Any]:
        out, lse = splits.local_truth()
        return {**compare(partial.out.flatten(1), out, torch.float32, partial.lse, lse), "splits": splits.num_splits}

    return Variant("join of splits", lambda copy: splits.combine(), check, inputs.ops.name)


def merge(inputs: Inputs) -> Variant:
    """Return the merge of one rank's partial: what the layer adds where there is nothing to merge."""
    from distdec.merge import make_merge

    merged = make_merge("auto", inputs.mesh)
    out, lse = inputs.reference()
    partial = Partial(out.contiguous(), lse.contiguous())

    def check(got: Any) -> dict[str, Any]:
        return compare(got.out, out.flatten(1), inputs.q.dtype, got.lse, lse)

    return Variant("merge of one rank", lambda copy: merged(partial, out_dtype=inputs.q.dtype), check, "distdec")

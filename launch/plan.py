"""Say whether a context fits, on how many ranks and in which dtype, without loading any weights.

    python launch/plan.py model.path=FOLDER cache.max_tokens=1000000 parallel.kvp=8
    python launch/plan.py model=smollm2 cache.memory_gb=0.5

Options are those of generate.py. `cache.max_tokens` is the context planned for (0: the model's longest), over all
sequences together; `cache.memory_gb` the memory of one rank for weights and KV (0: that of the GPU the model of
distdec/planner.py describes); `parallel.kvp` x `parallel.tp` the ranks (kvp 0: 1, 2, 4, ... are compared).
`pays from` is the length of all sequences together from which attention over kvp ranks, the one_shot merge included, is
faster than over one.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distdec.capacity import GIB
from distdec.config import Config
from distdec.degrees import validate_layout
from distdec.planner import (
    DTYPE_BYTES,
    Hardware,
    LayoutPlan,
    ModelShape,
    Workload,
    break_even_tokens,
    dtypes_that_fit,
    layout_plan,
    ranks_to_fit,
)
from launch import boot, console

MOST_RANKS = 64


def run(config: Config, job: boot.Job) -> int:
    """Print the plan on rank 0."""
    job.on_leader(lambda: report(config))
    return 0


def layouts(config: Config, shape: ModelShape) -> list[tuple[int, int]]:
    """Return the (kvp, tp) to compare: the one asked for, or powers of two of kvp for the tp asked for.

    Raises:
        ValueError: the model's heads do not split over tp.
    """
    tp, kvp = config.parallel.tp, config.parallel.kvp or 1
    validate_layout(kvp * tp, kvp, tp, shape.num_q_heads, shape.num_kv_heads)
    if config.parallel.kvp:
        return [(config.parallel.kvp, tp)]
    return [(1 << i, tp) for i in range(MOST_RANKS.bit_length()) if (1 << i) * tp <= MOST_RANKS]


def report(config: Config) -> None:
    """Print one line a layout and dtype, and what would fit."""
    from transformers import AutoConfig

    from launch.inputs import model_folder

    model_config = AutoConfig.from_pretrained(model_folder(config))
    shape = ModelShape.from_config(model_config)
    tokens = config.cache.max_tokens or model_config.get_text_config().max_position_embeddings
    hardware = Hardware()
    if config.cache.memory_gb:
        hardware = replace(hardware, memory_bytes=int(config.cache.memory_gb * GIB))
    names = [config.model.dtype] if config.model.dtype != "auto" else ["float32", "bfloat16"]
    rows = []
    for kvp, tp in layouts(config, shape):
        for name in names:
            size = DTYPE_BYTES[name]
            load = Workload(tokens, weight_bytes=size, kv_bytes=size)
            pays = break_even_tokens(shape.kv_bytes_per_token(size) // (shape.num_layers * tp), kvp, hardware=hardware)
            rows.append(_row(layout_plan(shape, load, kvp, tp, hardware=hardware), name, pays))
    memory = console.bytes_text(hardware.memory_bytes)
    title = f"{tokens} tokens of context, {memory} a rank ({hardware.reserve_fraction:.0%} kept free)"
    console.print_table(title, ["layout", "ranks", "dtype", "weights / rank", "KV / rank", "pays from", "fits"], rows)
    for name in names:
        size = DTYPE_BYTES[name]
        per_token = shape.kv_bytes_per_token(size)
        load = Workload(tokens, weight_bytes=size, kv_bytes=size)
        ranks = ranks_to_fit(shape, load, limit=MOST_RANKS, hardware=hardware)
        fewest = f"fits on {ranks} rank{'s' if ranks != 1 else ''}" if ranks else f"does not fit on {MOST_RANKS} ranks"
        line = f"{name}: {per_token} bytes of KV a token over all ranks; {fewest}"
        if ranks and ranks > 1:
            kv = dtypes_that_fit(shape, load, ranks - 1, hardware=hardware)
            line += f", or on {ranks - 1} with KV in {kv[0]}" if kv else ""
        console.say(line)


def _row(plan: LayoutPlan, dtype: str, pays: int) -> list[str]:
    return [
        f"kvp {plan.kvp} x tp {plan.tp}",
        str(plan.kvp * plan.tp),
        dtype,
        console.bytes_text(plan.weight_bytes),
        console.bytes_text(plan.kv_bytes),
        str(pays) if plan.kvp > 1 else "-",
        "yes" if plan.fits else "no",
    ]


if __name__ == "__main__":
    boot.main(run, uses_layout=False)

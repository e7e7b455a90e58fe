"""A whole model's decode step in every layout of the ranks: time, memory, and what of it is weights and KV cache.

    torchrun --standalone --nproc-per-node 2 scripts/bench_model.py --contexts 8192,131072 --out out/model.jsonl
    torchrun --standalone --nproc-per-node 2 scripts/bench_model.py --model one-kv-head --sections decode,transformers
    python3 scripts/bench_model.py --model llama-3-8b --contexts 8192 --layouts single

Weights are random, drawn on each rank for its own part, and the cache is filled with random keys and values instead of
a prefill (the records say so): the figures are about time and memory, never about tokens. Layouts: `kvpN` shards the
sequence over all N ranks, `tpN` the heads, `kvpNtpM` both, `single` is the whole model on every rank by itself. A step
runs eagerly and as a CUDA graph; both are timed from the host over several steps with growing lengths, the maximum over
the ranks. `peak_bytes` is a layout's own: a layout starts only once what the one before held on the GPU is free.

The section `transformers` (asked for by name) runs the same model through transformers' own tensor parallelism over
all ranks and records its time, or the error that it ends in.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import benchlib
import torch
from bench_run import Bench, open_mesh, parse, run_sections
from bench_weights import HEADS, MODELS, build

from distdec.attention import DistributedAttention
from distdec.config import REDUCE_MODES
from distdec.degrees import validate_layout
from distdec.graphs import GraphKey, StepGraphs
from distdec.hf.attention import bind_engine
from distdec.hf.sharding import rank_sum_of
from distdec.hf.support import check_model
from distdec.mesh import Mesh
from distdec.planner import ModelShape, Workload, layout_plan
from distdec.sharded_cache import ShardedCache

STEPS = 12
# what may stay allocated between two layouts: workspaces of cuBLAS, one a stream
KEPT_BYTES = 256 << 20


class Decoder:
    """One sequence of `context` random tokens, decoded step by step."""

    def __init__(
        self, model: torch.nn.Module, mesh: Mesh, context: int, dtype: torch.dtype, backend: str, reduce: str = "auto"
    ) -> None:
        geometry = check_model(model, mesh, engine=True)
        self.cache = ShardedCache(
            mesh,
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            group_size=geometry.group_size,
            max_tokens=context + 64 * STEPS,
            dtype=dtype,
            backend=backend,
        )
        for pool in (self.cache.pool.k, self.cache.pool.v):
            for layer in pool:
                layer.normal_()
        self.cache.kv.add(0)
        self.cache.begin_step([(0, context - 1)])
        self.attention = DistributedAttention(mesh, self.cache)
        self.binding = bind_engine(model, self.attention)
        device = mesh.device
        self.ids = torch.full((1,), 5, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.wanted = torch.zeros(1, dtype=torch.int64, device=device)
        self.graphs = StepGraphs(
            device,
            barrier=mesh.barrier if mesh.world_size > 1 else None,
            moved=lambda: self.cache.buffers.generation,
            keep=[self.attention],
        )
        self.total = rank_sum_of(model)
        if self.total is not None:
            self.total.choose(reduce, mesh)

    def forward(self, ids: torch.Tensor, position: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return self.binding.forward(ids, position, logits_to_keep=wanted)

    def begin(self) -> None:
        self.position.fill_(self.cache.kv.length(0))
        self.binding.set_step(self.cache.begin_step([(0, 1)]))

    def eager(self) -> None:
        self.begin()
        with torch.no_grad():
            self.forward(self.ids, self.position, self.wanted)

    def capture(self) -> None:
        self.begin()
        with torch.no_grad():
            self.graphs.capture({GraphKey(1): (self.forward, (self.ids, self.position, self.wanted))})

    def replay(self) -> None:
        self.begin()
        self.graphs.replay(GraphKey(1), self.ids, self.position, self.wanted)

    def close(self) -> None:
        self.graphs.close()
        self.binding.close()
        if hasattr(self.attention.merge, "close"):
            self.attention.merge.close()
        if self.total is not None:
            self.total.close()


def layouts(bench: Bench, wanted: str) -> list[tuple[str, int, int]]:
    """Return (name, kvp, tp) of the layouts to run on this run's ranks.

    Raises:
        ValueError: a layout that these ranks cannot form.
    """
    world = bench.mesh.world_size
    every = [("single", 1, 1)]
    for tp in range(1, world + 1):
        kvp = world // tp
        if world > 1 and kvp * tp == world:
            every.append(((f"kvp{kvp}" if kvp > 1 else "") + (f"tp{tp}" if tp > 1 else ""), kvp, tp))
    names = [name for name in wanted.split(",") if name] or [entry[0] for entry in every]
    unknown = set(names) - {entry[0] for entry in every}
    if unknown:
        raise ValueError(f"no layouts {sorted(unknown)} of {world} ranks; legal: {[entry[0] for entry in every]}")
    return [entry for entry in every if entry[0] in names]


def points(bench: Bench) -> tuple[torch.dtype, list[int]]:
    """Return the dtype and the contexts of this run."""
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    return dtype, [300] if bench.smoke else [int(c) for c in bench.args.contexts.split(",")]


def decode(bench: Bench) -> None:
    """Time the decode step of every layout at every context."""
    name = bench.args.model
    dtype, contexts = points(bench)
    num_q_heads, num_kv_heads = (MODELS[name][key] for key in HEADS)
    for layout, kvp, tp in layouts(bench, bench.args.layouts):
        config = {"model": name, "layout": layout, "kvp": kvp, "tp": tp, "dtype": str(dtype).removeprefix("torch.")}
        try:
            validate_layout(kvp * tp, kvp, tp, num_q_heads, num_kv_heads)
        except ValueError as refusal:
            bench.recorder.write("decode", layout, config, "unavailable", reason=str(refusal))
            continue
        with bench.point("decode", config, layout) as go:
            if not go:
                continue
            start_clean(bench)
            mesh = Mesh.single(bench.device) if layout == "single" else Mesh.create(kvp, tp, device=bench.device)
            model = build(name, mesh, dtype, smoke=bench.smoke)
            for context in contexts:
                measure(bench, model, mesh, config, context, dtype)
            del model
            if layout != "single":
                mesh.close()


def start_clean(bench: Bench) -> None:
    """Free what nothing uses any more, and begin to count the peak anew.

    Raises:
        CheckFailed: something of an earlier layout is still held, and would be counted as this one's.
    """
    # a decoder, its graphs and its binding refer to each other
    gc.collect()
    if bench.device.type != "cuda":
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(bench.device)
    held = torch.cuda.memory_allocated(bench.device)
    if bench.any_rank(held > KEPT_BYTES):
        raise benchlib.CheckFailed(f"{held} bytes of an earlier layout are still held")


def peak_bytes(bench: Bench) -> int | None:
    """Return the peak of the GPU memory held since `start_clean`, the maximum over the ranks; None on the CPU."""
    if bench.device.type != "cuda":
        return None
    return int(bench.maximum([float(torch.cuda.max_memory_allocated(bench.device))])[0])


def num_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of this rank's weights."""
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return sum(p.numel() * p.element_size() for p in parts)


def measure(
    bench: Bench, model: torch.nn.Module, mesh: Mesh, config: dict[str, Any], context: int, dtype: torch.dtype
) -> None:
    """Record one layout at one context, eager and as a graph."""
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
    decoder = Decoder(model, mesh, context, dtype, bench.backend, bench.args.reduce)
    try:
        plan = layout_plan(
            ModelShape.from_config(model.config),
            Workload(context, weight_bytes=dtype.itemsize, kv_bytes=dtype.itemsize),
            config["kvp"],
            config["tp"],
        )
        eager = host_ms(bench, decoder.eager)
        decoder.capture()
        graph = host_ms(bench, decoder.replay)
        fields = {
            "weights_bytes": num_bytes(model),
            "kv_bytes": decoder.cache.pool.bytes,
            "peak_bytes": peak_bytes(bench),
            "merge": decoder.attention.merge.mode,
            "sum": "none" if decoder.total is None else decoder.total.reason,
            "fill": "random",
            "planned_ms": round(plan.step_us / 1e3, 3),
        }
        for how, median in (("eager", eager), ("graph", graph)):
            value = {"step_ms": round(median, 3), **fields}
            point = {**config, "context": context, "batch": 1, "how": how}
            bench.recorder.write("decode", f"{config['layout']} {how}", point, "derived", value=value)
    finally:
        decoder.close()


def transformers(bench: Bench) -> None:
    """Time the decode step of transformers' own tensor parallelism over all ranks, or record how it fails."""
    name, world = bench.args.model, bench.mesh.world_size
    dtype, contexts = points(bench)
    layout = f"transformers tp{world}"
    config = {"model": name, "layout": layout, "tp": world, "dtype": str(dtype).removeprefix("torch."), "how": "eager"}
    # one name on all ranks, which only rank 0 can choose
    [number] = bench.mesh.agree([time.time_ns()])
    folder = Path(tempfile.gettempdir()) / f"distdec_bench_{number}"
    saved = False
    try:
        for context in contexts:
            point = {**config, "context": context, "batch": 1}
            with bench.point("transformers", point, layout) as go:
                if not go:
                    continue
                start_clean(bench)
                # not by looking for the folder: a rank that finds rank 0 halfway would miss the barrier
                if not saved:
                    save_random(bench, folder, dtype)
                    saved = True
                fault, value = None, {}
                try:
                    value = transformers_step(bench, folder, context, dtype)
                except Exception as error:
                    fault = f"{type(error).__name__}: {error}"[:600]
                if bench.any_rank(fault is not None):
                    reason = fault or "failed on another rank"
                    bench.recorder.write("transformers", layout, point, "unavailable", reason=reason)
                else:
                    bench.recorder.write("transformers", layout, point, "derived", value=value)
    finally:
        bench.mesh.barrier()
        if bench.mesh.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def save_random(bench: Bench, folder: Path, dtype: torch.dtype) -> None:
    """Write the model with random weights, once; transformers shards what it reads from a folder."""
    if bench.mesh.rank == 0:
        model = build(bench.args.model, Mesh.single(bench.device), dtype, smoke=bench.smoke)
        model.save_pretrained(folder)
    bench.mesh.barrier()


def transformers_step(bench: Bench, folder: Path, context: int, dtype: torch.dtype) -> dict[str, Any]:
    """Load a model folder as transformers shards it, fill its cache with random tokens, and time steps."""
    from transformers import AutoModelForCausalLM, DynamicCache

    options = {"tp_plan": "auto"} if bench.mesh.world_size > 1 else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", **options)
    model = model.to(bench.device).eval()
    cache = DynamicCache(config=model.config)
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    token = torch.full((1, 1), 5, device=bench.device)

    def step() -> None:
        with torch.no_grad():
            model(token, use_cache=True, **{keyword: cache})

    step()
    for layer in cache.layers:
        for part in ("keys", "values"):
            shape = getattr(layer, part).shape
            setattr(layer, part, torch.randn(*shape[:2], context, shape[3], dtype=dtype, device=bench.device))
    median = host_ms(bench, step)
    return {
        "step_ms": round(median, 3),
        "weights_bytes": num_bytes(model),
        "kv_bytes": sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values)),
        "peak_bytes": peak_bytes(bench),
        "attention": "sdpa",
        "fill": "random",
    }


def host_ms(bench: Bench, step: Any) -> float:
    """Return the median of the times of single steps, each the maximum over the ranks, in milliseconds."""
    samples = []
    for i in range(STEPS + 3):
        if bench.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if bench.device.type == "cuda":
            torch.cuda.synchronize()
        if i >= 3:
            samples.append((time.perf_counter() - start) * 1e3)
    return sorted(bench.maximum(samples))[len(samples) // 2]


def main(argv: list[str] | None = None) -> int:
    """Run the sections; see the module's docstring."""

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", choices=sorted(MODELS), default="llama-3-8b")
        parser.add_argument("--contexts", default="8192,131072", help="tokens, separated by commas")
        parser.add_argument("--layouts", default="", help="of single,kvpN,tpN,kvpNtpM; default all that fit the heads")
        parser.add_argument("--reduce", choices=REDUCE_MODES, default="auto", help="sums over all ranks")
        # the other section writes a whole model to the temporary directory
        parser.set_defaults(sections="decode")

    sections = {"decode": decode, "transformers": transformers}
    args = parse(__doc__ or "", list(sections), argv, more)
    mesh = open_mesh(args)
    try:
        return run_sections(Bench("bench_model", args, mesh), sections)
    finally:
        mesh.close()


if __name__ == "__main__":
    sys.exit(main())

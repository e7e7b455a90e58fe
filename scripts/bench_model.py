"""A whole model's decode step in every layout of the ranks: time, memory, and what of it is weights and KV cache.

    torchrun --nproc-per-node 2 scripts/bench_model.py --model llama-3-8b --contexts 8192,131072 --out out/model.jsonl
    python3 scripts/bench_model.py --model llama-3-8b --contexts 8192 --layouts single

Weights are random, drawn on each rank for its own part, and the cache is filled with random keys and values instead of
a prefill (the records say so): the figures are about time and memory, never about tokens. Layouts: `kvpN` shards the
sequence over all N ranks, `tpN` the heads, `single` is the whole model on every rank by itself. A step runs eagerly and
as a CUDA graph; both are timed from the host over several steps with growing lengths, the maximum over the ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import benchlib
import torch
from bench_run import Bench, open_mesh, parse, run_sections

from distdec.attention import DistributedAttention
from distdec.graphs import GraphKey, StepGraphs
from distdec.hf.attention import bind_engine
from distdec.hf.parallel import parallelise
from distdec.hf.support import check_model
from distdec.mesh import Mesh
from distdec.planner import ModelShape, Workload, layout_plan
from distdec.sharded_cache import ShardedCache

LLAMA = {"rms_norm_eps": 1e-5, "max_position_embeddings": 1 << 21, "vocab_size": 128256, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    # the attention of Qwen3-235B (64 query and 4 KV heads of 128) under a narrow MLP, so that it fits one GPU
    "four-kv-heads": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "one-kv-head": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 1,
        "head_dim": 128,
    },
    "tiny": {
        **LLAMA,
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
}
STEPS = 12


def build(name: str, mesh: Mesh, dtype: torch.dtype) -> torch.nn.Module:
    """Build the model with this rank's part of random weights."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, LlamaConfig

    with init_empty_weights():
        config = LlamaConfig(**MODELS[name])
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="distdec").eval()
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}

    def fetch(param: str, cut: Any) -> torch.Tensor:
        shape = list(shapes[param])
        if cut is not None:
            shape[cut.dim] = sum(stop - start for start, stop in cut.ranges)
        out = torch.empty(shape, dtype=dtype, device=mesh.device)
        return out.fill_(1.0) if "norm" in param else out.normal_(0.0, 0.02)

    parallelise(model, mesh, fetch)
    return model.to(mesh.device)


class Decoder:
    """One sequence of `context` random tokens, decoded step by step."""

    def __init__(self, model: torch.nn.Module, mesh: Mesh, context: int, dtype: torch.dtype, backend: str) -> None:
        geometry = check_model(model, tp_size=mesh.tp_size, engine=True)
        self.cache = ShardedCache(
            mesh,
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
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


def layouts(bench: Bench, wanted: str) -> list[tuple[str, int, int]]:
    """Return (name, kvp, tp) of the layouts to run on this run's ranks."""
    world = bench.mesh.world_size
    every = [("single", 1, 1)]
    if world > 1:
        every += [(f"kvp{world}", world, 1), (f"tp{world}", 1, world)]
    return [entry for entry in every if not wanted or entry[0] in wanted.split(",")]


def decode(bench: Bench) -> None:
    """Time the decode step of every layout at every context."""
    args, name = bench.args, "tiny" if bench.smoke else bench.args.model
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    contexts = [300] if bench.smoke else [int(c) for c in args.contexts.split(",")]
    for layout, kvp, tp in layouts(bench, args.layouts):
        config = {"model": name, "layout": layout, "kvp": kvp, "tp": tp, "dtype": str(dtype).removeprefix("torch.")}
        with bench.point("decode", config, layout) as go:
            if not go:
                continue
            if MODELS[name]["num_key_value_heads"] % tp:
                raise benchlib.Refused(f"tp {tp} does not divide {MODELS[name]['num_key_value_heads']} KV heads")
            mesh = Mesh.single(bench.device) if layout == "single" else Mesh.create(kvp, tp, device=bench.device)
            model = build(name, mesh, dtype)
            for context in contexts:
                measure(bench, model, mesh, config, context, dtype)
            del model
            if layout != "single":
                mesh.close()


def measure(
    bench: Bench, model: torch.nn.Module, mesh: Mesh, config: dict[str, Any], context: int, dtype: torch.dtype
) -> None:
    """Record one layout at one context, eager and as a graph."""
    on_gpu = bench.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    decoder = Decoder(model, mesh, context, dtype, bench.backend)
    try:
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        plan = layout_plan(
            ModelShape.from_config(model.config),
            Workload(context, weight_bytes=dtype.itemsize, kv_bytes=dtype.itemsize),
            config["kvp"],
            config["tp"],
        )
        eager = host_ms(bench, decoder.eager)
        decoder.capture()
        graph = host_ms(bench, decoder.replay)
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        fields = {
            "weight_bytes": weights,
            "kv_pool_bytes": decoder.cache.pool.bytes,
            "peak_bytes": int(bench.maximum([float(peak)])[0]),
            "merge": decoder.attention.merge.mode,
            "fill": "random",
            "planned_ms": round(plan.step_us / 1e3, 3),
        }
        for how, median in (("eager", eager), ("graph", graph)):
            value = {"step_ms": round(median, 3), **fields}
            point = {**config, "context": context, "batch": 1, "how": how}
            bench.recorder.write("decode", f"{config['layout']} {how}", point, "derived", value=value)
    finally:
        decoder.close()


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
        parser.add_argument("--layouts", default="", help="of single,kvpN,tpN; default all")

    sections = {"decode": decode}
    args = parse(__doc__ or "", list(sections), argv, more)
    mesh = open_mesh(args)
    try:
        return run_sections(Bench("bench_model", args, mesh), sections)
    finally:
        mesh.close()


if __name__ == "__main__":
    sys.exit(main())

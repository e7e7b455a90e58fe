"""The engine under load: time to first token, between tokens, throughput, host time of a step, use of the KV cache.

    torchrun --standalone --nproc-per-node 2 scripts/bench_load.py --sections poisson --rate 4 --out out/e.jsonl

Sections are workloads (bench_workloads.py). Names of figures are those of vLLM's serving benchmark. Weights and tokens
are random, so a request always runs to its length. Arrivals are in real time, decided by rank 0. Single figures of the
engine are those of bench_engine.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
import torch
from bench_host import HostClock
from bench_model import layouts
from bench_run import Bench, open_mesh, parse, run_sections
from bench_session import greedy
from bench_weights import MODELS, build, sizes
from bench_workloads import WORKLOADS, Arrival

from distdec.capacity import tokens_needed
from distdec.config import BackendConfig, CacheConfig, Config, SchedulerConfig
from distdec.engine import Engine
from distdec.mesh import Mesh
from distdec.request import Request
from distdec.runner import Runner
from distdec.sizing import describe_start


class Load:
    """One run of a workload on every rank; rank 0 takes the times."""

    def __init__(self, engine: Engine, arrivals: list[Arrival]) -> None:
        self.engine, self.arrivals = engine, arrivals
        self.clock = HostClock(engine)
        self.arrived: dict[int, float] = {}
        self.times: dict[int, list[float]] = {}
        self.kv_use = 0.0
        self.decode_steps = self.steps = 0

    def run(self) -> None:
        """Send the requests and step until all have ended."""
        engine, waiting = self.engine, list(self.arrivals)
        start = time.perf_counter()
        while True:
            if engine.mesh.is_leader:
                waiting = self._send(waiting, start)
            result = engine.step()
            now = time.perf_counter()
            self.clock.end_step(result.plan.decode_only)
            self.steps += 1
            self.decode_steps += result.plan.decode_only
            for event in result.events:
                if event.token_id is not None:
                    self.times.setdefault(event.request_id, []).append(now)
            if self.steps % 16 == 1:
                stats = engine.cache.kv.stats()
                self.kv_use = max(self.kv_use, sum(stats.used_frames) / sum(engine.cache.layout.num_frames))
            if result.done:
                break
        self.seconds = time.perf_counter() - start

    def _send(self, waiting: list[Arrival], start: float) -> list[Arrival]:
        """Add what has arrived; with nothing to do, sleep until something has: the other ranks wait for a plan."""
        while waiting:
            left = start + waiting[0].at_s - time.perf_counter()
            if left > 0:
                if self.engine.scheduler.has_work:
                    break
                time.sleep(left)
            arrival = waiting.pop(0)
            self.arrived[self.engine.add(arrival.prompt, greedy(arrival.new))] = start + arrival.at_s
        return waiting

    def figures(self) -> dict[str, Any]:
        """Return the figures; on rank 0."""
        tokens = sum(len(times) for times in self.times.values())
        prompts = sum(len(arrival.prompt) for arrival in self.arrivals)
        ended = [self.times[i] for i in self.arrived]
        first = [1e3 * (self.times[i][0] - at) for i, at in self.arrived.items()]
        later = [1e3 * (times[-1] - times[0]) / (len(times) - 1) for times in ended if len(times) > 1]
        gaps = [1e3 * gap for times in ended for gap in np.diff(times).tolist()]
        stats = self.engine.scheduler.stats
        return {
            "completed": len(ended),
            "duration_s": round(self.seconds, 3),
            "request_throughput": round(len(ended) / self.seconds, 3),
            "output_throughput": round(tokens / self.seconds, 1),
            "total_token_throughput": round((tokens + prompts) / self.seconds, 1),
            **spread("ttft", first),
            **spread("tpot", later),
            **spread("itl", gaps),
            "host_us": self.clock.medians(),
            "steps": self.steps,
            "decode_steps": self.decode_steps,
            "peak_kv_use": round(self.kv_use, 4),
            "prefix_hit_rate": round(stats.hit_rate, 4),
            "drafted_tokens": stats.drafted_tokens,
            "draft_acceptance_rate": round(stats.acceptance_rate, 4),
            "preemptions": stats.preemptions,
            "offloads": stats.offloads,
            "delayed_steps": stats.delayed_steps,
        }


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Return mean, median and 99th percentile in milliseconds under vLLM's names; nothing without values."""
    if not values:
        return {}
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    parts = {"mean": float(np.mean(values)), "median": p50, "p99": p99}
    return {f"{part}_{name}_ms": round(value, 3) for part, value in parts.items()}


def measure(bench: Bench, section: str) -> None:
    """Run one workload in each layout and record it."""
    args = bench.args
    name = args.model
    dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
    arrivals = WORKLOADS[section](args, sizes(name, bench.smoke)["vocab_size"])
    for layout, kvp, tp in layouts(bench, args.layouts):
        config = {"model": name, "layout": layout, "kvp": kvp, "tp": tp, "dtype": str(dtype).removeprefix("torch.")}
        keys = ("prefill_slice", "token_budget", "max_rows", "max_pending", "deadline", "drafts", "graphs", "host_gb")
        config |= {key: getattr(args, key) for key in keys} | {"workload": section, "requests": len(arrivals)}
        config |= {"input_tokens": sum(len(a.prompt) for a in arrivals), "output_tokens": sum(a.new for a in arrivals)}
        with bench.point(section, config, layout) as go:
            if not go:
                continue
            mesh = Mesh.single(bench.device) if layout == "single" else Mesh.create(kvp, tp, device=bench.device)
            engine = make_engine(args, name, mesh, dtype, arrivals)
            try:
                # backwards, so that no prompt of the workload finds them cached
                engine.generate([(arrival.prompt[:-40:-1], greedy(4)) for arrival in arrivals[:3]])
                engine.scheduler.stats = type(engine.scheduler.stats)()
                load = Load(engine, arrivals)
                load.run()
                if mesh.is_leader:
                    value = {**load.figures(), "merge": engine.runner.attention.merge.mode}
                    bench.recorder.write(section, layout, config, "derived", value=value)
            finally:
                engine.close()
            if layout != "single":
                mesh.close()


def make_engine(args: argparse.Namespace, name: str, mesh: Mesh, dtype: torch.dtype, arrivals: list[Arrival]) -> Engine:
    """Build a random model and an engine whose cache holds what the workload needs, or `--kv-tokens`."""
    requests = [Request(i, tuple(arrival.prompt), greedy(arrival.new)) for i, arrival in enumerate(arrivals)]
    size = args.kv_tokens or tokens_needed(requests, args.max_rows, CacheConfig.min_chunk) + CacheConfig.min_chunk
    config = Config(
        cache=CacheConfig(max_tokens=size, prefix_caching=not args.no_prefix_caching, host_gb=args.host_gb),
        scheduler=SchedulerConfig(
            prefill_slice=args.prefill_slice,
            token_budget=args.token_budget,
            max_rows=args.max_rows,
            max_pending_prefills=args.max_pending,
            decode_deadline_ms=args.deadline,
            num_draft_tokens=args.drafts,
        ),
        backend=BackendConfig(name=args.backend, graphs=args.graphs),
    )
    start = time.perf_counter()
    model = build(name, mesh, dtype, smoke=args.smoke)
    loaded = time.perf_counter() - start
    runner = Runner.build(model, mesh, config, size)
    if mesh.is_leader:
        print(describe_start({"load": loaded, **runner.start_s}, runner.room, runner.cache.pool.bytes), flush=True)
    return Engine(runner, config.scheduler, eos_ids=())


def main(argv: list[str] | None = None) -> int:
    """Run the sections; see the module's docstring."""

    def more(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--model", choices=sorted(MODELS), default="llama-3-8b")
        add("--layouts", default="", help="of single,kvpN,tpN; default all")
        add("--num-prompts", type=int, default=32)
        add("--input-len", type=int, default=1024)
        add("--output-len", type=int, default=128)
        add("--rate", type=float, default=4.0, help="poisson, sharegpt: requests a second")
        add("--kv-tokens", type=int, default=0, help="tokens of cache; 0: what the workload needs")
        add("--host-gb", type=float, default=0.0, help="GiB of host memory of a rank for preempted requests")
        add("--prefill-slice", type=int, default=2048)
        add("--token-budget", type=int, default=4096)
        add("--max-rows", type=int, default=64)
        add("--max-pending", type=int, default=4, help="prompts under way at the same time")
        add("--deadline", type=float, default=50.0, help="decode deadline in ms; 0: none")
        add("--drafts", type=int, default=0, help="most tokens guessed for a row from its own text; 0: none")
        add("--graphs", choices=("auto", "on", "off"), default="auto")
        add("--no-prefix-caching", action="store_true")

    sections = {name: (lambda bench, name=name: measure(bench, name)) for name in WORKLOADS}
    args = parse(__doc__ or "", list(sections), argv, more)
    if args.smoke:
        args.num_prompts, args.input_len, args.output_len, args.rate = 5, 24, 6, 100.0
        args.prefill_slice, args.token_budget, args.max_rows = 64, 128, 8
    mesh = open_mesh(args)
    try:
        return run_sections(Bench("bench_load", args, mesh), sections)
    finally:
        mesh.close()


if __name__ == "__main__":
    sys.exit(main())

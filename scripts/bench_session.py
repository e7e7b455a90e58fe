"""One random model and one KV cache in one layout of the ranks, for all sections of a benchmark, and steps timed."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import benchlib
import torch
from bench_model import layouts
from bench_run import CEILING, Bench, open_mesh
from bench_timing import Timing, kernel_names, summarize, time_calls
from bench_weights import HEADS, MODELS, build, sizes

from distdec.config import BackendConfig, CacheConfig, Config, ParallelConfig, SchedulerConfig
from distdec.degrees import validate_layout
from distdec.engine import Engine, StepResult
from distdec.hf.sharding import rank_sum_of
from distdec.mesh import Mesh
from distdec.request import SamplingParams, StepPlan
from distdec.runner import Runner
from distdec.sizing import describe_start

WARM_UP = 8
"""Steps of each measurement that do not count: clocks rise, and pages of the host's tables are touched."""
CEILING_BYTES = 2 << 30
"""Bytes of one read of the ceiling: large enough for its best rate, as a step reads far more than that."""


class Layout(NamedTuple):
    """A layout of this run's ranks, of `bench_model.layouts`."""

    name: str
    kvp: int
    tp: int


class Need(NamedTuple):
    """What a section asks of the engine: decode rows at a time, tokens of cache, tokens of a step."""

    rows: int
    tokens: int
    budget: int

    def __or__(self, other: object) -> Need:
        """Return what serves both."""
        assert isinstance(other, Need)
        return Need(*map(max, self, other))


class Session:
    """A model, its cache and captured steps, made at first use and kept for all sections.

    Args:
        need: what the sections ask of it.
        args: --model, --backend, --graphs, --merge, --reduce and --option are read.
    """

    def __init__(self, bench: Bench, layout: Layout, need: Need, args: argparse.Namespace) -> None:
        self.bench, self.layout, self.need, self.args = bench, layout, need, args
        self.shape = sizes(args.model, args.smoke)
        self.dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
        self.kernels: list[str] = []
        self._mesh: Mesh | None = None
        self._model: torch.nn.Module | None = None
        self._runner: Runner | None = None
        self._ceiling: tuple[float, int] | None = None

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            kvp, tp = self.layout.kvp, self.layout.tp
            # the script's own mesh has all its ranks along the sequence
            self._mesh = self.bench.mesh if tp == 1 else Mesh.create(kvp, tp, device=self.bench.device)
        return self._mesh

    @property
    def model(self) -> torch.nn.Module:
        if self._model is None:
            self._model = build(self.args.model, self.mesh, self.dtype, smoke=self.args.smoke)
        return self._model

    @property
    def config(self) -> Config:
        """The engine's, with the options of the command line."""
        config = Config(
            parallel=ParallelConfig(merge=self.args.merge, reduce=self.args.reduce),
            cache=CacheConfig(max_tokens=self.need.tokens, prefix_caching=False),
            scheduler=SchedulerConfig(max_rows=self.need.rows, token_budget=self.need.budget),
            backend=BackendConfig(name=self.args.backend, graphs=self.args.graphs),
        )
        for option in self.args.option:
            config = override(config, option)
        return config

    @property
    def runner(self) -> Runner:
        if self._runner is None:
            start = time.perf_counter()
            model = self.model
            loaded = time.perf_counter() - start
            self._runner = Runner.build(model, self.mesh, self.config, self.need.tokens)
            self._runner.start_s = {"load": loaded, **self._runner.start_s}
            # twice: what is compiled while launches are watched would stay slow
            self._request()
            self.kernels = kernel_names(self._request)
            for pool in (self._runner.cache.pool.k, self._runner.cache.pool.v):
                for layer in pool:
                    layer.normal_()
            if self.mesh.is_leader:
                pool = self._runner.cache.pool.bytes
                told = describe_start(self._runner.start_s, self._runner.room, pool)
                total = time.perf_counter() - start
                print(f"model, cache of {self.need.tokens} tokens and captures: {total:.1f} s; {told}")
        return self._runner

    def _request(self) -> None:
        """Run a short request, its decode steps eagerly."""
        graphs, self.runner.graphs = self.runner.graphs, None
        self.engine().generate([([5] * 40, greedy(3))])
        self.runner.graphs = graphs

    def engine(self, *, prefix_caching: bool = False, **scheduler: Any) -> Engine:
        """Return a new engine on the same model and cache, which holds no sequence."""
        runner = self.runner
        for sequence in runner.cache.kv.sequences():
            # left by a section that failed
            runner.cache.kv.free(sequence)
        runner.cache.prefix_caching = prefix_caching
        options = {"decode_deadline_ms": 0.0, "prefill_slice": self.args.prefill_slice} | scheduler
        return Engine(runner, dataclasses.replace(self.config.scheduler, **options), eos_ids=())

    def start_rows(self, engine: Engine, lengths: Sequence[int], new: int) -> list[int]:
        """Start requests that decode at once, behind `lengths` random keys and values; returns their ids.

        A row's last prompt token is the first to be computed: after its first step it holds `length` tokens. Every
        rank calls this.
        """
        [first] = engine.mesh.agree([engine._next_id])
        for i, length in enumerate(lengths):
            if engine.mesh.is_leader:
                engine.add([5 + i % 64] * length, greedy(new))
                state = engine.scheduler.waiting.pop()
                engine.scheduler.running[first + i] = state
                state.num_computed = length - 1
            engine.cache.kv.adopt(first + i)
            engine.cache.kv.extend(first + i, length - 1)
        return list(range(first, first + len(lengths)))

    def describe(self, **more: Any) -> dict[str, Any]:
        """Return the config of a record."""
        layout = {"model": self.args.model, "layout": self.layout.name, "kvp": self.layout.kvp, "tp": self.layout.tp}
        how = {"graphs": self.args.graphs, "compile": self.config.backend.compile, "option": self.args.option}
        return {**layout, "dtype": str(self.dtype).removeprefix("torch."), **how, **more}

    def fields(self) -> dict[str, Any]:
        """Return what a record holds beside its times."""
        merge = self.runner.attention.merge.mode
        total = rank_sum_of(self.runner.model)
        sums = "none" if total is None else total.reason
        return {"kernels": self.kernels, "merge": merge, "sum": sums, "model_shape": self.shape}

    def record(self, section: str, name: str, config: dict[str, Any], **fields: Any) -> None:
        """Write one measured record."""
        backend = self.runner.cache.backend.name
        self.bench.recorder.write(section, name, config, backend=backend, **self.fields(), **fields)

    def weight_bytes(self) -> int:
        """Return the bytes of weights that a step of this rank reads: all but an embedding table, of which few rows."""
        model = self.model
        sizes = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters() if p.numel()}
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        return sum(sizes.values()) - (
            0 if table.data_ptr() == head.data_ptr() else table.numel() * table.element_size()
        )

    def kv_bytes(self, plan: StepPlan) -> int:
        """Return the bytes of keys and values that this rank held of all live sequences at a step, its own included.

        The next step may have been launched already: its tokens are left out, by this rank's share of all tokens.
        """
        pool, kv = self.runner.cache.pool, self.runner.cache.kv
        seen = sum(row.start + row.num_tokens - row.num_drafts for row in plan.rows)
        held = sum(kv.length(row.request_id) for row in plan.rows)
        return self.runner.cache.local_tokens() * seen // held * (pool.bytes // pool.k.shape[1])

    def read_ceiling(self) -> tuple[float, int]:
        """Return (us, bytes) of a plain read in this run, on the slowest rank."""
        if self._ceiling is None:
            pool = self.runner.cache.pool
            copies = [pool.layer(i) for i in range(min(4, pool.k.shape[0]))]
            size = min(CEILING_BYTES, 2 * copies[0][0].nbytes)
            call, num_bytes = self.bench.meter.call(copies, size)
            timing = time_calls({CEILING: call}, self.bench.timer(rotations=len(copies)))[CEILING]
            if not isinstance(timing, Timing):
                raise timing
            self._ceiling = timing.median_us, num_bytes
        return self._ceiling

    def drop(self) -> None:
        """Give back the cache and the captured steps; the next section makes its own."""
        if self._runner is not None:
            self._runner.close()
        self._runner = self._ceiling = None
        # a runner, its graphs and its binding refer to each other
        gc.collect()
        if self.bench.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Give back everything."""
        self.drop()
        self._model = None
        if self._mesh is not None and self._mesh is not self.bench.mesh:
            self._mesh.close()


def override(config: Config, option: str) -> Config:
    """Return the config with `section.key=value` changed, the value of the type that the key has.

    Raises:
        ValueError: no such key, or the config refuses the value.
    """
    path, equals, value = option.partition("=")
    section, _, key = path.partition(".")
    old = getattr(getattr(config, section, None), key, None)
    if not equals or not isinstance(old, bool | int | float | str):
        raise ValueError(f"option {option!r} is not section.key=value of a key that is set")
    new = value == "true" if isinstance(old, bool) else type(old)(value)
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{key: new})})


def greedy(new: int) -> SamplingParams:
    """Return sampling that runs to its length."""
    return SamplingParams(max_new_tokens=new, ignore_eos=True)


class Step(NamedTuple):
    """One step as the host saw it: when it ended (s), its decode rows, its tokens of prompts."""

    ended: float
    decode_rows: int
    prefill_tokens: int


def drive(engine: Engine, on_step: Callable[[int, StepResult], None] = lambda count, result: None) -> list[Step]:
    """Step until all requests have ended; every rank.

    Args:
        on_step: called after each step with its number, from 1; rank 0 may add and cancel there.
    """
    steps: list[Step] = []
    while True:
        result = engine.step()
        rows = result.plan.rows
        counts = [row.num_tokens - row.num_drafts for row in rows]
        decode = counts.count(1)
        steps.append(Step(time.perf_counter(), decode, sum(counts) - decode))
        on_step(len(steps), result)
        if result.done:
            assert not engine.cache.kv.sequences(), "a sequence outlived its engine"
            return steps


def gaps(bench: Bench, steps: list[Step]) -> list[tuple[float, Step]]:
    """Return milliseconds from each step's predecessor to its end, the maximum over the ranks, with the step."""
    pairs = list(itertools.pairwise(steps))
    times = bench.maximum([1e3 * (later.ended - earlier.ended) for earlier, later in pairs])
    return [(time, later) for time, (_, later) in zip(times, pairs, strict=True)]


def timing_fields(samples_ms: list[float]) -> dict[str, Any]:
    """Return the fields of a measured record from times of single steps or requests, taken by the host."""
    return dataclasses.asdict(summarize([1e3 * sample for sample in samples_ms], 1, "host"))


def unsplit(runner: Runner, need: Need) -> None:
    """Run decode steps with one program a row and KV head from now on; the steps are captured anew.

    Raises:
        Refused: the backend does not split.
    """
    cache, backend = runner.cache, runner.cache.backend
    if backend.plan_spans is None:
        raise benchlib.Refused(f"backend {backend.name} has no splits")

    def whole(num_rows: int, num_kv_heads: int, *_: Any) -> int:
        return num_rows * num_kv_heads

    captured = runner.graphs
    if captured is not None:
        captured.close()
    cache.backend = cache.buffers.backend = dataclasses.replace(backend, plan_spans=whole)
    # the tables of the schedules are as long as there are programs
    cache.buffers.schedule_for(cache.pool)
    if captured is not None:
        runner.capture(need.rows, need.budget)


def whole_chunks(rows: int, length: int, layout: Layout) -> int:
    """Return the tokens of cache that rows of a length take, in chunks of 1,024 that several ranks fill unevenly."""
    each = -(-length // 1024) * 1024 + (1024 if layout.kvp > 1 else 0)
    return rows * each + 2048


def session_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a session reads."""
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), default="llama-3-8b")
    add("--layouts", default="", help="of single, kvpN, tpN, kvpNtpM; default: all ranks along the sequence")
    add("--graphs", choices=("auto", "on", "off"), default="auto")
    add("--merge", default="auto", help="as parallel.merge")
    add("--reduce", default="auto", help="as parallel.reduce")
    add("--option", action="append", default=[], help="section.key=value of the engine's config, may be repeated")
    add("--prefill-slice", type=int, default=2048)


Needs = Callable[[str, argparse.Namespace, Layout], Need]


def main_loop(
    script: str, args: argparse.Namespace, sections: dict[str, Callable[[Session], None]], needs: Needs
) -> int:
    """Run the chosen sections in every layout; return the exit status, 1 where an error came."""
    mesh = open_mesh(args)
    try:
        bench = Bench(script, args, mesh)
        wanted = args.layouts or ("single" if mesh.world_size == 1 else f"kvp{mesh.world_size}")
        for layout in itertools.starmap(Layout, layouts(bench, wanted)):
            if layout.kvp * layout.tp != mesh.world_size:
                raise ValueError(f"layout {layout.name} is one rank's; {mesh.world_size} were started")
            _run(bench, layout, sections, needs)
        bench.recorder.close()
        return int(bench.recorder.counts["check_failed"] + bench.recorder.counts["error"] > 0)
    finally:
        mesh.close()


def _run(bench: Bench, layout: Layout, sections: dict[str, Callable[[Session], None]], needs: Needs) -> None:
    args, need = bench.args, Need(1, 0, 1)
    for name in args.sections:
        need |= needs(name, args, layout)
    session = Session(bench, layout, need, args)
    try:
        validate_layout(bench.mesh.world_size, layout.kvp, layout.tp, *(session.shape[key] for key in HEADS))
    except ValueError as refusal:
        for name in args.sections:
            bench.recorder.write(name, layout.name, session.describe(), "unavailable", reason=str(refusal))
        return
    try:
        for name in args.sections:
            if bench.mesh.rank == 0:
                print(f"-- {layout.name} {name}, {bench.budget.left:.0f} s left", flush=True)
            with bench.point(name, {"layout": layout.name}, "section") as go:
                if go:
                    sections[name](session)
    finally:
        session.close()

"""Profile some steps of the engine: a trace with named ranges for Perfetto, and a table of the top kernels.

    python3 scripts/profile_step.py --context 131072 --trace out/step.json
    torchrun --standalone --nproc-per-node 2 scripts/profile_step.py --sections decode,prefill --rows 16

Sections: decode (rows of --context tokens), prefill (the last slices of one prompt of --context tokens); both eager and
as captured steps, where slices are short enough to be captured. The trace of rank 0 is written as
step.decode.eager.json and so on. Weights are random, and so are the keys and values that decode rows start on.
docs/profiling.md says how to read both.

Ranges cost time on the host, the profiler more: the times of whole steps are those of bench_engine.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from bench_prompts import prompt
from bench_run import parse
from bench_session import WARM_UP, Layout, Need, Session, drive, greedy, main_loop, session_arguments, whole_chunks
from bench_trace import Work, labels_of, show, table, work_of
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from distdec.engine import Engine, StepResult

PHASES = {"_agree": "plan", "_reserve": "reserve, fill", "_sample": "sample", "_commit": "commit"}
MODULES = {
    "self_attn": "projections",
    "mlp": "mlp",
    "lm_head": "head",
    "embed_tokens": "embedding",
    "rotary_emb": "rotary",
}
OPS = {"store_kv": "store", "decode": "attention", "decode_splits": "attention", "prefill": "attention"}
OPS |= {"finish_splits": "combine", "fold_ranks": "combine", "derive_tiles": "tables", "derive_spans": "tables"}


def decode(session: Session) -> None:
    """Decode rows."""
    args, new = session.args, WARM_UP + session.args.steps + 2

    def start(engine: Engine) -> None:
        session.start_rows(engine, [max(1, args.context - new)] * args.rows, new)

    both(session, "decode", {"context": args.context, "batch": args.rows}, WARM_UP, start)


def prefill(session: Session) -> None:
    """The last slices of a long prompt."""
    args = session.args
    slices = -(-args.context // args.prefill_slice)

    def start(engine: Engine) -> None:
        if engine.mesh.is_leader:
            engine.add(prompt(session, args.context, 1), greedy(1))

    point = {"prompt": args.context, "prefill_slice": args.prefill_slice}
    both(session, "prefill", point, max(1, slices - args.steps - 1), start)


def both(session: Session, section: str, point: dict[str, Any], skip: int, start: Callable[[Engine], None]) -> None:
    """Profile what `start` has begun, behind `skip` steps: eager, and as captured steps."""
    labels, graphs = None, session.runner.graphs
    for how in ("eager", "graph"):
        if how not in session.args.how.split(","):
            continue
        config = session.describe(**point, how=how)
        with session.bench.point(section, config, how) as go:
            if not go:
                continue
            if how == "graph" and graphs is None:
                session.bench.recorder.write(section, how, config, "unavailable", reason="nothing is captured here")
                continue
            session.runner.graphs = graphs if how == "graph" else None
            try:
                engine = session.engine()
                start(engine)
                work = profiled(session, engine, section, how, config, skip, labels)
            finally:
                session.runner.graphs = graphs
            # a replay is one launch: what its kernels are for is known from the eager steps
            labels = labels_of(work)


def profiled(
    session: Session, engine: Engine, section: str, how: str, config: dict[str, Any], skip: int, labels: Any
) -> list[Work]:
    """Run the engine to its end with the profiler on after `skip` steps; write, print and record what it saw."""
    args, device = session.args, session.bench.device
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    profiler = profile(activities=activities)
    seen: list[int] = []

    def act(count: int, result: StepResult) -> None:
        if count == skip:
            session.bench.synchronize()
            profiler.start()
        elif count > skip and len(seen) < args.steps:
            seen.append(count)
            if len(seen) == args.steps:
                session.bench.synchronize()
                profiler.stop()

    with ranges(engine, inside=how == "eager"):
        steps = drive(engine, act)
    if len(seen) < args.steps:
        raise ValueError(f"{len(seen)} steps to profile instead of {args.steps}: lengthen --context")
    first = seen[0] - 1
    step_us = 1e6 * (steps[first + args.steps - 1].ended - steps[first - 1].ended) / args.steps
    [step_us] = session.bench.maximum([step_us])
    work = work_of(read_trace(profiler, trace_path(args.trace, section, how) if session.mesh.is_leader else None))
    lines = table(work, args.steps, step_us, labels)
    busy = sum(line.us for line in lines)
    value = {"steps": args.steps, "step_us": round(step_us, 1), "kernels_us": round(busy, 1)}
    top = [{**line._asdict(), "name": line.name[:160]} for line in lines[: args.top]]
    session.bench.recorder.write(section, how, config, "derived", value=value, top=top)
    if session.mesh.is_leader:
        print(f"{section}, {how}: {step_us:.1f} us a step under the profiler, {busy:.1f} us of them in kernels")
        print(show(lines, args.top))
    return work


def trace_path(wanted: str | None, section: str, how: str) -> Path | None:
    """Return where one trace goes. Example: out/step.json becomes out/step.decode.graph.json."""
    if wanted is None:
        return None
    path = Path(wanted)
    return path.with_name(f"{path.stem}.{section}.{how}{path.suffix}")


def read_trace(profiler: profile, path: Path | None) -> list[dict[str, Any]]:
    """Write the trace and return its events."""
    with tempfile.TemporaryDirectory() as folder:
        path = path or Path(folder) / "trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


@contextmanager
def ranges(engine: Engine, *, inside: bool) -> Iterator[None]:
    """Name the phases of a step meanwhile, and `inside` the model its parts, the ops and the merge.

    What torch.compile has made of a layer keeps no ranges of modules; those of the ops stay.
    """
    runner, cache = engine.runner, engine.cache
    with ExitStack() as undo:

        def put(owner: Any, name: str, label: str) -> None:
            kept = vars(owner).get(name)
            setattr(owner, name, named(getattr(owner, name), label))
            undo.callback(delattr, owner, name) if kept is None else undo.callback(setattr, owner, name, kept)

        for method, label in PHASES.items():
            put(engine, method, label)
        put(runner, "run", "run")
        put(cache.buffers, "fill", "fill")
        if inside:
            backend, merge = cache.backend, runner.attention.merge
            verbs = {verb: label for verb, label in OPS.items() if getattr(backend, verb) is not None}
            ranged = replace(backend, **{verb: named(getattr(backend, verb), label) for verb, label in verbs.items()})
            undo.callback(setattr, cache, "backend", backend)
            undo.callback(setattr, cache.buffers, "backend", backend)
            cache.backend = cache.buffers.backend = ranged
            # a call finds `__call__` on the class alone
            put(type(merge), "__call__", "merge")
            if hasattr(merge, "merge_splits"):
                put(merge, "merge_splits", "merge")
            for module, label in parts(runner.model):
                hook(module, label, undo)
        yield


def parts(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules to name, with their names; a compiled one as a whole, as a hook inside compiles it anew."""
    compiled: list[str] = []
    for name, module in model.named_modules():
        if name.startswith(tuple(compiled)):
            continue
        leaf = name.rpartition(".")[2]
        if getattr(module, "_compiled_call_impl", None) is not None:
            compiled.append(f"{name}.")
            yield module, "layer"
        elif leaf.endswith("norm") or leaf in MODULES:
            yield module, MODULES.get(leaf, "norm")


def named(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    """Return the function with a named range around each call."""

    @wraps(function)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(label):
            return function(*args, **kwargs)

    return ranged


def hook(module: nn.Module, label: str, undo: ExitStack) -> None:
    """Put a named range around a module's calls, until `undo`."""
    opened: list[record_function] = []

    def enter(*_: Any) -> None:
        opened.append(record_function(label))
        opened[-1].__enter__()

    def leave(*_: Any) -> None:
        opened.pop().__exit__(None, None, None)

    undo.callback(module.register_forward_pre_hook(enter).remove)
    undo.callback(module.register_forward_hook(leave, always_call=True).remove)


def needs(section: str, args: argparse.Namespace, layout: Layout) -> Need:
    """Return what a section asks of the engine."""
    if section == "prefill":
        return Need(1, whole_chunks(1, args.context, layout), args.prefill_slice)
    return Need(args.rows, whole_chunks(args.rows, args.context, layout), args.rows)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this script's arguments."""
    session_arguments(parser)
    add = parser.add_argument
    add("--trace", help="where the trace goes, a .json; default: nowhere")
    add("--how", default="eager,graph", help="of eager, graph")
    add("--rows", type=int, default=1, help="decode rows")
    add("--context", type=int, default=32768, help="tokens of a decode row, or of the prompt")
    add("--steps", type=int, default=4, help="steps to profile")
    add("--top", type=int, default=20, help="lines of the table")


def main(argv: list[str] | None = None) -> int:
    """Profile the sections; see the module's docstring."""
    sections = {"decode": decode, "prefill": prefill}
    args = parse(__doc__ or "", list(sections), argv, arguments)
    if args.smoke:
        args.context, args.steps, args.prefill_slice, args.rows = 150, 2, 32, min(args.rows, 2)
    return main_loop("profile_step", args, sections, needs)


if __name__ == "__main__":
    sys.exit(main())

"""Whole steps of the engine: decode against its roofline, prompts, long prompts beside decode rows, prefix hits.

    python3 scripts/bench_engine.py --sections tpot,host,prefill,prefix,generate,batch64 --out out/engine.jsonl
    torchrun --standalone --nproc-per-node 2 scripts/bench_engine.py --sections tpot,itl,prefill --out out/engine2.jsonl
    torchrun --standalone --nproc-per-node 4 scripts/bench_engine.py --sections tpot --layouts kvp4 --contexts 1048576

Sections: tpot (`--rows` decode rows at each context: time per output token over the time its bytes take at the read
ceiling of this run), host (what the host does in a step), prefill (one long prompt), prefix (a prompt that shares most
of an earlier one), itl (decode rows while a long prompt is prefilled), generate (transformers' own generate, same
weights; bench_generate.py), batch64 (throughput, with split-KV and without); not by default: sweep (slice and prompts
under way, against TTFT and ITL), drafts (with --option scheduler.num_draft_tokens=K: steps of K wrong drafts a row over
steps without, at each context).

Weights are random. Where a record's `fill` is random, decode rows start on random keys and values instead of a prefill.
All sections of a layout share one model, one cache and its captured steps. Times are the host's, from the end of a step
to the end of the next, the maximum over the ranks. Arrivals over time are in bench_load.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import benchlib
import numpy as np
from bench_generate import generate
from bench_host import HostClock
from bench_prompts import itl, itl_tokens, prefill, prefix, sweep
from bench_run import parse
from bench_session import (
    WARM_UP,
    Layout,
    Need,
    Session,
    drive,
    gaps,
    main_loop,
    session_arguments,
    timing_fields,
    unsplit,
    whole_chunks,
)

from distdec.engine import Engine, StepResult


def tpot(session: Session) -> None:
    """Decode rows at each context, over the roofline of their bytes."""
    args = session.args
    for context in args.contexts:
        config = session.describe(context=context, batch=args.rows, fill="random")
        with session.bench.point("tpot", config, "decode step") as go:
            if go:
                times, kv_bytes = decode_rows(session, [context] * args.rows, args.steps)
                weights, (ceiling_us, ceiling_bytes) = session.weight_bytes(), session.read_ceiling()
                rate = ceiling_bytes / ceiling_us / 1e6
                [floor_ms] = session.bench.maximum([1e-9 * (weights + kv_bytes) / rate])
                fields = timing_fields(times)
                fields |= {"weight_bytes": weights, "kv_bytes": kv_bytes, "ceiling_tb_s": round(rate, 4)}
                fields |= {"floor_ms": round(floor_ms, 4), "mean_ms": round(float(np.mean(times)), 4)}
                ratio = round(fields["median_us"] / 1e3 / floor_ms, 4)
                session.record("tpot", "decode step", config, **fields, baseline="roofline", time_over_baseline=ratio)


def drafts(session: Session) -> None:
    """What drafts cost where none is right: a step of them over one without, which may be launched ahead."""
    args, most = session.args, session.config.scheduler.num_draft_tokens
    if not most:
        reason = "no drafts are captured: give --option scheduler.num_draft_tokens=K"
        session.bench.recorder.write("drafts", "drafts", session.describe(), "unavailable", reason=reason)
        return
    for context in args.contexts:
        base: float | None = None
        for count in (0, most):
            config = session.describe(context=context, batch=args.rows, fill="random", drafts=count)
            with session.bench.point("drafts", config, f"{count} drafts") as go:
                if not go:
                    continue
                engine = session.engine(num_draft_tokens=count)
                engine.scheduler.drafter.propose = wrong_drafts
                fields = timing_fields(decode_rows(session, [context] * args.rows, args.steps, engine)[0])
                if base is not None:
                    fields |= {"baseline": "0 drafts", "time_over_baseline": round(fields["median_us"] / base, 4)}
                base = fields["median_us"]
                counts = engine.scheduler.stats
                value = {"drafted_tokens": counts.drafted_tokens, "accepted_tokens": counts.accepted_tokens}
                session.record("drafts", f"{count} drafts", config, **fields, value=value)


def wrong_drafts(tokens: np.ndarray, most: int) -> tuple[int, ...]:
    """Propose the first tokens of the vocabulary, which a random model takes once in a vocabulary."""
    return tuple(range(most))


def decode_rows(
    session: Session, contexts: list[int], steps: int, engine: Engine | None = None
) -> tuple[list[float], int]:
    """Decode rows that end at `contexts`; returns each step's ms and this rank's KV bytes of a step, warm-up left out.

    A row of context 8192 and 64 steps that count behind 8 that warm up starts at 8120.
    """
    new = WARM_UP + steps + 1
    engine = engine or session.engine()
    ids = session.start_rows(engine, [max(1, context - new + 1) for context in contexts], new)
    held: list[int] = []

    def note(count: int, result: StepResult) -> None:
        if len(result.plan.rows) == len(ids):
            held.append(session.kv_bytes(result.plan))

    found = gaps(session.bench, drive(engine, note))
    times = [ms for ms, step in found if step.decode_rows == len(ids)][WARM_UP:]
    return times, sum(held[WARM_UP + 1 :]) // max(1, len(held) - WARM_UP - 1)


def host(session: Session) -> None:
    """What the host does in a decode step of many rows; `device_wait` is the rest of the step's time."""
    args = session.args
    config = session.describe(context=args.row_context, batch=args.host_rows, fill="random")
    with session.bench.point("host", config, "step") as go:
        if not go:
            return
        new = WARM_UP + args.steps + 1
        engine = session.engine()
        clock = HostClock(engine, split_wait=True)
        session.start_rows(engine, [args.row_context - new] * args.host_rows, new)

        def note(count: int, result: StepResult) -> None:
            clock.end_step(len(result.plan.rows) == args.host_rows and count > WARM_UP)

        drive(engine, note)
        clock.stop()
        # of rank 0, which plans and samples: the others wait for it
        times = timing_fields([us / 1e3 for us in clock.host_us])
        session.record("host", "step", config, **times, value={"phases_us": clock.medians()})


def batch64(session: Session) -> None:
    """Throughput of many rows, with their keys and values split over programs and with one program a row and head."""
    args = session.args
    base = session.describe(context=args.batch_context, batch=args.batch, fill="random")
    split: float | None = None
    for name in ("split", "no split"):
        config = {**base, "split": name == "split"}
        with session.bench.point("batch64", config, name) as go:
            if not go:
                continue
            if name == "no split":
                try:
                    unsplit(session.runner, session.need)
                except benchlib.Refused as refused:
                    session.bench.recorder.write("batch64", name, config, "unavailable", reason=str(refused))
                    continue
            times, _ = decode_rows(session, [args.batch_context] * args.batch, args.steps)
            fields = timing_fields(times)
            per_s = {"value": {"tokens_per_s": round(1e6 * args.batch / fields["median_us"], 1)}}
            if split is not None:
                per_s |= {"baseline": "split", "time_over_baseline": round(fields["median_us"] / split, 4)}
            split = fields["median_us"]
            session.record("batch64", name, config, **fields, **per_s)
    # what comes after it makes its own cache and captures
    session.drop()


def needs(section: str, args: argparse.Namespace, layout: Layout) -> Need:
    """Return what a section asks of the engine."""

    def cache(rows: int, length: int) -> int:
        return whole_chunks(rows, length, layout)

    beside_rows = cache(args.itl_rows, args.row_context + itl_tokens(args))
    budget = args.prefill_slice
    return {
        "tpot": Need(args.rows, cache(args.rows, max(args.contexts)), max(64, args.rows)),
        "host": Need(args.host_rows, cache(args.host_rows, args.row_context), args.host_rows),
        "prefill": Need(1, cache(1, args.prompt_len), budget),
        "prefix": Need(1, cache(2, args.prefix_len), budget),
        "itl": Need(args.itl_rows + 1, beside_rows + cache(1, args.prompt_len), budget + args.itl_rows),
        "drafts": Need(args.rows, cache(args.rows, max(args.contexts)), max(64, 16 * args.rows)),
        "generate": Need(1, cache(1, args.generate_len + args.steps + 8), budget),
        "batch64": Need(args.batch, cache(args.batch, args.batch_context), args.batch),
        "sweep": Need(
            args.itl_rows + args.sweep_prompts,
            beside_rows + cache(args.sweep_prompts, args.sweep_len),
            max(args.slices) * max(args.pending) + args.itl_rows,
        ),
    }[section]


SECTIONS: dict[str, Callable[[Session], None]] = {
    "tpot": tpot,
    "host": host,
    "prefill": prefill,
    "prefix": prefix,
    "itl": itl,
    "generate": generate,
    "batch64": batch64,
    "sweep": sweep,
    "drafts": drafts,
}

SMOKE = {
    "contexts": [40, 90],
    "steps": 4,
    "prompt_len": 150,
    "prefix_len": 96,
    "generate_len": 70,
    "row_context": 40,
    "host_rows": 4,
    "itl_rows": 3,
    "batch": 3,
    "batch_context": 48,
    "slices": [16, 32],
    "pending": [1, 2],
    "sweep_prompts": 2,
    "sweep_len": 40,
    "prefill_slice": 32,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this script's arguments."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    session_arguments(parser)
    add = parser.add_argument
    add("--steps", type=int, default=64, help="decode steps that count")
    add("--contexts", type=numbers, default=None, help="tpot; default 8K, 128K and 512K, on several ranks 1M")
    add("--rows", type=int, default=1, help="tpot")
    add("--prompt-len", type=int, default=131072, help="prefill, itl: tokens of the long prompt")
    add("--prefix-len", type=int, default=32768)
    add("--shared", type=float, default=0.9, help="prefix: share of the second prompt that is the first's")
    add("--generate-len", type=int, default=32768)
    add("--peers", default="dynamic", help="generate: of dynamic, static (which compiles for minutes)")
    add("--peer-seconds", type=float, default=200.0, help="generate: most time of one of transformers' runs")
    add("--row-context", type=int, default=4096, help="host, itl, sweep: tokens of a decode row")
    add("--host-rows", type=int, default=64)
    add("--itl-rows", type=int, default=16)
    add("--deadline", type=float, default=50.0, help="itl: decode deadline in ms; 0: none")
    add("--batch", type=int, default=64)
    add("--batch-context", type=int, default=8192)
    add("--slices", type=numbers, default=[512, 1024, 2048, 4096], help="sweep")
    add("--pending", type=numbers, default=[1, 4], help="sweep: prompts under way at the same time")
    add("--sweep-prompts", type=int, default=8)
    add("--sweep-len", type=int, default=8192)


def main(argv: list[str] | None = None) -> int:
    """Run the sections in each layout; see the module's docstring."""
    args = parse(__doc__ or "", list(SECTIONS), argv, arguments)
    if args.smoke:
        vars(args).update(SMOKE)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    args.contexts = args.contexts or ([1 << 20] if ranks > 1 else [8192, 131072, 524288])
    return main_loop("bench_engine", args, SECTIONS, needs)


if __name__ == "__main__":
    sys.exit(main())

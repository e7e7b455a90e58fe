"""Sections of bench_engine.py with prompts: one long prompt, a shared prefix, decode rows beside prompts."""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import numpy as np
from bench_session import WARM_UP, Session, Step, drive, gaps, greedy, timing_fields

from distdec.engine import StepResult

SETTLE = 24
"""Steps of decode rows alone, before prompts come."""


def prefill(session: Session) -> None:
    """One long prompt in slices: tokens and operations a second."""
    args, length = session.args, session.args.prompt_len
    config = session.describe(prompt=length, prefill_slice=args.prefill_slice)
    with session.bench.point("prefill", config, "prompt") as go:
        if not go:
            return
        warm_up(session, args.prefill_slice)
        [first_ms], steps = prompts(session, [prompt(session, length, 1)], prefill_slice=args.prefill_slice)
        flops = prefill_flops(session.shape, length)
        value = {"tokens_per_s": round(1e3 * length / first_ms, 1), "steps": len(steps)}
        value |= {"tflops_of_all": round(flops / first_ms / 1e9, 1)}
        value |= {"tflops_per_gpu": round(flops / first_ms / 1e9 / session.mesh.world_size, 1)}
        session.record("prefill", "prompt", config, **timing_fields([first_ms]), value=value)


def prefix(session: Session) -> None:
    """Two prompts with most of their tokens in common, one after the other: times to first token."""
    args, length = session.args, session.args.prefix_len
    config = session.describe(prompt=length, shared=args.shared, prefill_slice=args.prefill_slice)
    with session.bench.point("prefix", config, "second prompt") as go:
        if not go:
            return
        warm_up(session, args.prefill_slice)
        firsts, seconds = [], []
        for repeat in range(3):
            one = prompt(session, length, 10 + repeat)
            other = (
                one[: round(args.shared * length)]
                + prompt(session, length, 20 + repeat)[: -round(args.shared * length)]
            )
            first, second = prompts(session, [one, other], in_turn=True, prefix_caching=True)[0]
            firsts.append(first)
            seconds.append(second)
        ratio = round(float(np.median(seconds) / np.median(firsts)), 4)
        session.record("prefix", "first prompt", config, **timing_fields(firsts))
        again = {"baseline": "first prompt", "time_over_baseline": ratio}
        session.record("prefix", "second prompt", config, **timing_fields(seconds), **again)


def itl(session: Session) -> None:
    """Decode rows, and after a while one long prompt among them: times between their tokens until its first one."""
    args = session.args
    how = {"prefill_slice": args.prefill_slice, "decode_deadline_ms": args.deadline}
    config = session.describe(
        batch=args.itl_rows, context=args.row_context, prompt=args.prompt_len, fill="random", **how
    )
    with session.bench.point("itl", config, "decode rows") as go:
        if not go:
            return
        warm_up(session, args.prefill_slice)
        value, alone, among = beside(session, [args.prompt_len], **how)
        session.record("itl", "decode rows alone", config, **timing_fields(alone))
        session.record("itl", "decode rows", config, **timing_fields(among), value=value)


def sweep(session: Session) -> None:
    """Slice and prompts under way at a time: how long prompts and decode rows wait, without a deadline."""
    args = session.args
    for size in args.slices:
        for pending in args.pending:
            how = {"prefill_slice": size, "max_pending_prefills": pending}
            few = args.sweep_prompts
            config = session.describe(batch=args.itl_rows, context=args.row_context, prompt=args.sweep_len, **how)
            with session.bench.point("sweep", config | {"prompts": few}, "decode rows") as go:
                if go:
                    warm_up(session, size)
                    value, _, among = beside(session, [args.sweep_len] * few, **how)
                    times = timing_fields(among)
                    session.record("sweep", "decode rows", config | {"prompts": few}, **times, value=value)


def itl_tokens(args: argparse.Namespace) -> int:
    """Return the tokens that rows beside a prompt may make: more than it has steps."""
    return SETTLE + min(4096, args.prompt_len)


def beside(session: Session, lengths: list[int], **how: Any) -> tuple[dict[str, Any], list[float], list[float]]:
    """Decode rows, then prompts among them until the last has its first token.

    Returns:
        Figures of the prompts and of their slices; milliseconds of the steps of decode rows before, and meanwhile.
    """
    args = session.args
    engine = session.engine(**how)
    rows = session.start_rows(engine, [args.row_context] * args.itl_rows, itl_tokens(args))
    # number of the step after which the prompts came, number of the step with each first token
    sent: list[int] = []
    first: dict[int, int] = {}
    waiting: set[int] = set()

    def act(count: int, result: StepResult) -> None:
        if not engine.mesh.is_leader:
            return
        if count == SETTLE:
            sent.append(count)
            waiting.update(engine.add(prompt(session, n, 30 + i), greedy(1)) for i, n in enumerate(lengths))
        for event in result.events:
            if event.request_id in waiting:
                waiting.discard(event.request_id)
                first[event.request_id] = count
                if not waiting:
                    for row in rows:
                        engine.cancel(row)

    steps = drive(engine, act)
    found = gaps(session.bench, steps)
    last = max(i for i, step in enumerate(steps) if step.prefill_tokens or step.decode_rows > args.itl_rows)
    alone = [ms for ms, _ in found[WARM_UP - 1 : SETTLE - 1]]
    # rows that reach their length before the prompts are done wait for nothing any more
    among = [ms for ms, step in found[SETTLE - 1 : last] if step.decode_rows >= args.itl_rows]
    slices = [step.prefill_tokens for step in steps if step.prefill_tokens]
    waits = [1e3 * (steps[at - 1].ended - steps[SETTLE - 1].ended) for at in first.values()]
    waits = session.bench.maximum(waits or [0.0] * len(lengths))
    value = {**spread("itl", among), **spread("ttft", waits), "steps": len(among), "rows": args.itl_rows}
    value |= {"least_slice": min(slices[:-1] or slices), "median_slice": float(np.median(slices))}
    value["steps_after_rows"] = last + 1 - SETTLE - len(among)
    value |= {"steps_without_slice": sum(not s.prefill_tokens for s in steps[SETTLE : last + 1])}
    return value, alone, among


def prompts(
    session: Session, texts: list[list[int]], *, in_turn: bool = False, prefix_caching: bool = False, **how: Any
) -> tuple[list[float], list[Step]]:
    """Return the milliseconds from each prompt's arrival to its first token, and the steps.

    Args:
        in_turn: a prompt comes when the one before has its token; otherwise all come at the start.
    """
    engine = session.engine(prefix_caching=prefix_caching, **how)
    came: dict[int, float] = {}
    done: list[tuple[int, float]] = []
    left = list(texts)

    def send() -> None:
        while left:
            came[engine.add(left.pop(0), greedy(1))] = time.perf_counter()
            if in_turn:
                return

    def act(count: int, result: StepResult) -> None:
        for event in result.events:
            done.append((event.request_id, time.perf_counter()))
            send()

    if engine.mesh.is_leader:
        send()
    steps = drive(engine, act)
    waits = [1e3 * (at - came[request]) for request, at in sorted(done)]
    return session.bench.maximum(waits or [0.0] * len(texts)), steps


def warm_up(session: Session, size: int) -> None:
    """Prefill a prompt of some slices, the last one shorter, so that its kernels are there."""
    prompts(session, [prompt(session, 2 * size + size // 3 + 1, 0)], prefill_slice=size)


def prompt(session: Session, length: int, seed: int) -> list[int]:
    """Return random tokens."""
    return random.Random(seed).choices(range(session.shape["vocab_size"]), k=length)


def prefill_flops(shape: dict[str, Any], length: int) -> float:
    """Return the operations of a prompt: products with the layers' weights, scores and values of causal attention.

    The head runs for one token. Example: Llama-3-8B at 128K, 6.979e9 weights in its layers: 1.83e15 + 4.50e15.
    """
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    dim = shape.get("head_dim", hidden // heads)
    attention = 2 * hidden * dim * (heads + shape["num_key_value_heads"])
    weights = layers * (attention + 3 * hidden * shape["intermediate_size"])
    return (
        2.0 * weights * length + 2.0 * hidden * shape["vocab_size"] + 2.0 * layers * heads * dim * length * (length + 1)
    )


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Return median and 99th percentile in milliseconds."""
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return {f"{name}_p50_ms": round(p50, 3), f"{name}_p99_ms": round(p99, 3)}

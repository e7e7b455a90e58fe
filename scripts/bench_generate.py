"""Decode after a long prompt: transformers' own generate and the engine, same process and weights, one row on one GPU.

transformers runs its own model code with SDPA over a dynamic and over a static cache; on a GPU generate compiles the
step of the latter by itself. A time between tokens is taken where generate hands a token to its streamer, so the prompt
is left out, and the median leaves out steps that compile.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from bench_session import Session, Step, drive, gaps, greedy, timing_fields
from bench_weights import model_config, random_weight

SKIP = 4
"""First times between tokens that do not count."""


class Ticks:
    """A streamer that notes when each token came; a token is on the host by then."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then one token a call."""
        if not self._prompt:
            self.tokens += value.flatten().tolist()
            self.times.append(time.perf_counter())
        self._prompt = False

    def end(self) -> None:
        """Nothing is held back."""

    def gaps_ms(self) -> list[float]:
        """Return the times between tokens that count."""
        return [1e3 * gap for gap in np.diff(self.times).tolist()][SKIP:]


def generate(session: Session) -> None:
    """transformers over a dynamic and a static cache, then the engine, and each one's tokens a second."""
    args, bench = session.args, session.bench
    config = session.describe(prompt=args.generate_len, batch=1)
    if session.mesh.world_size > 1:
        bench.recorder.write("generate", "engine", config, "unavailable", reason="transformers is compared on one rank")
        return
    ids = random.Random(7).choices(range(session.shape["vocab_size"]), k=args.generate_len)
    tokens: dict[str, list[int]] = {}
    ours: list[float] = []
    with bench.point("generate", config, "engine") as go:
        if go:
            ours, tokens["engine"] = of_engine(session, ids)
            session.record("generate", "engine", config, **timing_fields(ours), value=per_second(ours))
    wanted = [name for name in ("dynamic", "static") if name in args.peers.split(",")]
    model = None
    if wanted:
        model = transformers_model(args.model, args.smoke, session.dtype, session.mesh.device)
    for cache in wanted:
        name = f"transformers {cache}"
        with bench.point("generate", config, name) as go:
            if not go:
                continue
            try:
                with limit(args.peer_seconds):
                    times, tokens[name] = of_transformers(model, ids, cache, args.steps)
            except TimeoutError as error:
                bench.recorder.write("generate", name, config, "unavailable", reason=str(error))
                continue
            fields = {**timing_fields(times), "kernels": [], "backend": "transformers", "value": per_second(times)}
            if ours:
                fields |= {
                    "baseline": "engine",
                    "time_over_baseline": round(float(np.median(times) / np.median(ours)), 4),
                }
                fields["equal_tokens"] = equal_start(tokens["engine"], tokens[name])
            bench.recorder.write("generate", name, config, model_shape=session.shape, **fields)


def of_engine(session: Session, ids: list[int]) -> tuple[list[float], list[int]]:
    """Return the engine's times between tokens in ms, and its tokens."""
    engine = session.engine()
    new = session.args.steps + SKIP + 1
    engine.add(ids, greedy(new))
    tokens: list[int] = []
    steps = drive(engine, lambda _, result: tokens.extend(e.token_id for e in result.events if e.token_id is not None))
    found = [ms for ms, step in gaps(session.bench, steps) if step == Step(step.ended, 1, 0)]
    return found[SKIP:], tokens


def transformers_model(name: str, smoke: bool, dtype: torch.dtype, device: torch.device) -> Any:
    """Build transformers' own model with the weights that the engine's has."""
    from accelerate import init_empty_weights
    from accelerate.utils import set_module_tensor_to_device
    from transformers import AutoModelForCausalLM

    with init_empty_weights():
        config = model_config(name, smoke)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    for param_name, param in list(model.named_parameters()):
        weight = random_weight(param_name, param.shape, dtype, device)
        set_module_tensor_to_device(model, param_name, device, value=weight, dtype=dtype)
    return model.to(device)


def of_transformers(model: Any, ids: list[int], cache: str, steps: int) -> tuple[list[float], list[int]]:
    """Return generate's times between tokens in ms, and its tokens."""
    inputs = torch.tensor([ids], device=model.device)
    more = {"cache_implementation": "static"} if cache == "static" else {}
    ticks = Ticks()
    new = steps + SKIP + 1
    model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        min_new_tokens=new,
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        streamer=ticks,
        **more,
    )
    return ticks.gaps_ms(), ticks.tokens


def per_second(times_ms: list[float]) -> dict[str, float]:
    """Return the tokens a second of the median step."""
    return {"decode_tokens_per_s": round(1e3 / float(np.median(times_ms)), 2)}


def equal_start(one: list[int], other: list[int]) -> int:
    """Count the leading tokens that two runs have in common; in bf16 ties of random weights part them early."""
    differ = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    return differ[0] if differ else min(len(one), len(other))


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in this thread when the time is up: a compilation cannot be asked to stop."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done in {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

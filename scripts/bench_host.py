"""Where the host's time goes in the steps of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from distdec.engine import Engine

PHASES = {"_agree": "plan_agree", "_reserve": "reserve_fill", "_sample": "sample", "_commit": "commit"}


class HostClock:
    """Note how long this rank's host is in each phase of a step, the model's launch among them.

    Args:
        engine: its methods are wrapped, until `stop`.
        split_wait: wait for the device before sampling, as a phase `device_wait` of its own: what is left of `sample`
            is work of the host, and copies.
    """

    def __init__(self, engine: Engine, *, split_wait: bool = False) -> None:
        self.samples: dict[str, list[float]] = {}
        self.host_us: list[float] = []
        self._step: dict[str, float] = {}
        self._began = time.perf_counter()
        self._watched: list[tuple[Any, str]] = []
        for method, name in PHASES.items():
            self._watch(engine, method, name)
        self._watch(engine.scheduler, "schedule", "schedule_of_plan_agree")
        self._watch(engine.scheduler, "ahead", "schedule_of_plan_agree")
        self._watch(engine.runner, "run", "launch")
        if split_wait:
            self._split_wait(engine)

    def _watch(self, owner: Any, method: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args)
            finally:
                self._add(name, start)

        setattr(owner, method, timed)
        self._watched.append((owner, method))

    def _split_wait(self, engine: Engine) -> None:
        sample, device = engine._sample, engine.mesh.device

        def waited(*args: Any) -> Any:
            start = time.perf_counter()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self._add("device_wait", start)
            return sample(*args)

        engine._sample = waited

    def _add(self, name: str, start: float) -> None:
        # a phase may come twice in a step
        self._step[name] = self._step.get(name, 0.0) + 1e6 * (time.perf_counter() - start)

    def end_step(self, counts: bool) -> None:
        """End a step; keep its times if it counts."""
        now = time.perf_counter()
        if counts:
            for name, value in self._step.items():
                self.samples.setdefault(name, []).append(value)
            self.host_us.append(1e6 * (now - self._began) - self._step.get("device_wait", 0.0))
        self._step, self._began = {}, now

    def stop(self) -> None:
        """Take the clock off the engine."""
        for owner, method in self._watched:
            delattr(owner, method)
        self._watched = []

    def medians(self) -> dict[str, float]:
        """Return each phase's median in microseconds, over the steps that count."""
        return {name: round(float(np.median(values)), 1) for name, values in sorted(self.samples.items())}

"""Wait for the device, but not for ever: a lost rank leaves the others in a collective that no library ends.

A replayed graph is invisible to NCCL's watchdog, so the host has to keep the time itself.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor


class StepStuck(RuntimeError):
    """The device did not get to an event in time. Whoever waits for it once more, waits for ever."""


class Event(Protocol):
    """What is asked of a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Say whether the device has got there."""
        ...


def wait_for(event: Event, timeout_s: float) -> None:
    """Wait until the device has got to an event.

    Raises:
        StepStuck: it has not, `timeout_s` seconds later.

    Notes:
        Host sync: polls, as `synchronize` does too.
    """
    deadline = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > deadline:
            raise StepStuck(
                f"the device did not end a step within parallel.timeout_s={timeout_s:g} s: a rank is lost, or stopped, "
                "and this one waits for it in a collective"
            )


class Arrival:
    """Tokens on their way from the device to the host.

    Args:
        timeout_s: the longest wait for them.

    Shapes:
        tokens: [N] int64, on the device; -1 where there is none
    """

    def __init__(self, tokens: Tensor, timeout_s: float) -> None:
        self._host, self._event, self._timeout_s = tokens, None, timeout_s
        if tokens.is_cuda:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[int]:
        """Return the tokens. Host sync: waits for the step that chose them, not for later ones.

        Raises:
            StepStuck: they did not come in time.
        """
        if self._event is not None:
            wait_for(self._event, self._timeout_s)
        return self._host.tolist()

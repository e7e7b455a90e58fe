"""Wait for the device, but not for ever: a lost rank leaves the others in a collective that no library ends.

A replayed graph is invisible to NCCL's watchdog, so the host has to keep the time itself.
"""

from __future__ import annotations

import time
from math import inf
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


class Patience:
    """How long to wait for the device, and whether it was given up.

    Attributes:
        stuck: a wait has failed. Nothing may wait for the device any more; the process has to end without cleaning up.
    """

    def __init__(self, timeout_s: float = inf) -> None:
        self.timeout_s = timeout_s
        self.stuck = False

    def wait(self, event: Event) -> None:
        """Wait until the device has got to an event.

        Raises:
            StepStuck: it has not, `timeout_s` seconds later, or at once if it was given up before.

        Notes:
            Host sync: polls, as `synchronize` does too.
        """
        deadline = time.monotonic() + self.timeout_s
        while not event.query():
            if self.stuck or time.monotonic() > deadline:
                self.stuck = True
                raise StepStuck(
                    f"the device did not end a step within parallel.timeout_s={self.timeout_s:g} s: a rank is lost, "
                    "or stopped, and this one waits for it in a collective"
                )

    def wait_for_all(self, device: torch.device) -> None:
        """Wait for everything that this thread has queued on a device.

        Raises:
            StepStuck: as `wait`.
        """
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self.wait(event)


class Arrival:
    """Tokens on their way from the device to the host.

    Args:
        patience: how long to wait for them.

    Shapes:
        tokens: [N] int64, on the device; -1 where there is none
    """

    def __init__(self, tokens: Tensor, patience: Patience) -> None:
        self._host, self._event, self._patience = tokens, None, patience
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
            self._patience.wait(self._event)
        return self._host.tolist()

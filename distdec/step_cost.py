"""Predict how long a step takes from what it holds, learned from the steps before. No torch.

    time = a + b * decode rows + c * tokens they attend to + d * prefill tokens + e * prefill tokens * their position

The five factors are kept by recursive least squares with forgetting, so they follow a machine that changes. A factor is
never negative in a prediction: more work does not take less time, whatever noise says.
"""

from typing import Any, NamedTuple

import numpy as np

FORGETTING = 0.98
"""Weight of the past at each step: half of what is known comes from the last 34 steps."""
LEAST_STEPS = 4
"""Steps to have seen before a prediction is worth anything."""
PRIOR = 100.0
"""Variance of the factors before anything is known, in scaled units: (ms / `_SCALE`) squared."""

# so that all factors are of the order of a millisecond: rows, thousands of tokens, a slice, a slice at 64k
_SCALE = np.array([1.0, 1.0 / 16, 1.0 / 65536, 1.0 / 512, 1.0 / (512 * 65536)])


class StepLoad(NamedTuple):
    """What a step holds.

    Attributes:
        decode_rows: rows of one token.
        decode_context: tokens that they attend to, all rows together.
        prefill_tokens: tokens of prefill slices.
        prefill_work: sum over the slices of tokens times the position at which they start.
    """

    decode_rows: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    prefill_work: int = 0


class StepCost:
    """Learn the time of steps and say how many prefill tokens a deadline leaves room for."""

    def __init__(self) -> None:
        """Start without knowledge."""
        self.num_steps = 0
        self._factors = np.zeros(5)
        self._covariance = np.eye(5) * PRIOR

    def learn(self, load: StepLoad, elapsed_ms: float) -> None:
        """Take in one step's time."""
        x = self._features(load)
        gain = self._covariance @ x
        gain /= FORGETTING + x @ gain
        self._factors += gain * (elapsed_ms - x @ self._factors)
        self._covariance = (self._covariance - np.outer(gain, x @ self._covariance)) / FORGETTING
        # what the steps never show would otherwise grow without end
        np.clip(self._covariance, -PRIOR, PRIOR, out=self._covariance)
        self.num_steps += 1

    def predict(self, load: StepLoad) -> float | None:
        """Return the milliseconds a step will take, or None while too few steps were seen."""
        if self.num_steps < LEAST_STEPS:
            return None
        return float(self._features(load) @ np.maximum(self._factors, 0.0))

    def room(self, load: StepLoad, start: int, deadline_ms: float) -> int | None:
        """Return the prefill tokens from position `start` on that fit beside `load`; None: no limit is known.

        Example: 20 ms for the decode rows, 0.1 ms a prefill token, a deadline of 50 ms: 300 tokens.
        """
        base = self.predict(load)
        if base is None:
            return None
        if base >= deadline_ms:
            return 0
        per_token = self.predict(StepLoad(0, 0, 1, start)) or 0.0
        per_token -= self.predict(StepLoad()) or 0.0
        if per_token <= 0.0:
            return None
        return int((deadline_ms - base) / per_token)

    @staticmethod
    def _features(load: StepLoad) -> np.ndarray[Any, np.dtype[np.float64]]:
        features: np.ndarray[Any, np.dtype[np.float64]] = np.array([1.0, *load]) * _SCALE
        return features

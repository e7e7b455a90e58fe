"""Predict how long a step takes from what it holds, learned from the steps before. No torch.

    time = a + b * decode rows + c * tokens they attend to + d * prefill tokens + e * prefill tokens * their position
           + f * draft tokens

The six factors are those that are off by the least share of the time, over the last steps without prompts and the last
ones with. Shares, so that one step that took a second, because something was loaded, counts no more than any other. No
factor is negative: more work does not take less time, whatever noise says.
"""

from collections import deque
from typing import Any, NamedTuple

import numpy as np

WINDOW = 64
"""Steps of each kind, with prompts and without, that are remembered."""
LEAST_STEPS = 4
"""Steps to have seen before a prediction is worth anything."""
SWEEPS = 30
"""Passes over the factors in each fit, which starts from the last one."""

# so that all factors are of the order of a millisecond: rows, thousands of tokens, a slice, a slice at 64k, drafts
_SCALE = np.array([1.0, 1.0 / 16, 1.0 / 65536, 1.0 / 512, 1.0 / (512 * 65536), 1.0 / 512])


class StepLoad(NamedTuple):
    """What a step holds.

    Attributes:
        decode_rows: rows of one token.
        decode_context: tokens that they attend to, all rows together.
        prefill_tokens: tokens of prefill slices.
        prefill_work: sum over the slices of tokens times the position at which they start.
        draft_tokens: by how many tokens drafts lengthen the decode rows, which are all filled up to the longest.
    """

    decode_rows: int = 0
    decode_context: int = 0
    prefill_tokens: int = 0
    prefill_work: int = 0
    draft_tokens: int = 0


class StepCost:
    """Learn the time of steps and say how many prefill tokens a deadline leaves room for."""

    def __init__(self) -> None:
        """Start without knowledge."""
        self.num_steps = 0
        self._plain: deque[np.ndarray[Any, Any]] = deque(maxlen=WINDOW)
        self._mixed: deque[np.ndarray[Any, Any]] = deque(maxlen=WINDOW)
        self._factors = np.zeros(len(_SCALE))
        self._fitted = False

    def learn(self, load: StepLoad, elapsed_ms: float) -> None:
        """Take in one step's time."""
        steps = self._mixed if load.prefill_tokens else self._plain
        steps.append(self._features(load) / max(elapsed_ms, 1e-3))
        self.num_steps += 1
        self._fitted = False

    def predict(self, load: StepLoad) -> float | None:
        """Return the milliseconds a step will take, or None while too few steps were seen."""
        if self.num_steps < LEAST_STEPS:
            return None
        if not self._fitted:
            self._fit()
        return float(self._features(load) @ self._factors)

    def room(self, load: StepLoad, start: int, deadline_ms: float) -> int | None:
        """Return the prefill tokens from position `start` on that fit beside `load`; None: nothing is known of them.

        Example: 20 ms for the decode rows, 0.1 ms a prefill token, a deadline of 50 ms: 300 tokens.
        """
        base = self.predict(load)
        if base is None or not self._mixed:
            return None
        if base >= deadline_ms:
            return 0
        per_token = self._features(StepLoad(0, 0, 1, start)) @ self._factors - self._factors[0]
        return None if per_token <= 0.0 else int((deadline_ms - base) / per_token)

    def prefill_ms(self, num_tokens: int, slice_tokens: int) -> float | None:
        """Return by how much longer steps take that run a prompt beside others; None: nothing is known of it.

        Example: 1,024 tokens in slices of 512: 1,024 prefill tokens, half of them at position 512.
        """
        if not self._mixed:
            return None
        full, rest = divmod(num_tokens, slice_tokens)
        work = full * (full - 1) // 2 * slice_tokens**2 + rest * full * slice_tokens
        whole = self.predict(StepLoad(0, 0, num_tokens, work))
        return None if whole is None else whole - float(self._factors[0])

    def _fit(self) -> None:
        """Minimise the squares of (predicted / seen - 1) over factors that are not negative, one factor at a time."""
        rows = np.array([*self._plain, *self._mixed])
        gram, target = rows.T @ rows, rows.sum(0)
        factors = self._factors.tolist()
        lines, want = gram.tolist(), target.tolist()
        for _ in range(SWEEPS):
            for i, line in enumerate(lines):
                if line[i] > 0.0:
                    rest = sum([line[j] * factors[j] for j in range(len(line))]) - line[i] * factors[i]
                    factors[i] = max(0.0, (want[i] - rest) / line[i])
        self._factors = np.array(factors)
        self._fitted = True

    @staticmethod
    def _features(load: StepLoad) -> np.ndarray[Any, np.dtype[np.float64]]:
        features: np.ndarray[Any, np.dtype[np.float64]] = np.array([1.0, *load]) * _SCALE
        return features

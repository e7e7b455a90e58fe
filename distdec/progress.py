"""How far a request has got, and what the scheduler says about it. Integers only, no torch."""

from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import numpy as np

from distdec.request import FinishReason, Request
from distdec.step_cost import StepLoad

TokenArray = np.ndarray[Any, np.dtype[np.int32]]


@dataclass
class RequestState:
    """Progress of one request. Owned by the scheduler.

    Attributes:
        order: requests are served by it: arrival in seconds, later by the priority, then a running number.
        request_id: the request's.
        num_prompt: tokens of the prompt.
        max_new: most tokens to generate.
        expires: when it is ended wherever it stands.
        plain: it takes the likeliest token, and the logits alone say which that is.
        cold: it may not start on cached pages, which can pin more frames than it can do without.
    """

    request: Request
    arrived: float = 0.0
    order: tuple[float, int] = (0.0, 0)
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_preemptions: int = 0
    cold: bool = False
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        """Note what is asked for in every step."""
        timeout = self.request.timeout_s
        self.request_id = self.request.request_id
        self.num_prompt = len(self.request.prompt_ids)
        self.max_new = self.request.sampling.max_new_tokens
        sampling = self.request.sampling
        self.plain = sampling.greedy and sampling.repetition_penalty == 1.0
        self.expires = inf if timeout is None else self.arrived + timeout
        # prompt and output as an array, for proposers
        self._history: TokenArray | None = None
        self._num_copied = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + len(self.output_ids)

    @property
    def num_outstanding(self) -> int:
        return self.num_prompt + len(self.output_ids) - self.num_computed

    def num_to_reserve(self, reserve: int) -> int:
        """Return the tokens to keep room for: what is outstanding and `reserve` more, if it may get that far."""
        return min(self.request.max_tokens - self.num_computed, self.num_outstanding + reserve)

    def next_ids(self, count: int) -> tuple[int, ...]:
        """Return the next `count` token ids to compute."""
        at = self.num_computed
        if at >= self.num_prompt:
            return tuple(self.output_ids[at - self.num_prompt : at - self.num_prompt + count])
        ids = self.request.prompt_ids[at : at + count]
        return ids + tuple(self.output_ids[: count - len(ids)])

    def history(self) -> TokenArray:
        """Return all tokens so far; only those that are new are copied.

        Shapes:
            returns [num_tokens] int32, read-only
        """
        if self._history is None:
            self._history = np.empty(self.num_prompt + self.max_new, np.int32)
            self._history[: self.num_prompt] = self.request.prompt_ids
        self._history[self.num_prompt + self._num_copied : self.num_tokens] = self.output_ids[self._num_copied :]
        self._num_copied = len(self.output_ids)
        tokens: TokenArray = self._history[: self.num_tokens]
        tokens.flags.writeable = False
        return tokens


class TokenEvent(NamedTuple):
    """A new token of a request, or the reason it ended without one; a speculative row brings several in a step.

    Attributes:
        text: what became certain with it, which the engine knows.
    """

    request_id: int
    token_id: int | None
    finish_reason: FinishReason | None
    text: str = ""


@dataclass
class SchedulerStats:
    """Counts since the start.

    Attributes:
        looked_up_tokens, hit_tokens: of the requests admitted, and how many of them were cached.
        preemptions: requests put back.
        offloads: how many of them were kept in host memory.
        delayed_steps: steps in which prompts waited for the deadline of decode rows.
        drafted_tokens, accepted_tokens: guesses that were run, and how many of them became output.
    """

    looked_up_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    offloads: int = 0
    delayed_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.looked_up_tokens if self.looked_up_tokens else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0


def limits_ahead(states: Collection[RequestState]) -> tuple[int, float]:
    """Return how many steps may follow one that decodes a token of each request, before any of their tokens is known.

    Returns:
        That number, and when the first of the requests is ended wherever it stands.
    """
    if not all(state.plain for state in states):
        return 0, -inf
    # with the first step's token of each, one more must be left to choose
    left = min([state.num_prompt + state.max_new - state.num_computed for state in states]) - 2
    return left, min([state.expires for state in states])


def load_of(counts: list[tuple[RequestState, int]], longest_draft: int = 0) -> StepLoad:
    """Return what a step holds that runs this many of each request's outstanding tokens.

    Args:
        longest_draft: drafts of the row with the most, up to which all decode rows are filled.
    """
    rows = context = tokens = work = 0
    for state, count in counts:
        if count == 1 and state.num_outstanding == 1:
            rows += 1
            context += state.num_computed + 1
        else:
            tokens += count
            work += state.num_computed * count
    return StepLoad(rows, context, tokens, work, rows * longest_draft)

"""How far a request has got, and what the scheduler says about it. Integers only, no torch."""

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from distdec.request import FinishReason, Request
from distdec.step_cost import StepLoad


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


class TokenEvent(NamedTuple):
    """One request's share of a step's result: a new token, or the reason it ended without one."""

    request_id: int
    token_id: int | None
    finish_reason: FinishReason | None


@dataclass
class SchedulerStats:
    """Counts since the start.

    Attributes:
        looked_up_tokens, hit_tokens: of the requests admitted, and how many of them were cached.
        preemptions: requests put back.
        offloads: how many of them were kept in host memory.
        delayed_steps: steps in which prompts waited for the deadline of decode rows.
    """

    looked_up_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    offloads: int = 0
    delayed_steps: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.looked_up_tokens if self.looked_up_tokens else 0.0


def load_of(counts: list[tuple[RequestState, int]]) -> StepLoad:
    """Return what a step holds that runs this many of each request's outstanding tokens."""
    rows = context = tokens = work = 0
    for state, count in counts:
        if count == 1 and state.num_outstanding == 1:
            rows += 1
            context += state.num_computed + 1
        else:
            tokens += count
            work += state.num_computed * count
    return StepLoad(rows, context, tokens, work)

"""Decide what each step runs: one token budget over decode rows and prefill slices. Integers only, no torch.

Only rank 0 has a scheduler; the other ranks apply its plans. It asks the cache what fits but never changes it: the
plan says what to free, admit and reserve, and every rank, rank 0 included, does that the same way.

A request needs nothing but its tokens (prompt + generated) and how many of them are computed. What is left over is
outstanding: exactly one token for a request that decodes, more for one whose prompt is under way or that has to be
computed again. So one rule serves prefill, decode and recomputation.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from distdec.config import SchedulerConfig
from distdec.request import FinishReason, PlanKind, Request, Row, StepPlan


class Capacity(Protocol):
    """What the scheduler asks of the cache."""

    def can_extend(self, needs: Sequence[tuple[int, int]]) -> bool:
        """Say whether all (request_id, more tokens) fit together; a request that is not there yet holds nothing."""
        ...


@dataclass
class RequestState:
    """Progress of one request. Owned by the scheduler."""

    request: Request
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def num_outstanding(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def num_to_reserve(self) -> int:
        """Tokens whose KV may still be stored, if the request runs to its last token."""
        return self.request.max_tokens - self.num_computed

    def next_ids(self, count: int) -> tuple[int, ...]:
        """Return the next `count` token ids to compute."""
        prompt, at = self.request.prompt_ids, self.num_computed
        if at >= len(prompt):
            return tuple(self.output_ids[at - len(prompt) : at - len(prompt) + count])
        ids = prompt[at : at + count]
        return ids + tuple(self.output_ids[: count - len(ids)])


@dataclass(frozen=True)
class TokenEvent:
    """One request's share of a step's result: a new token, or the reason it ended without one."""

    request_id: int
    token_id: int | None
    finish_reason: FinishReason | None


class Scheduler:
    """First come, first served, with every admitted request's last token reserved, so that no step runs out of room.

    Args:
        config: budget, prefill slice, most rows.
        cache: asked through `can_extend` alone.
        eos_ids: tokens that end a request unless it ignores them.
    """

    def __init__(self, config: SchedulerConfig, cache: Capacity, eos_ids: Collection[int] = ()) -> None:
        self.config = config
        self.cache = cache
        self.eos_ids = frozenset(eos_ids)
        self.waiting: deque[RequestState] = deque()
        self.running: dict[int, RequestState] = {}
        self.finished: dict[int, RequestState] = {}
        self._ids: set[int] = set()
        self._to_free: list[int] = []
        self._step = 0
        # nothing was freed since the head of the queue was found not to fit: asking again is wasted
        self._blocked = False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request. It may arrive at any time, also while others run.

        Raises:
            ValueError: its id is in use.
        """
        if request.request_id in self._ids:
            raise ValueError(f"request id {request.request_id} is already in use")
        self._ids.add(request.request_id)
        self.waiting.append(RequestState(request))

    def schedule(self) -> StepPlan:
        """Return the next step's plan: decode rows first, then prefill slices, oldest request first.

        Admits from the queue what fits entirely. Without work the plan is `DONE`; it still frees what has finished.

        Raises:
            RuntimeError: the head of the queue does not fit although nothing else runs.
        """
        free = tuple(self._to_free)
        self._to_free.clear()
        admit = [] if self._blocked else self._admit(bool(free))
        rows = self._rows()
        if not rows and self.waiting and not free:
            head = self.waiting[0].request
            raise RuntimeError(
                f"request {head.request_id} needs {head.max_tokens} tokens of KV cache: more than an empty cache holds"
            )
        kind = PlanKind.RUN if self.has_work else PlanKind.DONE
        plan = StepPlan(self._step, kind, free, tuple(admit), tuple(rows))
        self._step += 1
        return plan

    def _admit(self, frees_first: bool) -> list[int]:
        if frees_first:
            # the cache still holds what this very plan frees: what fits is known one step later
            return []
        admitted: list[int] = []
        needs = [(request_id, state.num_to_reserve) for request_id, state in self.running.items()]
        while self.waiting and len(self.running) < self.config.max_rows:
            state = self.waiting[0]
            needs.append((state.request.request_id, state.num_to_reserve))
            if not self.cache.can_extend(needs):
                self._blocked = True
                break
            self.waiting.popleft()
            self.running[state.request.request_id] = state
            admitted.append(state.request.request_id)
        return admitted

    def _rows(self) -> list[Row]:
        budget = self.config.token_budget
        decode: list[Row] = []
        prefill: list[Row] = []
        for request_id, state in self.running.items():
            if state.num_outstanding == 1 and budget:
                decode.append(self._row(request_id, state, 1))
                budget -= 1
        for request_id, state in self.running.items():
            if state.num_outstanding > 1 and budget:
                count = min(state.num_outstanding, self.config.prefill_slice, budget)
                prefill.append(self._row(request_id, state, count))
                budget -= count
        return decode + prefill

    @staticmethod
    def _row(request_id: int, state: RequestState, count: int) -> Row:
        return Row(request_id, state.num_computed, state.next_ids(count), needs_logits=count == state.num_outstanding)

    def commit(
        self, plan: StepPlan, tokens: Mapping[int, int | None], stopped: Collection[int] = ()
    ) -> list[TokenEvent]:
        """Make a step's result part of its requests' progress.

        Args:
            plan: the plan that was run.
            tokens: the new token of every row that needed logits; None where its logits were unusable.
            stopped: requests whose text met a stop string with this token.

        Returns:
            One event a request with a new token or an end. Finished requests are freed by the next plan.
        """
        events: list[TokenEvent] = []
        for row in plan.rows:
            state = self.running.get(row.request_id)
            if state is None:
                # cancelled while the step ran
                continue
            state.num_computed += row.num_tokens
            if not row.needs_logits:
                continue
            token = tokens[row.request_id]
            if token is None:
                reason: FinishReason | None = FinishReason.NUMERICS
            else:
                state.output_ids.append(token)
                reason = self._reason(state, token, row.request_id in stopped)
            events.append(TokenEvent(row.request_id, token, reason))
            if reason is not None:
                self.finish(row.request_id, reason)
        return events

    def _reason(self, state: RequestState, token: int, stopped: bool) -> FinishReason | None:
        sampling = state.request.sampling
        if token in self.eos_ids and not sampling.ignore_eos:
            return FinishReason.EOS
        if stopped:
            return FinishReason.STOP
        if len(state.output_ids) >= sampling.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def finish(self, request_id: int, reason: FinishReason) -> bool:
        """End a request in whatever state it is. Returns whether it was still alive."""
        state = self.running.pop(request_id, None)
        if state is not None:
            self._to_free.append(request_id)
        else:
            state = next((s for s in self.waiting if s.request.request_id == request_id), None)
            if state is None:
                return False
            self.waiting.remove(state)
        self._blocked = False
        state.finish_reason = reason
        self.finished[request_id] = state
        return True

    def forget(self, request_id: int) -> RequestState:
        """Hand over a finished request's state and drop it, so that a long-lived engine does not grow."""
        self._ids.remove(request_id)
        return self.finished.pop(request_id)

    def check_integrity(self) -> None:
        """Assert that every request is in one place only and that progress is within bounds."""
        waiting = [state.request.request_id for state in self.waiting]
        places = [*waiting, *self.running, *self.finished]
        assert len(places) == len(set(places)), "a request is in two places"
        assert set(places) == self._ids, "a request is nowhere"
        assert len(self.running) <= self.config.max_rows, "more rows than max_rows"
        assert not set(self._to_free) & set(self.running), "a running request is about to be freed"
        for state in self.running.values():
            assert 0 <= state.num_computed < state.num_tokens, "a running request has nothing outstanding"
            assert len(state.output_ids) < state.request.sampling.max_new_tokens, "a finished request is running"

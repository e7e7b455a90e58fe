"""Decide what each step runs: one token budget over decode rows, speculative rows, prefill slices. No torch.

Only rank 0 has a scheduler, and with it the clock, arrivals, cancellations and timeouts. It frees and admits in rank
0's cache as it decides; the plan is the record of that, which the other ranks repeat in the same order.

A request needs nothing but its tokens (prompt + generated) and how many of them are computed. What is left over is
outstanding: exactly one token for a request that decodes, more for one whose prompt is under way or that has to be
computed again. So one rule serves prefill, decode and recomputation.

A speculative row is a decode row with drafts behind its token (`speculative.py`). Drafts take what decode rows leave of
the budget, but for `MIN_SLICE` tokens of a prompt under way; a step that they do not fit runs without them, so they
never preempt. All decode rows of such a step are filled up to the longest row: `rows x drafts` more tokens through the
layers, while keys and values are still read once. So drafts pay while a step's time is that of reading weights and
cache, and cost where many rows share a step and few drafts are right.

Requests are admitted with room to grow by `reserve_tokens`, not to their last token. When a step would not fit, the
last in order is preempted: its sequence is freed, its tokens stay, and it waits again at its old place. Its KV is
computed again, or goes to host memory and comes back where that takes less time. The first in order is never preempted
while another runs, so it always gets on, and a request that fits the cache alone ends.
"""

import time
from bisect import insort
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from operator import eq

from distdec.cache.parking import Parking
from distdec.config import SchedulerConfig
from distdec.progress import RequestState, SchedulerStats, TokenEvent, limits_ahead, load_of
from distdec.request import FinishReason, PlanKind, Request, Row, StepPlan
from distdec.residence import Capacity, Residence
from distdec.speculative import Drafter, NgramProposer, Proposer
from distdec.step_cost import StepCost, StepLoad

MIN_SLICE = 16
"""Fewest tokens of a prompt worth a step of their own: below, its fixed costs dominate."""
FIRST_SLICE = 128
"""Tokens of a prompt beside decode rows while nothing is known of such steps."""
MAX_DELAY = 8
"""Steps in a row that prompts may wait for the deadline of decode rows; then one gets `MIN_SLICE` tokens anyway."""
MARGIN = 0.9
"""Share of the deadline that a step is planned for: predictions are off by some percent, more so at first."""


class Scheduler:
    """Serve requests in order of arrival and priority, as many at once as the cache has room for.

    Args:
        config: budget, prefill slice, most rows, reserve, deadline.
        cache: rank 0's.
        eos_ids: tokens that end a request unless it ignores them.
        prefix_caching: look prompts up in the cache.
        lookahead: steps may be planned before the tokens of the one before are known; see `ahead`.
        host: where preempted requests may be kept; None: all are computed again.
        propose: where drafts come from; None: `NgramProposer`.
        clock: seconds, never going back; for arrivals, timeouts and the time of steps.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: Capacity,
        eos_ids: Collection[int] = (),
        *,
        prefix_caching: bool = True,
        lookahead: bool = False,
        host: Parking | None = None,
        propose: Proposer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.cache = cache
        self.eos_ids = frozenset(eos_ids)
        # a proposer needs the tokens that a step launched ahead does not have
        self.lookahead = lookahead and not config.num_draft_tokens
        self.drafter = Drafter(propose or NgramProposer(config.ngram_min, config.ngram_max), config.num_draft_tokens)
        self.clock = clock
        self.stats = SchedulerStats()
        self.places = Residence(cache, prefix_caching=prefix_caching, host=host)
        self.cost = StepCost()
        self.waiting: list[RequestState] = []
        self.running: dict[int, RequestState] = {}
        self.finished: dict[int, RequestState] = {}
        self._ids: set[int] = set()
        self._to_free: list[int] = []
        self._tainted: set[int] = set()
        self._step = 0
        self._num_added = 0
        # nothing was freed since the head of the queue was found not to fit: asking again is wasted
        self._blocked = False
        self._delay = 0
        self._waits = False
        # of the plans that follow each other now, as nothing is admitted between them: the last, and their deadline
        self._last_ahead, self._expires = 0, -inf
        # of the steps planned and not committed: what they hold, when they began, whether their time says anything
        self._under_way: dict[int, tuple[StepLoad, float, bool]] = {}
        self._committed = -inf
        # a step without logits ends before its work does, so neither its time nor the next one's says anything
        self._timed = True

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
        now = self.clock()
        self._ids.add(request.request_id)
        self._num_added += 1
        order = (now + request.priority * self.config.priority_ageing_s, self._num_added)
        self._queue(RequestState(request, now, order))

    def _queue(self, state: RequestState) -> None:
        insort(self.waiting, state, key=lambda other: other.order)
        if self.waiting[0] is state:
            self._blocked = False

    def schedule(self) -> StepPlan:
        """Return the next step's plan: decode rows first, then speculative rows, then prefill slices, each in order.

        Ends what has timed out, frees what has ended, preempts until the step fits, and admits from the queue as long
        as there is room. Without work the plan is `DONE`; it still frees what has finished.

        Raises:
            RuntimeError: a request does not fit the cache although nothing else runs.
        """
        began = self.clock()
        if self.places.untold:
            return self._plan((), load_of([]), began)
        self._expire(began)
        while self._to_free:
            self.places.free(self._to_free[0], self._to_free[0] in self._tainted)
            self._tainted.discard(self._to_free.pop(0))
        counts = self._make_room()
        if counts is None or (self.waiting and not self._blocked):
            if counts is not None or not self.running:
                self._admit()
            counts = self._counts()
        if not counts and self.waiting:
            head = self.waiting[0].request
            need = f"request {head.request_id} needs {head.max_tokens} tokens of KV cache"
            raise RuntimeError(f"{need}: more than an empty cache holds")
        return self._plan(*self._rows(counts), began)

    def _plan(self, rows: tuple[Row, ...], load: StepLoad, began: float) -> StepPlan:
        # all decode rows run, so who is left has a prompt
        self._waits = not load.prefill_tokens and len(rows) < len(self.running)
        timed_before, self._timed = self._timed, any(row.needs_logits for row in rows)
        kind = PlanKind.RUN if self.has_work or self._to_free else PlanKind.DONE
        plan = StepPlan(self._step, kind, rows=rows, **self.places.changes()._asdict())
        copies = bool(plan.offload or plan.restore)
        self._under_way[self._step] = load, began, self._timed and timed_before and not copies
        if self.lookahead and plan.decode_only and len(rows) == len(self.running):
            left, self._expires = limits_ahead(self.running.values())
            self._last_ahead = self._step + left
            if self._goes_on(plan, 2):
                plan = replace(plan, followed=True)
        self.places.clear()
        self._count(plan)
        self._step += 1
        return plan

    def _rows(self, counts: list[tuple[RequestState, int]]) -> tuple[tuple[Row, ...], StepLoad]:
        """Return the rows of a step that fits, with drafts where there is room for them too, and what it holds."""
        decode = [state for state, n in counts if n == 1 and state.num_outstanding == 1] if self.drafter.most else []
        left = self.config.token_budget - (MIN_SLICE if len(decode) < len(counts) else 0)
        drafts = self.drafter.draft(decode, left)
        if drafts:
            more = self._counts([len(guess) for guess in drafts.values()])
            if self.cache.can_extend([(s.request_id, n + len(drafts.get(s.request_id, ()))) for s, n in more]):
                counts = sorted(more, key=lambda pair: (pair[0].num_outstanding > 1, pair[0].request_id in drafts))
            else:
                drafts = {}
        rows = [Row(s.request_id, s.num_computed, s.next_ids(n), n == s.num_outstanding) for s, n in counts]
        for at, row in enumerate(rows if drafts else ()):
            if guess := drafts.get(row.request_id):
                rows[at] = row._replace(token_ids=row.token_ids + guess, num_drafts=len(guess))
        return tuple(rows), load_of(counts, max(map(len, drafts.values()), default=0))

    def _count(self, plan: StepPlan) -> None:
        self.stats.offloads += len(plan.offload)
        for request_id in plan.admit:
            # of a plan that failed, some may have ended since
            if request_id in self.running and request_id not in plan.restore:
                self.stats.looked_up_tokens += self.running[request_id].num_tokens
                self.stats.hit_tokens += self.running[request_id].num_computed

    def ahead(self, plan: StepPlan) -> StepPlan:
        """Return the step behind `plan`, whose tokens are not known yet, or a HOLD where it has to wait for them.

        It runs the same decode rows again. A request whose pending token turns out to end it has then run one row too
        many, which `commit` leaves out like that of a cancelled one.

        Args:
            plan: a plan that is `followed`; its tokens are reserved, and it is not committed.
        """
        began = self.clock()
        if not self._goes_on(plan, 1):
            return StepPlan(self._step, PlanKind.HOLD)
        before = self._under_way[plan.step][0]
        # of each row one token more
        load = before._replace(decode_context=before.decode_context + before.decode_rows)
        ahead = StepPlan(self._step, rows=plan.again(), followed=True, pending=True)
        self._under_way[self._step] = load, began, True
        self._step += 1
        return ahead

    def _goes_on(self, plan: StepPlan, more: int) -> bool:
        """Tell whether the rows of a plan can run once more without their tokens, with `more` tokens each to reserve.

        Nothing may have to be freed, admitted or ended first, as far as can be known.
        """
        if plan.step >= self._last_ahead or len(plan.rows) != len(self.running) or self._to_free:
            return False
        if self.waiting and not self._blocked and len(self.running) < self.config.max_rows:
            return False
        now = self.clock()
        if self._expires <= now or any(state.expires <= now for state in self.waiting):
            return False
        return self.cache.can_extend([(row[0], more) for row in plan.rows])

    def _expire(self, now: float) -> None:
        for state in [state for state in (*self.waiting, *self.running.values()) if state.expires <= now]:
            self.finish(state.request_id, FinishReason.TIMEOUT)

    def _make_room(self) -> list[tuple[RequestState, int]] | None:
        """Preempt, last in order first, until the rows of this step fit. Returns them, or None if any was preempted.

        A request alone that does not fit stands on cached pages that pin frames which it needs: it starts afresh.
        """
        preempted = False
        counts = self._counts()
        while self.running and not self.cache.can_extend([(s.request_id, count) for s, count in counts]):
            state = max(self.running.values(), key=lambda state: state.order)
            state.cold = len(self.running) == 1
            self._preempt(state)
            preempted = True
            counts = self._counts()
        return None if preempted else counts

    def _preempt(self, state: RequestState) -> None:
        self.places.leave(state, self.cost.prefill_ms(state.num_computed, self.config.prefill_slice))
        del self.running[state.request_id]
        state.num_preemptions += 1
        self.stats.preemptions += 1
        self._queue(state)

    def _admit(self) -> None:
        reserve = self.config.reserve_tokens
        needs = [(request_id, state.num_to_reserve(reserve)) for request_id, state in self.running.items()]
        pending = sum(state.num_outstanding > 1 for state in self.running.values())
        while self.waiting and len(self.running) < self.config.max_rows and pending < self.config.max_pending_prefills:
            state = self.waiting[0]
            if not self.places.enter(state, reserve, needs):
                self._blocked = True
                break
            del self.waiting[0]
            self.running[state.request_id] = state
            needs.append((state.request_id, state.num_to_reserve(reserve)))
            pending += state.num_outstanding > 1
        self.running = dict(sorted(self.running.items(), key=lambda item: item[1].order))

    def _counts(self, drafts: Sequence[int] = ()) -> list[tuple[RequestState, int]]:
        """Return this step's tokens of each running request beside drafts: decode rows, then slices, each in order."""
        budget = self.config.token_budget - sum(drafts)
        outstanding = [(state, state.num_outstanding) for state in self.running.values()]
        decode = [pair for pair in outstanding if pair[1] == 1][:budget]
        prefill: list[tuple[RequestState, int]] = []
        budget -= len(decode)
        for state, left in outstanding:
            if left > 1 and budget > 0:
                count = min(left, self.config.prefill_slice, budget)
                count = min(count, self._room(load_of(decode + prefill, max(drafts, default=0)), state))
                if not count:
                    break
                prefill.append((state, count))
                budget -= count
        return decode + prefill

    def _room(self, load: StepLoad, state: RequestState) -> int:
        """Return the tokens of a prompt that the deadline of the decode rows leaves room for, beside a load."""
        deadline = MARGIN * self.config.decode_deadline_ms
        if not load.decode_rows or not deadline:
            return self.config.prefill_slice
        room = self.cost.room(load, state.num_computed, deadline)
        room = FIRST_SLICE if room is None else room
        if room >= min(MIN_SLICE, state.num_outstanding):
            # captured steps are powers of two: up to twice of one takes as long
            fine = not FIRST_SLICE <= room < self.config.prefill_slice
            return room if fine else 1 << (room.bit_length() - 1)
        return 0 if load.prefill_tokens or self._delay < MAX_DELAY else MIN_SLICE

    def commit(
        self, plan: StepPlan, tokens: Mapping[int, Sequence[int | None]], stopped: Collection[int] = ()
    ) -> list[TokenEvent]:
        """Make a step's result part of its requests' progress.

        Args:
            plan: the plan that was run.
            tokens: the new tokens of every row that needed logits, from `verify`; None, as the last of them, where
                logits were unusable. Those behind a stop string are left out.
            stopped: requests whose text met a stop string with their last token.

        Returns:
            One event for each new token or end of a request. Finished requests are freed by the next plan.
        """
        self._learn(plan)
        events: list[TokenEvent] = []
        for request_id, _, token_ids, needs_logits, num_drafts in plan.rows:
            state = self.running.get(request_id)
            if state is None:
                # cancelled while the step ran
                continue
            state.num_computed += len(token_ids) - num_drafts
            if not needs_logits:
                continue
            new = tokens[request_id]
            if num_drafts:
                state.num_computed += len(new) - 1
                self.stats.drafted_tokens += num_drafts
                self.stats.accepted_tokens += sum(map(eq, token_ids[-num_drafts:], new))
            for count, token in enumerate(new, 1):
                reason = None
                if token is None:
                    reason = FinishReason.NUMERICS
                    self._tainted.add(request_id)
                else:
                    state.output_ids.append(token)
                    if token in self.eos_ids or request_id in stopped or len(state.output_ids) >= state.max_new:
                        reason = self._reason(state, token, request_id in stopped and count == len(new))
                events.append(TokenEvent(request_id, token, reason))
                if reason is not None:
                    self.finish(request_id, reason)
                    break
        return events

    def _learn(self, plan: StepPlan) -> None:
        load, began, timed = self._under_way.pop(plan.step)
        if not plan.rows:
            return
        # a step that was launched behind another one begins where that one ends
        began, self._committed = max(began, self._committed), self.clock()
        if timed:
            self.cost.learn(load, 1e3 * (self._committed - began))
        self._delay = self._delay + 1 if self._waits else 0
        self.stats.delayed_steps += self._waits

    def _reason(self, state: RequestState, token: int, stopped: bool) -> FinishReason | None:
        sampling = state.request.sampling
        if token in self.eos_ids and not sampling.ignore_eos:
            return FinishReason.EOS
        if stopped:
            return FinishReason.STOP
        if len(state.output_ids) >= state.max_new:
            return FinishReason.LENGTH
        return None

    def finish(self, request_id: int, reason: FinishReason) -> bool:
        """End a request in whatever state it is. Returns whether it was still alive."""
        state = self.running.pop(request_id, None)
        if state is not None:
            # not at once: on the other ranks too it holds its frames until the step that runs now is over
            self._to_free.append(request_id)
        else:
            state = next((s for s in self.waiting if s.request_id == request_id), None)
            if state is None:
                return False
            self.waiting.remove(state)
            if self.places.is_parked(request_id):
                self._to_free.append(request_id)
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
        waiting = [state.request_id for state in self.waiting]
        places = [*waiting, *self.running, *self.finished]
        assert len(places) == len(set(places)), "a request is in two places"
        assert set(places) == self._ids, "a request is nowhere"
        assert len(self.running) <= self.config.max_rows, "more rows than max_rows"
        assert not set(self._to_free) & set(self.running), "a running request is about to be freed"
        assert [s.order for s in self.waiting] == sorted(s.order for s in self.waiting), "the queue is out of order"
        for state in self.running.values():
            assert 0 <= state.num_computed < state.num_tokens, "a running request has nothing outstanding"
            assert len(state.output_ids) < state.request.sampling.max_new_tokens, "a finished request is running"

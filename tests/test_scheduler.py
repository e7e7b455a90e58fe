"""The scheduler: order, budget, slices, admission and endings, first by example, then under random arrivals."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distdec.cache.prefix import Match
from distdec.config import SchedulerConfig
from distdec.request import FinishReason, PlanKind, Request, Row, SamplingParams, StepPlan
from distdec.scheduler import Scheduler, TokenEvent
from distdec.speculative import verify


class Ledger:
    """A cache that only counts, refuses what the real one would, and knows no prefixes."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.lengths = {}
        self.asked = 0

    def can_extend(self, needs, reserved=0):
        return sum(self.lengths.values()) + sum(count for _, count in needs) + reserved <= self.capacity

    def match(self, token_ids):
        self.asked += 1
        return Match(0, b"", 0)

    def adopt(self, request_id, key):
        assert request_id not in self.lengths
        self.lengths[request_id] = 0
        return 0

    def free(self, request_id, withdraw=False):
        del self.lengths[request_id]

    def keep(self, plan, tokens):
        """Drop the drafts that were not accepted."""
        for row in plan.rows:
            if row.num_drafts:
                self.lengths[row.request_id] = row.start + len(tokens[row.request_id])

    def apply(self, plan):
        for row in plan.rows:
            assert row.start == self.lengths[row.request_id], "tokens must be stored in order, each once"
            self.lengths[row.request_id] += row.num_tokens
        assert sum(self.lengths.values()) <= self.capacity


def make(capacity=1000, eos=(), **config):
    ledger = Ledger(capacity)
    fields = {"prefill_slice": 4, "token_budget": 8, "max_rows": 4} | config
    return Scheduler(SchedulerConfig(**fields), ledger, eos), ledger


def request(request_id, length, new=4, **sampling):
    return Request(request_id, tuple(range(10, 10 + length)), SamplingParams(max_new_tokens=new, **sampling))


def run(scheduler, ledger, token=lambda request_id, index: 1, limit=1000):
    """Run until done; return the plans and the events."""
    plans, events = [], []
    while True:
        plan = scheduler.schedule()
        ledger.apply(plan)
        plans.append(plan)
        if plan.kind is PlanKind.DONE:
            return plans, events
        assert len(plans) < limit
        tokens = {row.request_id: [token(row.request_id, len(events))] * row.num_logits for row in plan.rows}
        tokens = verify(plan, {i: new for i, new in tokens.items() if new}, scheduler.running, scheduler.eos_ids)
        ledger.keep(plan, tokens)
        events += scheduler.commit(plan, tokens)
        scheduler.check_integrity()


def test_a_prompt_is_cut_into_slices_and_only_the_last_needs_logits():
    scheduler, ledger = make()
    scheduler.add(request(5, 10, new=3))
    plans, events = run(scheduler, ledger)
    assert [plan.rows for plan in plans] == [
        (Row(5, 0, (10, 11, 12, 13), False),),
        (Row(5, 4, (14, 15, 16, 17), False),),
        (Row(5, 8, (18, 19), True),),
        (Row(5, 10, (1,), True),),
        (Row(5, 11, (1,), True),),
        (),
    ]
    assert plans[0].admit == (5,)
    assert plans[-1] == StepPlan(5, PlanKind.DONE, free=(5,))
    assert events == [TokenEvent(5, 1, None), TokenEvent(5, 1, None), TokenEvent(5, 1, FinishReason.LENGTH)]
    assert ledger.lengths == {}
    assert scheduler.forget(5).output_ids == [1, 1, 1]


def test_decode_rows_come_first_and_the_budget_holds():
    scheduler, ledger = make(token_budget=6, max_rows=3)
    scheduler.add(request(0, 2, new=9))
    scheduler.add(request(1, 3, new=9))
    first = scheduler.schedule()
    ledger.apply(first)
    scheduler.commit(first, {0: [7], 1: [8]})
    scheduler.add(request(2, 9))
    second = scheduler.schedule()
    assert second.rows == (Row(0, 2, (7,), True), Row(1, 3, (8,), True), Row(2, 0, (10, 11, 12, 13), False))


def test_the_oldest_prompt_gets_the_budget_first():
    scheduler, _ = make(prefill_slice=5, token_budget=8)
    for i in range(3):
        scheduler.add(request(i, 6))
    assert [(row.request_id, row.num_tokens) for row in scheduler.schedule().rows] == [(0, 5), (1, 3)]


def test_admission_reserves_to_the_last_token_and_keeps_the_order():
    scheduler, ledger = make(capacity=20, prefill_slice=8)
    scheduler.add(request(0, 8, new=5))  # stores 12
    scheduler.add(request(1, 8, new=5))  # would make 24
    scheduler.add(request(2, 1, new=1))  # would fit, but came later
    plans, _ = run(scheduler, ledger)
    admitted = [plan.admit for plan in plans if plan.admit]
    assert admitted == [(0,), (1, 2)]


def test_a_full_cache_is_not_asked_again_until_something_is_freed():
    scheduler, ledger = make(capacity=12)
    scheduler.add(request(0, 4, new=9))
    scheduler.add(request(1, 4, new=9))
    for _ in range(5):
        plan = scheduler.schedule()
        ledger.apply(plan)
        scheduler.commit(plan, {0: [3]})
    assert ledger.asked == 2
    scheduler.finish(0, FinishReason.CANCELLED)
    run(scheduler, ledger)
    assert ledger.asked == 3


def test_a_request_that_can_never_fit_is_said_and_not_waited_for():
    scheduler, _ = make(capacity=5)
    scheduler.add(request(4, 4, new=9))
    with pytest.raises(RuntimeError, match="request 4 needs 12 tokens"):
        scheduler.schedule()


def test_no_more_than_max_rows_run_at_once():
    scheduler, ledger = make(max_rows=2, token_budget=8)
    for i in range(5):
        scheduler.add(request(i, 2, new=2))
    plans, events = run(scheduler, ledger)
    assert max(len(plan.rows) for plan in plans) == 2
    assert sum(event.finish_reason is not None for event in events) == 5


@pytest.mark.parametrize(
    ("sampling", "stopped", "reason"),
    [
        ({}, (), FinishReason.EOS),
        ({}, (3,), FinishReason.EOS),
        ({"ignore_eos": True}, (), None),
        ({"ignore_eos": True}, (3,), FinishReason.STOP),
        ({"ignore_eos": True, "new": 1}, (), FinishReason.LENGTH),
        ({"ignore_eos": True, "new": 1}, (3,), FinishReason.STOP),
    ],
)
def test_why_a_request_ends(sampling, stopped, reason):
    scheduler, _ = make(eos=(2, 9))
    scheduler.add(request(3, 2, **sampling))
    plan = scheduler.schedule()
    assert scheduler.commit(plan, {3: [9]}, stopped) == [TokenEvent(3, 9, reason)]
    assert scheduler.has_work == (reason is None)


def test_unusable_logits_end_their_request_without_a_token():
    scheduler, ledger = make()
    scheduler.add(request(0, 2))
    scheduler.add(request(1, 3))
    plan = scheduler.schedule()
    ledger.apply(plan)
    assert scheduler.commit(plan, {0: [None], 1: [5]}) == [
        TokenEvent(0, None, FinishReason.NUMERICS),
        TokenEvent(1, 5, None),
    ]
    assert scheduler.schedule().free == (0,)
    assert scheduler.finished[0].output_ids == []


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_a_request_may_be_cancelled_in_any_state(steps):
    scheduler, ledger = make()
    scheduler.add(request(0, 9))
    for _ in range(steps):
        plan = scheduler.schedule()
        ledger.apply(plan)
        scheduler.commit(plan, {0: [5]})
    assert scheduler.finish(0, FinishReason.CANCELLED)
    assert not scheduler.finish(0, FinishReason.CANCELLED)
    plans, _ = run(scheduler, ledger)
    assert plans[-1].kind is PlanKind.DONE
    assert ledger.lengths == {}
    assert scheduler.finished[0].finish_reason is FinishReason.CANCELLED


def test_a_request_cancelled_while_its_step_runs_takes_no_token():
    scheduler, ledger = make()
    scheduler.add(request(0, 2))
    plan = scheduler.schedule()
    ledger.apply(plan)
    scheduler.finish(0, FinishReason.CANCELLED)
    assert scheduler.commit(plan, {0: [5]}) == []
    assert run(scheduler, ledger)[0][-1].free == (0,)


def test_an_id_is_used_once_until_it_is_forgotten():
    scheduler, ledger = make()
    scheduler.add(request(0, 2, new=1))
    with pytest.raises(ValueError, match="request id 0 is already in use"):
        scheduler.add(request(0, 3))
    run(scheduler, ledger)
    with pytest.raises(ValueError, match="already in use"):
        scheduler.add(request(0, 3))
    scheduler.forget(0)
    scheduler.add(request(0, 3))
    assert scheduler.has_work


def test_what_is_computed_again_takes_the_same_path():
    # a preempted request has its output to compute again, behind its prompt
    scheduler, ledger = make(prefill_slice=4)
    scheduler.add(request(0, 3, new=9))
    for token in (5, 6, 7):
        plan = scheduler.schedule()
        ledger.apply(plan)
        scheduler.commit(plan, {0: [token]})
    scheduler.running[0].num_computed = 0
    assert scheduler.schedule().rows == (Row(0, 0, (10, 11, 12, 5), False),)
    scheduler.running[0].num_computed = 4
    assert scheduler.schedule().rows == (Row(0, 4, (6, 7), True),)


class Arrivals(RuleBasedStateMachine):
    """Requests arrive, end and are cancelled at any time; after each step nothing is lost, doubled or over budget."""

    @initialize(
        slice_=st.integers(1, 6),
        budget=st.integers(3, 9) | st.integers(18, 30),
        rows=st.integers(1, 3),
        capacity=st.integers(20, 60),
        reserve=st.integers(0, 9),
        drafts=st.integers(0, 4),
    )
    def start(self, slice_, budget, rows, capacity, reserve, drafts):
        self.config = SchedulerConfig(
            prefill_slice=slice_,
            token_budget=budget,
            max_rows=rows,
            reserve_tokens=reserve,
            decode_deadline_ms=0,
            num_draft_tokens=drafts,
        )
        self.ledger = Ledger(capacity)
        # drafts that end, of every length, and none at all
        self.scheduler = Scheduler(
            self.config, self.ledger, eos_ids=(0,), propose=lambda tokens, most: (1,) * min(most, len(tokens) % 6)
        )
        self.requests, self.outputs, self.ended = {}, {}, []

    @rule(length=st.integers(1, 12), new=st.integers(1, 8))
    def arrive(self, length, new):
        added = request(len(self.requests), length, new)
        self.requests[added.request_id] = added
        self.outputs[added.request_id] = []
        self.scheduler.add(added)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data):
        chosen = data.draw(st.sampled_from(sorted(self.requests)))
        if self.scheduler.finish(chosen, FinishReason.CANCELLED):
            self.ended.append(chosen)

    @rule(data=st.data())
    def step(self, data):
        decoding = {i for i, state in self.scheduler.running.items() if state.num_outstanding == 1}
        plan = self.scheduler.schedule()
        self.ledger.apply(plan)
        assert plan.num_tokens <= self.config.token_budget
        assert len(plan.rows) <= self.config.max_rows
        assert all(1 <= row.num_tokens - row.num_drafts <= self.config.prefill_slice for row in plan.rows)
        kinds = [2 if row.num_tokens > 1 or not row.needs_logits else 0 for row in plan.rows]
        kinds = [1 if row.num_drafts else kind for row, kind in zip(plan.rows, kinds, strict=True)]
        assert kinds == sorted(kinds), "decode rows, speculative rows, slices"
        assert decoding & set(self.scheduler.running) <= {row.request_id for row in plan.rows}, "a decode row left out"
        chosen = {}
        for row in plan.rows:
            request = self.requests[row.request_id]
            whole = request.prompt_ids + tuple(self.outputs[row.request_id])
            assert row.token_ids == (whole + row.drafts)[row.start : row.start + row.num_tokens]
            assert row.needs_logits == (row.start + row.num_tokens - row.num_drafts == len(whole))
            assert row.num_drafts == 0 or len(whole) + row.num_drafts <= request.max_tokens
            if row.needs_logits:
                chosen[row.request_id] = [data.draw(st.sampled_from([1, 1, 1, 0, 2, None])) for _ in row.token_ids]
                chosen[row.request_id] = chosen[row.request_id][-row.num_logits :]
        tokens = verify(plan, chosen, self.scheduler.running, (0,))
        self.ledger.keep(plan, tokens)
        for event in self.scheduler.commit(plan, tokens):
            if event.token_id is not None:
                self.outputs[event.request_id].append(event.token_id)
            if event.finish_reason is not None:
                self.ended.append(event.request_id)

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        assert len(self.ended) == len(set(self.ended)), "a request ended twice"
        assert set(self.ended) == set(self.scheduler.finished)
        for request_id, state in self.scheduler.finished.items():
            assert state.output_ids == self.outputs[request_id]

    def teardown(self):
        if hasattr(self, "scheduler"):
            run(self.scheduler, self.ledger)
            assert set(self.scheduler.finished) == set(self.requests)
            assert self.ledger.lengths == {}


TestArrivals = Arrivals.TestCase
TestArrivals.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

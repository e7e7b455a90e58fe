"""Drafts: where they come from, how many a step takes, what is accepted of them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_scheduler import Ledger, request, run

from distdec.config import SchedulerConfig
from distdec.progress import RequestState
from distdec.request import FinishReason, Request, Row, SamplingParams
from distdec.scheduler import MIN_SLICE, Scheduler, TokenEvent
from distdec.speculative import Drafter, NgramProposer, accept, verify
from distdec.step_cost import StepCost, StepLoad


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([5, 6, 7, 8, 5, 6], (7, 8, 5, 6)),
        # the latest of two places
        ([5, 6, 1, 5, 6, 2, 5, 6], (2, 5, 6, 2)),
        # three tokens say more than two that stand nearer
        ([4, 5, 6, 1, 0, 5, 6, 2, 4, 5, 6], (1, 0, 5, 6)),
        # four are not looked at: the latest place of three
        ([3, 4, 5, 6, 1, 0, 4, 5, 6, 2, 3, 4, 5, 6], (2, 3, 4, 5)),
        # one token is too few, and so is a text without a repetition
        ([6, 7, 8, 5, 6], ()),
        ([1, 2, 3, 4], ()),
        ([1], ()),
        # a text of one token over and over overlaps itself
        ([9, 9, 9], (9, 9, 9, 9)),
        ([1, 2, 1, 2, 1], (2, 1, 2, 1)),
    ],
)
def test_drafts_are_what_followed_the_longest_match(text, drafts):
    assert NgramProposer(2, 3)(np.array(text, np.int32), 4) == drafts
    assert NgramProposer(2, 3)(np.array(text, np.int32), 1) == drafts[:1]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 3), st.integers(0, 3), st.integers(1, 6))
def test_drafts_are_those_of_a_search_by_hand(text, shortest, more, most):
    longest, want = shortest + more, ()
    for length in range(shortest, longest + 1):
        for end in range(length, len(text)):
            if text[end - length : end] == text[len(text) - length :]:
                after = text[end:]
                want = tuple(after[i % len(after)] for i in range(most))
    got = NgramProposer(shortest, longest)(np.array(text, np.int32), most)
    assert got == want
    assert all(type(token) is int for token in got), "the plan holds plain integers"


@pytest.mark.parametrize(
    ("drafts", "chosen", "new"),
    [
        ((), [4], [4]),
        ((7, 8, 9), [7, 8, 9, 1], [7, 8, 9, 1]),
        ((7, 8, 9), [7, 8, 4, 1], [7, 8, 4]),
        # what comes behind a wrong draft means nothing, also where it is right again
        ((7, 8, 9), [6, 8, 9, 1], [6]),
        ((7, 8), [7, None, 3], [7, None]),
        ((7, 8), [None, 8, 3], [None]),
    ],
)
def test_drafts_are_accepted_as_far_as_they_are_what_was_chosen(drafts, chosen, new):
    assert accept(drafts, chosen) == new


def proposing(texts):
    """A proposer of fixed drafts by a request's first token."""
    return lambda tokens, most: texts.get(int(tokens[0]), ())[:most]


def decoding(texts, capacity=1000, ids=(0, 1, 2), eos=(), new=20, **config):
    """A scheduler whose requests have a prompt of two tokens, `(10 * id, 1)`, and a token each."""
    fields = {"prefill_slice": 64, "token_budget": 64, "max_rows": 8, "num_draft_tokens": 4, "decode_deadline_ms": 0}
    ledger = Ledger(capacity)
    scheduler = Scheduler(SchedulerConfig(**(fields | config)), ledger, eos, lookahead=True, propose=proposing(texts))
    for i in ids:
        scheduler.add(Request(i, (10 * i, 1), SamplingParams(max_new_tokens=new)))
    plan = scheduler.schedule()
    ledger.apply(plan)
    scheduler.commit(plan, {i: [2] for i in ids})
    return scheduler, ledger


def shape(plan):
    return [(row.request_id, row.num_tokens - row.num_drafts, row.num_drafts) for row in plan.rows]


def test_decode_rows_come_first_then_drafts_then_slices_of_prompts():
    scheduler, ledger = decoding({0: (5, 6, 7), 20: (8,) * 9})
    scheduler.add(request(3, 90))
    plan = scheduler.schedule()
    ledger.apply(plan)
    assert plan.rows[:3] == (
        Row(1, 2, (2,), True),
        Row(0, 2, (2, 5, 6, 7), True, 3),
        Row(2, 2, (2, 8, 8, 8, 8), True, 4),
    )
    # what 3 + 7 leave of 64
    assert plan.rows[3] == Row(3, 0, tuple(range(10, 64)), False)
    assert (plan.num_decode, plan.q_len, plan.num_tokens) == (3, 5, 64)
    assert not plan.decode_only
    assert [row.num_logits for row in plan.rows] == [1, 4, 5, 0]


@pytest.mark.parametrize(
    ("budget", "prompt", "drafts", "slice_"),
    [
        (15, 0, [4, 4, 4], None),
        # one row behind the other gets what is left, evenly
        (10, 0, [3, 2, 2], None),
        (4, 0, [1, 0, 0], None),
        (3, 0, [0, 0, 0], None),
        # a prompt keeps so much that it gets on
        (3 + MIN_SLICE + 12, 90, [4, 4, 4], MIN_SLICE),
        (3 + MIN_SLICE + 2, 90, [1, 1, 0], MIN_SLICE),
        (3 + MIN_SLICE, 90, [0, 0, 0], MIN_SLICE),
        (8, 90, [0, 0, 0], 5),
    ],
)
def test_drafts_shrink_with_the_budget(budget, prompt, drafts, slice_):
    scheduler, ledger = decoding({0: (5,) * 4, 10: (6,) * 4, 20: (7,) * 4})
    scheduler.config = dataclasses.replace(scheduler.config, token_budget=budget, max_rows=3)
    if prompt:
        scheduler.config = dataclasses.replace(scheduler.config, token_budget=budget, max_rows=4, prefill_slice=90)
        scheduler.add(request(3, prompt))
    plan = scheduler.schedule()
    ledger.apply(plan)
    by_id = {row.request_id: row for row in plan.rows}
    assert [by_id[i].num_drafts for i in range(3)] == drafts
    assert (by_id[3].num_tokens if 3 in by_id else None) == slice_
    assert plan.num_tokens <= budget


def test_a_step_that_its_drafts_do_not_fit_runs_without_them_and_preempts_nobody():
    texts = {0: (5, 6), 10: (5, 6)}
    # six tokens stored, three to come and four drafts, one frame short
    for capacity, drafts in ((13, 2), (12, 0), (9, 0)):
        scheduler, ledger = decoding(texts, capacity=1000)
        ledger.capacity = capacity
        plan = scheduler.schedule()
        ledger.apply(plan)
        assert sorted(row.num_drafts for row in plan.rows) == [0, drafts, drafts]
        assert len(plan.rows) == 3
        assert scheduler.stats.preemptions == 0
    # without drafts it would be the same
    ledger.capacity = 11
    scheduler.commit(plan, {i: [2] for i in range(3)})
    assert len(scheduler.schedule().rows) == 2
    assert scheduler.stats.preemptions == 1


def test_no_draft_goes_beyond_the_last_token():
    scheduler, ledger = decoding({0: (2,) * 4}, ids=(0,), new=5)
    plans, events = run(scheduler, ledger, token=lambda request_id, index: 2)
    # four tokens are left: three drafts and the choice behind them
    assert [row.num_drafts for plan in plans for row in plan.rows] == [3]
    assert events == [TokenEvent(0, 2, None)] * 3 + [TokenEvent(0, 2, FinishReason.LENGTH)]
    assert ledger.lengths == {}
    assert (scheduler.stats.drafted_tokens, scheduler.stats.acceptance_rate) == (3, 1.0)


def test_what_is_rejected_is_computed_again_and_counted():
    scheduler, ledger = decoding({0: (5, 6, 7)}, ids=(0, 1))
    plan = scheduler.schedule()
    ledger.apply(plan)
    assert shape(plan) == [(1, 1, 0), (0, 1, 3)]
    tokens = verify(plan, {0: [5, 9, 7, 1], 1: [4]}, scheduler.running, ())
    ledger.keep(plan, tokens)
    assert scheduler.commit(plan, tokens) == [TokenEvent(1, 4, None), TokenEvent(0, 5, None), TokenEvent(0, 9, None)]
    assert (scheduler.stats.drafted_tokens, scheduler.stats.accepted_tokens) == (3, 1)
    plan = scheduler.schedule()
    assert plan.rows[1][:3] == (0, 4, (9, 5, 6, 7))
    ledger.apply(plan)


@pytest.mark.parametrize(("ignore", "new"), [(False, [5, 6]), (True, [5, 6, 7, 3])])
def test_an_accepted_run_is_cut_at_an_end_of_sequence(ignore, new):
    scheduler, _ = decoding({0: (5, 6, 7)}, ids=(0,), eos=(6,))
    state = scheduler.running[0]
    state.request = dataclasses.replace(
        state.request, sampling=dataclasses.replace(state.request.sampling, ignore_eos=ignore)
    )
    plan = scheduler.schedule()
    tokens = verify(plan, {0: [5, 6, 7, 3]}, scheduler.running, scheduler.eos_ids)
    assert tokens == {0: new}
    events = scheduler.commit(plan, tokens)
    assert [event.token_id for event in events] == new
    assert events[-1].finish_reason == (None if ignore else FinishReason.EOS)
    # a draft that ends its request was right too
    assert scheduler.stats.accepted_tokens == (3 if ignore else 2)


def test_a_stop_string_ends_a_run_at_its_token_and_a_cancelled_request_takes_none():
    scheduler, ledger = decoding({0: (5, 6, 7), 10: (5, 6, 7)}, ids=(0, 1))
    plan = scheduler.schedule()
    ledger.apply(plan)
    scheduler.finish(1, FinishReason.CANCELLED)
    # the text of the first met its stop string with the second token
    events = scheduler.commit(plan, {0: [5, 6], 1: [5, 6, 7, 3]}, {0})
    assert events == [TokenEvent(0, 5, None), TokenEvent(0, 6, FinishReason.STOP)]
    assert scheduler.finished[1].output_ids == [2]
    assert sorted(scheduler.schedule().free) == [0, 1]


def test_nothing_is_launched_ahead_where_drafts_are_wanted():
    scheduler, _ = decoding({})
    plan = scheduler.schedule()
    assert plan.decode_only
    assert not plan.followed
    scheduler, _ = decoding({}, num_draft_tokens=0)
    assert scheduler.schedule().followed


def test_history_is_all_tokens_and_cannot_be_written():
    state = RequestState(request(0, 3, new=6))
    for count in range(4):
        history = state.history()
        assert history.tolist() == [10, 11, 12, *state.output_ids]
        with pytest.raises(ValueError, match="read-only"):
            history[0] = 1
        state.output_ids += [40 + count] * (count % 2 + 1)


def test_a_proposer_that_goes_on_for_too_long_is_cut():
    states = [RequestState(request(i, 3, new=9)) for i in range(2)]
    drafter = Drafter(lambda tokens, most: (1,) * 50, 3)
    assert drafter.draft(states, 100) == {0: (1,) * 3, 1: (1,) * 3}


def test_the_cost_of_drafts_is_learned_and_leaves_less_room_for_prompts():
    cost = StepCost()
    for tokens in (0, 128, 256, 512):
        for rows in (2, 8):
            for drafts in (0, 1, 4):
                load = StepLoad(rows, 1000 * rows, tokens, 0, rows * drafts)
                cost.learn(load, 4.0 + 0.1 * rows + 1e-5 * load.decode_context + 0.05 * tokens + 0.2 * rows * drafts)
    for _ in range(60):
        cost.learn(StepLoad(2, 2000), 4.22)
        cost.predict(StepLoad(2, 2000))
    assert cost.predict(StepLoad(4, 4000, 0, 0, 16)) == pytest.approx(4.44 + 3.2, rel=0.05)
    rooms = [cost.room(StepLoad(8, 8000, 0, 0, drafts), 0, 20.0) for drafts in (0, 32)]
    assert rooms[0] - rooms[1] == pytest.approx(6.4 / 0.05, rel=0.1)


def test_drafts_count_in_the_load_of_a_step_and_shorten_slices():
    slices = []
    for texts in ({}, {0: (5, 6, 7, 8)}):
        scheduler, _ = decoding(texts, decode_deadline_ms=50, token_budget=600, prefill_slice=500)
        loads = []

        def room(load, start, deadline, loads=loads):
            loads.append(load)
            return 100 - load.draft_tokens

        scheduler.cost.room = room
        scheduler.add(request(3, 400))
        plan = scheduler.schedule()
        slices.append(plan.rows[-1].num_tokens)
        # three rows are filled up to the longest
        assert loads[-1].draft_tokens == (12 if texts else 0)
        assert scheduler._under_way[plan.step][0].draft_tokens == loads[-1].draft_tokens
    assert slices == [100, 88]

"""Requests and step plans: what cannot run is refused, and a plan survives its journey as integers or says so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distdec.request import MAGIC, PENDING, Hit, PlanKind, Request, Row, SamplingParams, StepPlan

ids = st.integers(0, 2**40)
rows = st.builds(Row, ids, ids, st.lists(ids, max_size=5).map(tuple), st.booleans(), st.integers(0, 4))
plans = st.builds(
    StepPlan,
    ids,
    st.sampled_from(PlanKind),
    st.lists(ids, max_size=4).map(tuple),
    st.lists(ids, max_size=4).map(tuple),
    st.lists(rows, max_size=4).map(tuple),
    st.lists(ids, max_size=4).map(tuple),
    st.lists(st.builds(Hit, ids, st.binary(min_size=32, max_size=32)), max_size=3).map(tuple),
    st.booleans(),
    *[st.lists(ids, max_size=4).map(tuple) for _ in range(3)],
    st.lists(st.tuples(ids, ids), max_size=3).map(tuple),
)


@given(plans)
def test_a_plan_comes_back_from_its_integers(plan):
    words = plan.encode()
    assert all(type(word) is int for word in words)
    assert StepPlan.decode(words) == plan


def test_the_worked_example_of_the_wire_format():
    plan = StepPlan(3, rows=(Row(7, 12, (99,), True),))
    assert plan.encode()[3:] == [3, 0, 0, 0, 1, 7, 12, 1, 0, 1, 99, 0, 0, 0, 0, 0, 0, 0]


def test_a_pending_plan_has_the_rows_of_the_one_before_and_does_not_tell_them():
    before = StepPlan(3, rows=(Row(7, 12, (99,), True), Row(8, 4, (98,), True)), followed=True)
    plan = StepPlan(4, rows=before.again(), followed=True, late=(5, 6), pending=True)
    assert plan.rows == (Row(7, 13, (PENDING,), True), Row(8, 5, (PENDING,), True))
    assert (plan.num_decode, plan.q_len, plan.decode_only) == (2, 1, True)
    words = plan.encode()
    assert len(words) == len(StepPlan(4, late=(5, 6)).encode())
    assert StepPlan.decode(words, before) == plan
    with pytest.raises(ValueError, match="a pending step plan without the one before"):
        StepPlan.decode(words)


@given(plans, st.data())
def test_a_damaged_plan_is_never_taken_for_another(plan, data):
    words = plan.encode()
    at = data.draw(st.integers(0, len(words) - 1))
    words[at] ^= 1 << data.draw(st.integers(0, 40))
    with pytest.raises(ValueError, match="step plan"):
        StepPlan.decode(words)


@pytest.mark.parametrize("change", [lambda w: w[:-1], lambda w: [*w, 0], lambda w: w[:2], lambda w: []])
def test_a_plan_of_another_length_is_refused(change):
    words = StepPlan(1, free=(4,), rows=(Row(7, 12, (99, 98), True),)).encode()
    with pytest.raises(ValueError, match="step plan"):
        StepPlan.decode(change(words))


def test_a_plan_of_another_version_names_both():
    words = StepPlan(1).encode()
    with pytest.raises(ValueError, match="version 9, this rank reads version 6"):
        StepPlan.decode([MAGIC, 9, *words[2:]])


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="request 3: the prompt is empty"):
        Request(3, ())


@pytest.mark.parametrize("prompt", [(1.7, 2), ("1", "2"), "12", [[1, 2], [3, 4]], 5, None])
def test_a_prompt_is_a_row_of_integers_and_nothing_is_rounded_or_parsed(prompt):
    with pytest.raises(ValueError, match="request 3: the prompt is a row of token ids"):
        Request(3, prompt)


@pytest.mark.parametrize(("prompt", "bad"), [((5, -1), -1), ((5, 100), 100), ((101, 3), 101)])
def test_token_ids_outside_the_vocabulary_are_refused(prompt, bad):
    with pytest.raises(ValueError, match=rf"token id {bad} is outside the vocabulary \(legal: 0 to 99\)"):
        Request(0, prompt).check(vocab_size=100, max_positions=50)


def test_prompt_and_new_tokens_must_fit_the_model_together():
    request = Request(0, tuple(range(10)), SamplingParams(max_new_tokens=6))
    request.check(vocab_size=10, max_positions=16)
    with pytest.raises(
        ValueError, match=r"prompt \(10\) \+ max_new_tokens \(6\) = 16 tokens, over the model's limit of 15"
    ):
        request.check(vocab_size=10, max_positions=15)


def test_the_last_token_is_never_stored():
    assert Request(0, (1, 2, 3), SamplingParams(max_new_tokens=1)).max_tokens == 3


def test_one_stop_string_may_stand_alone():
    assert SamplingParams(stop="###").stop == ("###",)

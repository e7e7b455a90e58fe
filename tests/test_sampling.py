"""Sampling: the filters keep what they should, draws depend on seed and index alone, and bad logits fail alone."""

import math

import pytest
import torch

from distdec.request import SamplingParams
from distdec.sampling import SamplingRow, _mix, sample, uniform

INF = float("inf")


def row(seed=0, index=0, seen=(), **fields):
    return SamplingRow(SamplingParams(**fields), seed, index, seen)


def draws(logits, count=4000, **fields):
    """Relative frequency of each token over `count` draws from the same logits."""
    stacked = torch.tensor(logits).expand(count, -1)
    tokens = sample(stacked, [row(seed=3, index=i, **fields) for i in range(count)])
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / count


def test_greedy_takes_the_first_of_equal_logits():
    logits = torch.tensor([[0.0, 2.0, 2.0, -INF], [3.0, -INF, 1.0, 3.0]])
    assert sample(logits, [row(), row()]) == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 9e-6])
def test_a_tiny_temperature_is_greedy(temperature):
    assert sample(torch.tensor([[0.0, 1e4, 1e4 - 1]]), [row(temperature=temperature)]) == [1]


def test_temperature_scales_the_log_probabilities():
    got = draws([0.0, 1.0, 2.0], temperature=2.0)
    assert got == pytest.approx(torch.tensor([0.0, 0.5, 1.0]).softmax(0), abs=0.03)


def test_top_k_keeps_the_k_likeliest():
    got = draws([1.0, 3.0, 2.0, 0.0], temperature=1.0, top_k=2)
    assert got[0] == got[3] == 0
    assert got[1].item() == pytest.approx(1 / (1 + math.exp(-1)), abs=0.03)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log().tolist()
    got = draws(logits, temperature=1.0, top_p=0.7)
    assert got[0] == got[2] == 0
    assert got[1].item() == pytest.approx(2 / 3, abs=0.03)
    assert draws(logits, count=200, temperature=1.0, top_p=0.01)[1] == 1


def test_min_p_drops_what_is_unlikely_beside_the_likeliest():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    got = draws(logits, temperature=1.0, min_p=0.29)
    assert got[3] == 0 < got[2]
    assert draws(logits, temperature=1.0, min_p=0.31)[2] == 0


def test_filters_work_together_in_the_order_of_transformers():
    from transformers.generation import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    torch.manual_seed(1)
    logits = torch.randn(1, 40) * 2
    warpers = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(20), TopPLogitsWarper(0.85), MinPLogitsWarper(0.1)]
    want = LogitsProcessorList(warpers)(None, logits).softmax(-1)[0]
    got = draws(logits[0].tolist(), count=20000, temperature=0.8, top_k=20, top_p=0.85, min_p=0.1)
    assert set(got.nonzero()[:, 0].tolist()) == set(want.nonzero()[:, 0].tolist())
    assert got == pytest.approx(want, abs=0.015)


def test_repetition_penalty_is_that_of_transformers():
    from transformers.generation import RepetitionPenaltyLogitsProcessor

    torch.manual_seed(2)
    logits = torch.randn(2, 12)
    seen = [[3, 3, 7], [0, 11]]
    want = [
        RepetitionPenaltyLogitsProcessor(5.0)(torch.tensor([s]), logits[i : i + 1]).argmax() for i, s in enumerate(seen)
    ]
    before = logits.clone()
    assert sample(logits, [row(seen=s, repetition_penalty=5.0) for s in seen]) == [int(token) for token in want]
    assert torch.equal(logits, before)
    top = int(logits[0].argmax())
    assert sample(logits[:1], [row(seen=[top], repetition_penalty=50.0)]) != [top]


def test_a_draw_does_not_depend_on_batch_mates():
    torch.manual_seed(0)
    logits = torch.randn(5, 30)
    rows = [row(seed=i, index=2 * i, temperature=0.5 + i, top_k=3 * i, top_p=0.9) for i in range(5)]
    together = sample(logits, rows)
    assert [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(5)] == together
    assert sample(logits.flip(0), rows[::-1]) == together[::-1]


def test_draws_depend_on_seed_and_index_and_are_even():
    values = [uniform(seed, index) for seed in range(40) for index in range(50)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    counts = torch.histc(torch.tensor(values, dtype=torch.float64), bins=10, min=0, max=1)
    # 200 expected in each tenth, with a standard deviation of 13
    assert counts.min() > 140
    assert counts.max() < 260
    assert uniform(1, 0) != uniform(0, 1)


def test_the_generator_is_frozen():
    # published first outputs of splitmix64 for the seeds 0 and 1234567; a change would alter every recorded sample
    assert _mix(0) == 0xE220A8397B1DCDAF
    assert _mix(1234567) == 6457827717110365317
    # the stream of seed 0 begins with the second output of a splitmix64 seeded with the first of seed 0
    assert uniform(0, 0) == (_mix((0xE220A8397B1DCDAF + 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[math.nan, 0.0, 1.0], [INF, 0.0, 1.0], [-INF, -INF, -INF], [math.nan] * 3])
def test_unusable_logits_fail_their_own_request_only(temperature, bad):
    good = [0.0, -INF, 9e4]
    got = sample(torch.tensor([good, bad, good]), [row(temperature=temperature)] * 3)
    assert got == [2, None, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_overflows_fails_its_request(temperature):
    rows = [row(seen=(0,), temperature=temperature, repetition_penalty=penalty) for penalty in (1e-300, 1.0)]
    assert sample(torch.tensor([[1.0, -INF, -INF]] * 2), rows) == [None, 0]


def test_a_top_k_beyond_any_float_keeps_everything():
    assert sample(torch.zeros(1, 4), [row(temperature=1.0, top_k=10**400)]) == sample(
        torch.zeros(1, 4), [row(temperature=1.0)]
    )


def test_masked_tokens_are_never_drawn():
    assert draws([0.0, -INF, 0.0], count=500, temperature=5.0)[1] == 0


def test_rows_and_logits_must_match():
    with pytest.raises(ValueError, match="2 rows of logits for 1 requests"):
        sample(torch.zeros(2, 4), [row()])
    assert sample(torch.zeros(0, 4), []) == []

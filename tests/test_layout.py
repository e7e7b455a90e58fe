"""Layouts and the plan of a batch of known lengths."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distdec.cache.layout import CacheLayout, plan_chunks


def check_plan(lengths, num_ranks, min_chunk, max_chunk, weights):
    """Recount a plan: every token once, legal chunk lengths, the stated bound on every rank."""
    plan = plan_chunks(lengths, num_ranks, min_chunk, max_chunk, weights)
    ends = [0] * len(lengths)
    loads = [0] * num_ranks
    order = [chunk.sequence for chunk in plan]
    assert order == sorted(order)
    for chunk in plan:
        size = chunk.end - chunk.start
        assert chunk.start == ends[chunk.sequence]
        assert 1 <= size <= max_chunk
        if size % min_chunk or (size // min_chunk) & (size // min_chunk - 1):
            assert chunk.end == lengths[chunk.sequence], "only a tail may be odd"
        ends[chunk.sequence] = chunk.end
        loads[chunk.rank] += size
    assert ends == list(lengths)
    weights = weights or [1] * num_ranks
    for load, weight in zip(loads, weights, strict=True):
        # load <= weight / sum(weights) * total + max_chunk, in integers
        assert (load - max_chunk) * sum(weights) <= weight * sum(lengths)
    return plan, loads


@given(
    lengths=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 3000)), max_size=6),
    num_ranks=st.integers(1, 9),
    min_chunk=st.sampled_from([1, 2, 3, 16]),
    ratio=st.sampled_from([1, 2, 4, 8, 16]),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_plan_holds_every_token_once_within_the_bound(lengths, num_ranks, min_chunk, ratio, data):
    weights = data.draw(st.none() | st.lists(st.integers(1, 50), min_size=num_ranks, max_size=num_ranks))
    check_plan(lengths, num_ranks, min_chunk, min_chunk * ratio, weights)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 1023, 1024, 1025, 3_000_001])
@pytest.mark.parametrize("weights", [None, [1, 3, 2, 1, 1], [80, 141, 80, 80, 24]])
def test_plan_of_edge_lengths(length, weights):
    check_plan([length, 0, 1, length], 5, 128, 1024, weights)


def test_plan_of_a_batch_is_even_although_every_sequence_is_short():
    _, loads = check_plan([100] * 64, 8, 128, 1024, None)
    assert loads == [800] * 8


def test_plan_follows_the_weights():
    _, loads = check_plan([1_000_000], 3, 128, 1024, [1, 2, 5])
    assert np.allclose(np.array(loads) / 1_000_000, np.array([1, 2, 5]) / 8, atol=0.002)


def test_plan_spreads_one_sequence_over_all_ranks_it_can_reach():
    plan, _ = check_plan([8 * 128], 8, 128, 1024, None)
    assert [chunk.rank for chunk in plan] == list(range(8))
    assert plan_chunks([300, 40], 2) == [(0, 0, 0, 128), (1, 0, 128, 256), (0, 0, 256, 300), (1, 1, 0, 40)]


def test_plan_does_not_depend_on_the_integer_type():
    assert plan_chunks(np.array([700, 5]), np.int64(2), weights=np.array([2, 4])) == plan_chunks(
        [700, 5], 2, weights=[1, 2]
    )


@pytest.mark.parametrize(
    ("call", "received"),
    [
        ({"cache_lens": [-1], "num_ranks": 2}, "-1"),
        ({"cache_lens": [1.5], "num_ranks": 2}, "1.5"),
        ({"cache_lens": [True], "num_ranks": 2}, "True"),
        ({"cache_lens": [1], "num_ranks": 0}, "0"),
        ({"cache_lens": [1], "num_ranks": "2"}, "'2'"),
        ({"cache_lens": [1], "num_ranks": 2, "min_chunk": 0}, "0"),
        ({"cache_lens": [1], "num_ranks": 2, "min_chunk": 128, "max_chunk": 64}, "64"),
        ({"cache_lens": [1], "num_ranks": 2, "min_chunk": 128, "max_chunk": 384}, "384"),
        ({"cache_lens": [1], "num_ranks": 2, "min_chunk": 128, "max_chunk": 1000}, "1000"),
        ({"cache_lens": [1], "num_ranks": 2, "weights": [1]}, "1"),
        ({"cache_lens": [1], "num_ranks": 2, "weights": [1, 0]}, "0"),
        ({"cache_lens": [1], "num_ranks": 2, "weights": [1, 0.5]}, "0.5"),
    ],
)
def test_plan_refuses_bad_input_with_received_and_legal_values(call, received):
    with pytest.raises(ValueError, match="must") as error:
        plan_chunks(**call)
    assert f"got {received}" in str(error.value) or f"={received}" in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"num_frames": ()},
        {"num_frames": (4, -1)},
        {"num_frames": (2**24, 2**25)},
        {"max_chunk": 100},
        {"min_chunk": 0},
        {"page_size": 0},
        {"weights": (1, 2, 3)},
        {"weights": (1, 0)},
        {"shard_min_tokens": -1},
    ],
)
def test_layout_refuses_bad_values(change):
    with pytest.raises(ValueError, match="must"):
        CacheLayout(**{"num_frames": (4, 4), **change})


def test_layout_is_frozen_and_counts_slots():
    layout = CacheLayout((4, 7), min_chunk=16, max_chunk=64, weights=(4, 6), shard_min_tokens=17)
    assert (layout.num_ranks, layout.max_frames, layout.num_slots(1)) == (2, 4, 112)
    assert layout.rank_weights == (2, 3)
    assert layout.home_tokens == 32
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.min_chunk = 1


def test_chunks_lengthen_with_the_sequence():
    layout = CacheLayout((64,), min_chunk=128, max_chunk=1024)
    assert [layout.frames_at(p) for p in (0, 1023, 1024, 2047, 2048, 4095, 4096, 10**6)] == [1, 1, 2, 2, 4, 4, 8, 8]
    home = CacheLayout((64,), min_chunk=128, max_chunk=1024, shard_min_tokens=4500)
    # home ends at 4608: 4096 + 4 * 128, then chunks are free to be long again
    assert [home.frames_at(p) for p in (4096, 4480, 4608)] == [4, 1, 8]

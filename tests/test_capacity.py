"""The size of the cache: what is asked for, what memory holds, and what is said when they do not meet."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distdec.capacity import Room, choose_max_tokens, no_room, tokens_needed
from distdec.config import CacheConfig
from distdec.request import Request, SamplingParams
from distdec.sharded_cache import _frames_for

GIB = 2**30


def request(request_id, length, new):
    return Request(request_id, (1,) * length, SamplingParams(max_new_tokens=new))


def choose(wanted=10_000, per_token=1024, free=GIB, kvp=2, rooms=(), **cache):
    return choose_max_tokens(CacheConfig(**cache), wanted, per_token, rooms or [Room(free)] * kvp, kvp)


def test_an_automatic_cache_holds_the_largest_requests_that_run_together():
    requests = [request(0, 100, 29), request(1, 10, 3), request(2, 1000, 25), request(3, 128, 1)]
    # stored tokens 128, 12, 1024, 128
    assert tokens_needed(requests, max_rows=2, min_chunk=128) == 1024 + 128
    assert tokens_needed(requests, max_rows=9, min_chunk=128) == 1024 + 3 * 128
    assert tokens_needed([], max_rows=9, min_chunk=128) == 0


def test_an_automatic_cache_is_what_the_run_needs_within_the_memory():
    assert choose() == 10_000
    # 0.9 of 4 MiB are 3686 tokens of 1 KiB, 28 whole frames; less one chunk of 1024, on each of two ranks
    assert choose(free=4 * 2**20) == 2 * (28 * 128 - 1024)


def test_memory_given_is_used_up():
    assert choose(memory_gb=0.25) == 2 * (2**18 - 1024)


def test_the_largest_step_and_the_captured_steps_come_out_of_the_same_memory():
    # 3686 KiB of 4 MiB, less 1 MiB and 512 KiB, are 2150 tokens, 16 whole frames
    room = Room(2**22, 2**20, 2**19)
    assert choose(rooms=[room] * 2) == 2 * (16 * 128 - 1024)
    with pytest.raises(ValueError, match=r"not enough for a KV cache \(0.00391 GiB are free; the largest step takes"):
        choose(rooms=[room._replace(graphs=2**20)] * 2)
    with pytest.raises(
        ValueError, match=r"max_tokens=2049 does not fit: .* hold 2048 tokens .* scheduler.token_budget"
    ):
        choose(rooms=[room] * 2, max_tokens=2049)
    assert choose(rooms=[room] * 2, max_tokens=2048) == 2048
    # what is given in GiB has to fit beside them, with nothing kept back
    assert choose(rooms=[room] * 2, memory_gb=2.5 / 1024) == 2 * (20 * 128 - 1024)
    with pytest.raises(ValueError, match=r"cache.memory_gb=0.00244238 does not fit: a rank has 0.00391 GiB free"):
        choose(rooms=[room] * 2, memory_gb=2.501 / 1024)


def test_the_rank_with_least_room_for_its_share_decides():
    small, large = Room(4 * 2**20), Room(40 * 2**20)
    assert choose(rooms=[large, small], wanted=10**6) == choose(free=4 * 2**20)
    # along kvp first: ranks 1 and 3 are the same place of two tp groups
    assert choose(rooms=[large, large, large, small], wanted=10**6) == choose(free=4 * 2**20)
    # rank 0 holds 9 in 10 tokens: 36864 of 1 KiB in 288 frames, less a chunk; rank 1 could hold 10 x 2560
    assert choose(rooms=[large, small], wanted=10**6, weights=(9, 1)) == 10 * 2560
    assert choose(rooms=[small, large], wanted=10**6, weights=(9, 1)) == 2560 * 10 // 9


rooms = st.builds(Room, st.integers(2**20, 2**26), st.integers(0, 2**22), st.integers(0, 2**22))


@given(st.lists(rooms, min_size=1, max_size=5), st.data())
def test_every_pool_fits_beside_the_steps_of_its_rank(rooms, data):
    count = len(rooms)
    weights = data.draw(st.none() | st.lists(st.integers(1, 9), min_size=count, max_size=count))
    bytes_per_token = data.draw(st.sampled_from([96, 1024, 1536]))
    fraction = data.draw(st.floats(0.1, 1.0))
    options = CacheConfig(memory_fraction=fraction, weights=weights and tuple(weights))
    try:
        size = choose_max_tokens(options, 10**9, bytes_per_token, rooms, count)
    except ValueError as error:
        assert "not enough for a KV cache" in str(error)
        return
    frames = _frames_for(size, count, options.min_chunk, options.max_chunk, weights)
    left = [
        fraction * room.free - room.step - room.graphs - 128 * held * bytes_per_token
        for room, held in zip(rooms, frames, strict=True)
    ]
    assert min(left) >= 0
    # and no rank could be given another frame for each of its shares
    more = _frames_for(size + 128 * sum(weights or [1] * count), count, options.min_chunk, options.max_chunk, weights)
    assert any(
        128 * held * bytes_per_token > int(fraction * room.free) - room.step - room.graphs
        for room, held in zip(rooms, more, strict=True)
    )


def test_tokens_given_are_taken_if_they_fit():
    assert choose(max_tokens=777) == 777
    with pytest.raises(
        ValueError, match=r"max_tokens=600000 does not fit: 0.25 GiB a rank hold 522240 .* 3 ranks would do"
    ):
        choose(max_tokens=600_000, memory_gb=0.25)
    with pytest.raises(ValueError, match=r"cache.memory_gb=1e\+06 does not fit: a rank has .* GiB free"):
        choose(memory_gb=1e6)
    with pytest.raises(ValueError, match="no number of ranks would do"):
        choose(max_tokens=100, free=2**20)


def test_too_little_memory_for_any_cache_is_said():
    with pytest.raises(ValueError, match="not enough for a KV cache: 2048 tokens of 1024 bytes"):
        choose(free=2**21)


def test_a_request_larger_than_the_cache_is_told_both_numbers_and_what_would_fit():
    told = no_room(request(3, 8900, 101), max_tokens=4096, kvp=2, dtype="float32")
    assert "request 3: prompt (8900) + max_new_tokens (101) needs 9000 tokens" in told
    assert "the cache holds 4096 over 2 ranks" in told
    assert "would fit on 5 ranks" in told
    assert "cache.max_tokens=9000" in told
    assert "bfloat16" not in told


def test_a_cache_without_a_size_is_told_what_gives_it_one():
    told = no_room(request(0, 5, 5), max_tokens=0, kvp=1, dtype="float32")
    assert "holds none: cache.max_tokens, cache.memory_gb or Runner.load(wanted_tokens" in told
    assert "ranks of this size" not in told


@pytest.mark.parametrize(("dtype", "length", "offered"), [("float32", 8000, True), ("bfloat16", 8000, False)])
def test_half_the_bytes_are_offered_where_they_suffice(dtype, length, offered):
    assert ("model.dtype=bfloat16" in no_room(request(0, length, 1), 4096, 1, dtype)) is offered

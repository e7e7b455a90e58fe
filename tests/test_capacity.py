"""The size of the cache: what is asked for, what memory holds, and what is said when they do not meet."""

import pytest

from distdec.capacity import choose_max_tokens, no_room, tokens_needed
from distdec.config import CacheConfig
from distdec.request import Request, SamplingParams

GIB = 2**30


def request(request_id, length, new):
    return Request(request_id, (1,) * length, SamplingParams(max_new_tokens=new))


def choose(wanted=10_000, per_token=1024, free=GIB, kvp=2, **cache):
    return choose_max_tokens(CacheConfig(**cache), wanted, per_token, free, kvp)


def test_an_automatic_cache_holds_the_largest_requests_that_run_together():
    requests = [request(0, 100, 29), request(1, 10, 3), request(2, 1000, 25), request(3, 128, 1)]
    # stored tokens 128, 12, 1024, 128
    assert tokens_needed(requests, max_rows=2, min_chunk=128) == 1024 + 128
    assert tokens_needed(requests, max_rows=9, min_chunk=128) == 1024 + 3 * 128
    assert tokens_needed([], max_rows=9, min_chunk=128) == 0


def test_an_automatic_cache_is_what_the_run_needs_within_the_memory():
    assert choose() == 10_000
    # 0.8 of 4 MiB are 3276 tokens of 1 KiB; less one chunk of 1024, on each of two ranks
    assert choose(free=4 * 2**20) == 2 * (3276 - 1024)


def test_memory_given_is_used_up():
    assert choose(memory_gb=0.25) == 2 * (2**18 - 1024)


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


@pytest.mark.parametrize(("dtype", "length", "offered"), [("float32", 8000, True), ("bfloat16", 8000, False)])
def test_half_the_bytes_are_offered_where_they_suffice(dtype, length, offered):
    assert ("model.dtype=bfloat16" in no_room(request(0, length, 1), 4096, 1, dtype)) is offered

"""Prefix hits: what is found, what is not, what is evicted, and that nothing shared is ever written."""

import numpy as np
import pytest
from cache_model import CacheModel

from distdec.cache import CacheLayout, KVCache
from distdec.cache.prefix import PrefixIndex


def make(*num_frames, twin=True, **fields):
    return CacheModel(
        CacheLayout(num_frames, **{"min_chunk": 16, "max_chunk": 128, "page_size": 16, **fields}), twin=twin
    )


def put(model, seq_id, tokens, salt=0):
    """Add a prompt, compute what did not hit, publish it; returns the tokens hit."""
    hit = model.add(seq_id, tokens, salt)
    assert model.extend(seq_id, tokens[hit:])
    model.commit(seq_id, len(tokens))
    model.check()
    return hit


def text(count, start=0):
    return list(range(start, start + count))


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_prompts_that_part_after_150_tokens_share_144(num_ranks):
    model = make(*[80] * num_ranks)
    assert put(model, 0, text(150) + text(400, 10_000)) == 0
    assert put(model, 1, text(150) + text(400, 20_000)) == 144


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_the_unit_of_a_hit_does_not_grow_with_the_ranks(num_ranks):
    model = make(*[80] * num_ranks, min_chunk=128, max_chunk=1024)
    put(model, 0, text(900) + [1] * 50)
    # draft tokens come and go behind the prompt
    model.extend(0, [5, 6, 7, 8])
    model.truncate(0, 951)
    assert put(model, 1, text(900) + [2] * 50) == 896
    model.free(0)
    assert put(model, 2, text(900)) == 896 - 0
    model.drain()


def test_at_least_one_token_is_always_left_to_compute():
    model = make(40, 40)
    put(model, 0, text(64))
    assert put(model, 1, text(64)) == 48
    assert put(model, 2, text(65)) == 64
    assert put(model, 3, text(1)) == 0
    assert put(model, 4, text(16)) == 0
    assert model.cache.add(5, []) == 0


def test_a_hit_that_ends_inside_a_chunk_opens_a_new_one():
    model = make(20, min_chunk=128, max_chunk=128)
    put(model, 0, text(100))
    assert put(model, 1, [*text(40), 9, 9, 9]) == 32
    first, second = model.cache.views(1)
    assert first == (0, model.cache.views(0)[0].chunk, 0, 32, 0)
    assert second.chunk != first.chunk
    # the one that opened the shared chunk goes on behind what others see
    model.extend(0, text(20, 100))
    assert len(model.cache.views(0)) == 1
    model.check()


def test_a_writer_cut_back_into_what_others_see_leaves_the_chunk():
    model = make(20, min_chunk=128, max_chunk=128)
    put(model, 0, text(100))
    put(model, 1, text(70))
    model.truncate(0, 20)
    model.extend(0, [3] * 20)
    assert len(model.cache.views(0)) == 2
    model.check()


def test_a_page_that_is_overwritten_is_not_found_any_more():
    model = make(20)
    put(model, 0, text(100))
    model.truncate(0, 40)
    assert model.extend(0, [7] * 60)
    model.check()
    assert put(model, 1, text(100)) == 32
    model.commit(0, 100)
    assert put(model, 2, [*text(40), *[7] * 60]) == 96


def test_only_committed_pages_are_found():
    model = make(20)
    model.add(0, text(64))
    model.extend(0, text(64))
    assert model.add(1, text(64)) == 0
    model.commit(0, 31)
    assert model.add(2, text(64)) == 16
    with pytest.raises(ValueError, match="at most the 64 tokens reserved, got 65"):
        model.cache.commit_pages(0, text(65))


def test_the_same_page_after_another_prefix_or_under_another_salt_is_another_page():
    model = make(40)
    put(model, 0, [1] * 48)
    assert put(model, 1, [2] * 16 + [1] * 32) == 0
    assert put(model, 2, [1] * 48, salt=1) == 0
    assert put(model, 3, [1] * 48, salt=1) == 32


def test_tokens_are_compared_when_hashes_collide(monkeypatch):
    monkeypatch.setattr(PrefixIndex, "key", staticmethod(lambda parent, tokens: b"the same"))
    model = make(40)
    put(model, 0, [1] * 16)
    assert model.add(1, [2] * 17) == 0
    # right tokens behind the wrong parent
    assert model.add(2, [1] * 33) == 16


def test_pages_that_straddle_chunks_and_ranks_are_found():
    model = make(30, 30, 30, min_chunk=1, max_chunk=2, page_size=5)
    put(model, 0, text(23))
    assert put(model, 1, [*text(22), 99]) == 20
    assert len({view.kvp_rank for view in model.cache.views(1)}) == 3
    model.free(0)
    assert put(model, 2, text(23)) == 20
    model.drain()


def test_pages_behind_a_fork_point_are_found():
    model = make(60, 60)
    put(model, 0, text(37))
    model.fork(0, 1)
    model.extend(1, text(60, 37))
    model.commit(1, 97)
    assert put(model, 2, text(97)) == 96
    model.check()


def test_cached_frames_count_as_free_and_the_least_recently_used_go_first():
    model = make(8, max_chunk=16)
    put(model, 0, [1] * 32)
    put(model, 1, [2] * 32)
    model.free(0)
    model.free(1)
    stats = model.cache.stats()
    assert (stats.free_frames, stats.cached_frames, stats.used_frames) == ((4,), (4,), (0,))
    # a hit makes the older prompt the younger one
    assert put(model, 2, [1] * 33) == 32
    model.free(2)
    model.add(3)
    assert model.cache.can_extend([(3, 8 * 16)])
    assert not model.cache.can_extend([(3, 8 * 16 + 1)])
    assert model.extend(3, [3] * 6 * 16)
    model.check()
    assert model.cache.stats().evicted_chunks == 2
    assert model.add(4, [2] * 33) == 0
    assert model.add(5, [1] * 33) == 32
    model.check()


def test_the_end_of_a_prompt_is_evicted_before_its_beginning():
    model = make(4, max_chunk=16)
    put(model, 0, text(64))
    model.free(0)
    model.add(1)
    model.extend(1, [5] * 20)
    model.check()
    assert model.add(2, text(64)) == 32


def test_an_id_used_again_does_not_own_what_it_wrote_before():
    model = make(20, min_chunk=128, max_chunk=128)
    put(model, 0, text(64))
    put(model, 1, text(64))
    model.free(0)
    # sequence 0 comes back on the chunk that sequence 0 once opened, filled to exactly the same token
    assert model.add(0, text(65)) == 64
    model.extend(0, [7])
    assert len(model.cache.views(0)) == 2
    model.check()


def test_hits_are_counted():
    model = make(40)
    put(model, 0, text(64))
    put(model, 1, text(64))
    stats = model.cache.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.published_pages) == (128, 48, 4)
    assert stats.tokens == (128,)
    assert stats.stored_tokens == (80,)


def test_token_ids_are_one_row_of_integers_of_any_width():
    cache = KVCache(CacheLayout((20,), min_chunk=16, max_chunk=128))
    cache.add(0, np.arange(40, dtype=np.uint16))
    cache.extend(0, 40)
    cache.commit_pages(0, np.arange(40, dtype=np.int32))
    assert cache.add(1, list(range(40))) == 32
    for bad in ([1.5, 2.0], [[1], [2]], ["a"]):
        with pytest.raises(ValueError, match="one row of integers"):
            cache.add(2, bad)
    assert cache.sequences() == [0, 1]


def test_an_aborted_request_leaves_every_frame_behind():
    """Abort while waiting, in the middle of the prompt, while drafts are verified, and after a preemption."""
    model = make(12, 12, 12, 12, page_size=4)
    full = [12, 12, 12, 12]

    def kept():
        stats = model.cache.stats()
        return [free + cached for free, cached in zip(stats.free_frames, stats.cached_frames, strict=True)]

    for round_ in range(30):
        prompt = text(90, round_ % 3)
        model.add(0, prompt)
        model.free(0)
        assert kept() == full
        hit = model.add(0, prompt)
        model.extend(0, prompt[hit : hit + 50 - round_])
        model.commit(0, hit + 10)
        model.free(0)
        assert kept() == full
        put(model, 0, prompt)
        model.extend(0, [8] * 5)
        model.truncate(0, 92)
        model.extend(0, [9] * 5)
        model.free(0)
        assert kept() == full
        put(model, 0, prompt)
        model.free(0)
        put(model, 0, prompt)
        model.fork(0, 1)
        model.extend(1, [6] * 3)
        model.free(0)
        model.free(1)
        assert kept() == full
        model.check()

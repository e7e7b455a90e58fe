"""The integer cache by example: placement, growth, capacity, truncation, forks, tables, and explicit layouts."""

import random
from unittest import mock

import numpy as np
import pytest
from cache_model import CacheModel
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distdec.cache import CacheFull, CacheLayout, KVCache, View


def make(*num_frames, **fields):
    return KVCache(CacheLayout(num_frames, **{"min_chunk": 4, "max_chunk": 32, "page_size": 4, **fields}))


def loads(cache, seq_id):
    return [cache.local_length(seq_id, rank) for rank in range(cache.layout.num_ranks)]


def test_a_sequence_goes_round_the_ranks_in_views():
    cache = make(8, 8, 8)
    cache.add(7)
    cache.extend(7, 14)
    assert cache.views(7) == [View(0, 0, 0, 4, 0), View(1, 0, 0, 4, 4), View(2, 0, 0, 4, 8), View(0, 1, 0, 2, 12)]
    cache.extend(7, 1)
    assert cache.views(7)[3] == View(0, 1, 0, 3, 12), "the last view grows in place"
    assert cache.local_view_table(7, 0).tolist() == [[0, 4, 0], [4, 3, 12]]
    assert cache.slots(7, 2, 15, 0).tolist() == [2, 3, -1, -1, -1, -1, -1, -1, -1, -1, 4, 5, 6]
    assert cache.length(7) == 15


def test_ties_go_to_the_rank_with_the_least_total_load_then_to_the_lowest():
    cache = make(8, 8, 8)
    for seq_id, count in ((0, 3), (1, 2), (2, 4)):
        cache.add(seq_id)
        cache.extend(seq_id, count)
    assert [cache.views(seq_id)[0].kvp_rank for seq_id in range(3)] == [0, 1, 2]
    cache.add(3)
    cache.extend(3, 9)
    # totals are 3, 2, 4: rank 1 first, then those without a token of this sequence by total
    assert [view.kvp_rank for view in cache.views(3)] == [1, 0, 2]


def test_total_loads_are_weighted_too():
    cache = make(8, 8, weights=(3, 1))
    for seq_id, count in enumerate((4, 4, 1, 1)):
        cache.add(seq_id)
        cache.extend(seq_id, count)
    # the last one finds totals of 5 and 4, and 5 / 3 < 4 / 1
    assert [cache.views(seq_id)[0].kvp_rank for seq_id in range(4)] == [0, 1, 0, 0]


def test_weighted_ties_compare_exactly():
    cache = make(99, 99, weights=(2**40 + 1, 2**40), max_chunk=4)
    cache.add(0)
    cache.extend(0, 12)
    # 4 / (2**40 + 1) < 4 / 2**40 by one part in 10**12
    assert [view.kvp_rank for view in cache.views(0)] == [0, 1, 0]


def test_a_full_rank_is_skipped_and_every_frame_is_used():
    cache = make(1, 5, 0)
    cache.add(0)
    cache.extend(0, 24)
    assert loads(cache, 0) == [4, 20, 0]
    with pytest.raises(CacheFull, match="rank 1: 0 free, 0 cached, 0 spare of 5"):
        cache.extend(0, 1)


@given(
    slices=st.lists(st.integers(1, 90), min_size=1, max_size=8),
    weights=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    home=st.sampled_from([0, 3, 40, 100]),
    sequences=st.integers(1, 3),
)
@example(slices=[90] * 8, weights=[1], home=0, sequences=3)
@example(slices=[90] * 8, weights=[7, 1], home=0, sequences=3)
@settings(max_examples=150, deadline=None)
def test_loads_stay_within_the_stated_bounds(slices, weights, home, sequences):
    # one rank can hold all 2,184 tokens of the longest example: where a pool runs full, tokens go to other ranks
    cache = make(*[600] * len(weights), weights=tuple(weights), shard_min_tokens=home)
    for seq_id in range(sequences):
        cache.add(seq_id)
    slack = max(32, cache.layout.home_tokens)
    for count in slices:
        for seq_id in range(sequences):
            cache.extend(seq_id, count + seq_id)
            length, held = cache.length(seq_id), loads(cache, seq_id)
            if length <= home:
                assert sorted(held)[:-1] == [0] * (len(weights) - 1), "short sequences stay on one rank"
            for load, weight in zip(held, weights, strict=True):
                assert (load - min(length, slack)) * sum(weights) <= weight * length
            if not home and len(set(weights)) == 1:
                assert max(held) - min(held) <= 32
        lengths = [cache.length(seq_id) for seq_id in range(sequences)]
        for total, weight in zip(cache.stats().tokens, weights, strict=True):
            allowed = sum(min(length, slack) for length in lengths)
            assert (total - allowed) * sum(weights) <= weight * sum(lengths)


def test_prefill_in_slices_places_as_prefill_at_once():
    whole, sliced = make(40, 50, 60), make(40, 50, 60)
    whole.add(0)
    sliced.add(0)
    whole.extend(0, 500)
    for count in (1, 130, 3, 0, 200, 166):
        sliced.extend(0, count)
    assert whole.views(0) == sliced.views(0)


@pytest.mark.parametrize("length", [1, 4, 5, 63, 64, 65, 257, 1000])
def test_what_is_reserved_ahead_is_below_a_quarter(length):
    cache = make(200, 200)
    cache.add(0)
    cache.extend(0, length)
    stats = cache.stats()
    reserved = 4 * (sum(stats.used_frames) + sum(stats.spare_frames))
    assert reserved - length < max(4, min(32, length / 4))
    assert stats.internal_waste == pytest.approx(1 - length / (4 * -(-length // 4)))


def test_frames_reserved_ahead_serve_others_when_nothing_else_is_left():
    cache = make(24)
    cache.add(0)
    cache.extend(0, 65)
    # 16 frames full, and one token in a chunk of 4 frames; 4 frames free
    assert cache.stats().spare_frames == (3,)
    cache.add(1)
    assert cache.can_extend([(1, 28)])
    assert not cache.can_extend([(1, 29)])
    cache.extend(1, 28)
    cache.check_integrity()
    assert cache.stats().spare_frames == (0,)
    cache.extend(0, 3)
    assert cache.views(0)[-1].length == 4, "the frame that it is in is still its own"
    with pytest.raises(CacheFull):
        cache.extend(0, 1)


def test_admission_may_ask_for_a_sequence_that_is_not_there_yet():
    cache = make(2, 1)
    cache.add(0)
    cache.extend(0, 5)
    before = cache.stats()
    # frames of 4: two of the three are taken
    assert cache.can_extend([(0, 3), (7, 4)])
    assert not cache.can_extend([(0, 4), (7, 4)])
    assert cache.stats() == before
    assert cache.sequences() == [0]
    with pytest.raises(KeyError):
        cache.extend(7, 4)


def test_a_step_is_checked_as_a_whole():
    cache = make(2, 1)
    for seq_id in range(3):
        cache.add(seq_id)
    assert cache.can_extend([(0, 4), (1, 1), (2, 1)])
    assert not cache.can_extend([(0, 5), (1, 1), (2, 1)])
    assert not cache.can_extend([(0, 3), (1, 1), (2, 1), (0, 2)]), "two rows of one sequence add up"
    with pytest.raises(CacheFull, match=r"7 more tokens for 3 sequence.* need 4 frames of 4 tokens, 3 are available"):
        cache.raise_full([(0, 5), (1, 1), (2, 1)])


def test_a_refused_extension_changes_nothing():
    cache = make(2, 2)
    cache.add(0)
    cache.extend(0, 6)
    before = cache.stats(), cache.views(0)
    with pytest.raises(CacheFull) as error:
        cache.extend(0, 11)
    assert (error.value.needed, error.value.available) == (3, 2)
    assert (cache.stats(), cache.views(0)) == before
    cache.check_integrity()
    cache.extend(0, 10)


def test_truncation_gives_frames_back_and_the_slots_are_written_again():
    cache = make(8, 8)
    cache.add(0)
    cache.extend(0, 30)
    long = cache.views(0)
    cache.truncate(0, 6)
    assert cache.views(0) == [View(0, 0, 0, 4, 0), View(1, 0, 0, 2, 4)]
    assert cache.local_view_table(0, 1).tolist() == [[0, 2, 4]]
    assert sum(cache.stats().used_frames) == 2
    cache.extend(0, 24)
    assert cache.views(0) == long
    cache.truncate(0, 0)
    assert cache.views(0) == []
    assert cache.local_view_table(0, 0).shape == (0, 3)
    assert cache.stats().free_frames == (8, 8)


def test_a_fork_copies_nothing_and_both_go_on_in_new_chunks():
    cache = make(9, 9)
    cache.add(0)
    cache.extend(0, 6)
    cache.fork(0, 1)
    assert cache.views(1) == cache.views(0)
    assert sum(cache.stats().used_frames) == 2
    cache.extend(0, 1)
    cache.extend(1, 1)
    assert cache.views(0)[:2] == cache.views(1)[:2]
    places = {cache.views(0)[2][:2], cache.views(1)[2][:2]}
    assert len(places) == 2
    assert not places & {view[:2] for view in cache.views(0)[:2]}
    cache.free(0)
    cache.check_integrity()
    assert cache.length(1) == 7
    cache.free(1)
    assert cache.stats().free_frames == (9, 9)


def test_a_fork_does_not_keep_what_was_reserved_ahead():
    cache = make(40)
    cache.add(0)
    cache.extend(0, 129)
    assert cache.stats().spare_frames == (7,)
    cache.fork(0, 1)
    assert cache.stats().spare_frames == (0,)
    assert cache.stats().free_frames == (7,)


def test_a_home_boundary_inside_a_frame_keeps_the_bound():
    cache = make(99, 99, max_chunk=4, shard_min_tokens=8)
    cache.add(0)
    cache.extend(0, 7)
    cache.fork(0, 1)
    cache.extend(1, 9)
    # position 7 opens a chunk at home, which ends with token 8 although it has room
    assert [view[0] for view in cache.views(1)] == [0, 0, 0, 1, 1]
    assert [view.length for view in cache.views(1)] == [4, 3, 1, 4, 4]
    cache.check_integrity()


def test_appending_touches_one_entry_of_one_table():
    cache = make(64, 64)
    cache.add(0)
    cache.extend(0, 100)
    tables = [cache.local_view_table(0, rank) for rank in range(2)]
    before = [table.copy() for table in tables]
    cache.extend(0, 1)
    for rank, table in enumerate(tables):
        assert np.shares_memory(cache.local_view_table(0, rank), table), "no copy from step to step"
    changed = [np.argwhere(new != old) for new, old in zip(tables, before, strict=True)]
    assert sorted(len(places) for places in changed) == [0, 1]
    for table in tables:
        with pytest.raises(ValueError, match="read-only"):
            table[0, 0] = 1


def test_a_table_ends_with_the_view_before_when_its_last_one_goes():
    cache = make(64, 64, max_chunk=4)
    cache.add(0)
    cache.extend(0, 4)
    first = [cache.local_view_table(0, rank).tolist() for rank in range(2)]
    cache.extend(0, 14)
    cache.truncate(0, 3)
    cache.extend(0, 1)
    assert [cache.local_view_table(0, rank).tolist() for rank in range(2)] == first
    assert cache.slots(0, 0, 4, 0).tolist() == [0, 1, 2, 3]
    cache.check_integrity()


@pytest.mark.parametrize("home", [0, 10])
def test_a_step_inside_frames_does_what_filling_does(home):
    rng = random.Random(7)
    layout = CacheLayout((90, 60), min_chunk=4, max_chunk=16, page_size=2, weights=(3, 2), shard_min_tokens=home)
    caches = [KVCache(layout) for _ in range(2)]
    for seq_id in range(6):
        for cache in caches:
            cache.add(seq_id)
    for step in range(300):
        rows = [(seq_id, rng.choice((0, 1, 1, 1, 2, 5))) for seq_id in rng.sample(range(6), 4)]
        cut = [(seq_id, max(0, caches[0].length(seq_id) - rng.randrange(12))) for seq_id in rng.sample(range(6), 2)]
        for slow, cache in enumerate(caches):
            if slow:
                # every row goes the long way
                with mock.patch.object(cache._placer, "grow", lambda seqs, counts, c=cache: fill_all(c, seqs, counts)):
                    cache.extend_all(rows)
            else:
                cache.extend_all(rows)
            for seq_id, length in cut:
                cache.truncate(seq_id, length)
            if step % 25 == 24:
                cache.free(step // 25 % 6)
                cache.fork((step // 25 + 1) % 6, step // 25 % 6)
            cache.check_integrity()
        for seq_id in range(6):
            assert caches[0].views(seq_id) == caches[1].views(seq_id)
            assert all(
                (caches[0].local_view_table(seq_id, r) == caches[1].local_view_table(seq_id, r)).all() for r in range(2)
            )
        assert caches[0].stats() == caches[1].stats()


def fill_all(cache, seqs, counts):
    for seq, count in zip(seqs, counts, strict=True):
        cache._placer._fill(seq, count, None)


def test_slots_are_int64_and_checked():
    cache = make(8, 8)
    cache.add(0)
    cache.extend(0, 5)
    assert cache.slots(0, 0, 5, 1).dtype == np.int64
    assert cache.slots(0, 5, 5, 0).shape == (0,)
    for start, stop in ((-1, 2), (3, 2), (0, 6)):
        with pytest.raises(ValueError, match=f"got {start} and {stop}"):
            cache.slots(0, start, stop, 0)


def test_misuse_is_refused():
    cache = make(8, 8)
    cache.add(0)
    with pytest.raises(ValueError, match="already"):
        cache.add(0)
    with pytest.raises(ValueError, match="already"):
        cache.fork(0, 0)
    with pytest.raises(ValueError, match="got -1"):
        cache.extend(0, -1)
    with pytest.raises(ValueError, match="from 0 to 0, got 1"):
        cache.truncate(0, 1)
    for call in (cache.length, cache.free, cache.views):
        with pytest.raises(KeyError, match="sequence 5 is not in the cache"):
            call(5)


def test_a_long_sequence_has_few_views():
    cache = KVCache(CacheLayout((2000,) * 8))
    cache.add(0)
    cache.extend(0, 1_000_000)
    assert len(cache.views(0)) < 1_000_000 / 1024 + 25
    assert max(loads(cache, 0)) - min(loads(cache, 0)) <= 1024
    cache.check_integrity()


# what follows sets explicit layouts: token -> rank by interleave, and recounts from the view tables


def interleaved(num_ranks, interleave, length, min_chunk=1, **fields):
    frames = length // min_chunk + 64
    layout = CacheLayout((frames,) * num_ranks, min_chunk=min_chunk, max_chunk=8 * min_chunk, page_size=1, **fields)
    return KVCache(layout, placement=lambda seq_id, position: position // interleave % num_ranks)


def closed_form(length, rank, num_ranks, interleave):
    """Tokens of rank `rank` among the first `length`, dealt `interleave` at a time."""
    rounds, rest = divmod(length, num_ranks * interleave)
    return rounds * interleave + min(max(rest - rank * interleave, 0), interleave)


def visible(cache, seq_id, rank, position):
    """Tokens of a rank that a query at `position` may see, recounted from the view table."""
    return sum(min(length, max(0, position + 1 - start)) for _, length, start in cache.local_view_table(seq_id, rank))


@pytest.mark.parametrize("interleave", [1, 4, 16])
@pytest.mark.parametrize("piece", [1024, 1000])
def test_local_lengths_add_up_in_every_piece_of_a_long_context(interleave, piece):
    cache = interleaved(4, interleave, 10_000)
    cache.add(0)
    while cache.length(0) < 10_000:
        cache.extend(0, min(piece, 10_000 - cache.length(0)))
        length = cache.length(0)
        assert loads(cache, 0) == [closed_form(length, rank, 4, interleave) for rank in range(4)]
        assert sum(cache.local_view_table(0, rank)[:, 1].sum() for rank in range(4)) == length
    cache.check_integrity()


def test_context_and_query_tokens_are_counted_apart():
    cache = interleaved(3, 4, 300)
    cache.add(0)
    cache.extend(0, 37)
    cache.extend(0, 5)
    assert loads(cache, 0) == [closed_form(42, rank, 3, 4) for rank in range(3)]
    for length in range(1, 201):
        cache.add(length)
        cache.extend(length, length)
        assert loads(cache, length) == [closed_form(length, rank, 3, 4) for rank in range(3)]
        cache.free(length)


def test_bounds_of_several_query_tokens_come_from_global_positions():
    cache = interleaved(2, 1, 64)
    cache.add(0)
    cache.extend(0, 10)
    assert [visible(cache, 0, 1, position) for position in (7, 8, 9)] == [4, 4, 5]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("interleave", [1, 16])
def test_bounds_equal_the_closed_form_at_every_length(num_ranks, interleave):
    cache = interleaved(num_ranks, interleave, 600)
    cache.add(0)
    cache.extend(0, 600)
    for rank in range(num_ranks):
        table = cache.local_view_table(0, rank)
        positions = np.concatenate([np.arange(start, start + length) for _, length, start in table.tolist()])
        counts = np.searchsorted(positions, np.arange(600), side="right")
        assert counts.tolist() == [closed_form(position + 1, rank, num_ranks, interleave) for position in range(600)]


def test_sequences_shorter_than_a_round_leave_ranks_empty():
    cache = interleaved(8, 16, 200)
    for length in range(1, 7 * 16 + 2):
        cache.add(length)
        cache.extend(length, length)
        held = loads(cache, length)
        assert held == [closed_form(length, rank, 8, 16) for rank in range(8)]
        for rank in range(8):
            table = cache.local_view_table(length, rank)
            assert (len(table) > 0) == (held[rank] > 0)
            assert (cache.slots(length, 0, length, rank) >= 0).sum() == held[rank]
        cache.free(length)
        cache.check_integrity()


def test_slots_stay_inside_the_rank_however_much_was_allocated_before():
    model = CacheModel(CacheLayout((64,) * 4, min_chunk=1, max_chunk=8, page_size=4))
    cumulative = 0
    for seq_id in range(40):
        model.add(seq_id)
        assert model.extend(seq_id, [seq_id] * 37)
        cumulative += 37
        for rank in range(4):
            slots = model.cache.slots(seq_id, 0, 37, rank)
            assert slots.max() < 64, f"after {cumulative} tokens"
        if seq_id >= 3:
            model.free(seq_id - 3)
        model.check()
    assert cumulative > 5 * 256
    model.drain()


def test_a_hook_that_fills_one_rank_is_refused_by_its_own_numbers():
    cache = KVCache(CacheLayout((8, 2), min_chunk=2, max_chunk=4, page_size=2), placement=lambda seq_id, position: 1)
    cache.add(0)
    cache.extend(0, 3)
    assert cache.can_extend([(0, 1)])
    assert not cache.can_extend([(0, 2)])
    with pytest.raises(CacheFull, match="need 1 frames of 2 tokens, 0 are available"):
        cache.extend(0, 2)
    bad = KVCache(cache.layout, placement=lambda seq_id, position: 2)
    bad.add(0)
    with pytest.raises(ValueError, match="from 0 to 1, got 2"):
        bad.extend(0, 1)

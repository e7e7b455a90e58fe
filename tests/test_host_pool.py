"""Sequences that leave the cache for host memory and come back: the books alone, then with the bytes of each rank."""

import random

import numpy as np
import pytest
import torch

from distdec.cache import CacheFull, CacheLayout, KVCache
from distdec.cache.parking import MoveKind, Parking
from distdec.cache.pool import KVPool
from distdec.host_pool import HostPool

FRAME = 4


def make(num_frames=(12, 9, 14), host_frames=20, **fields):
    """Return a cache and the books of each rank over it; the others' books are asked for their slots only."""
    cache = KVCache(CacheLayout(num_frames, min_chunk=FRAME, max_chunk=2 * FRAME, page_size=2, **fields))
    return cache, Parking(cache, 0, host_frames)


def grow(cache, seq_id, count):
    if seq_id not in cache.sequences():
        cache.add(seq_id)
    cache.extend(seq_id, count)


@pytest.mark.parametrize("home", [0, 10])
def test_a_sequence_comes_back_to_the_ranks_it_left(home):
    cache, parking = make(shard_min_tokens=home)
    for seq_id, count in enumerate((29, 17, 6)):
        grow(cache, seq_id, count)
    before = [cache.origin(seq_id).runs for seq_id in range(3)]
    lengths = [[cache.local_length(seq_id, rank) for rank in range(3)] for seq_id in range(3)]
    parking.park(0)
    assert 0 in parking
    assert cache.sequences() == [1, 2]
    # others take its slots meanwhile
    grow(cache, 1, 7)
    grow(cache, 3, 21)
    assert parking.can_return(0, 1, [])
    parking.bring_back(0)
    cache.check_integrity()
    assert cache.origin(0).runs == before[0]
    assert [cache.local_length(0, rank) for rank in range(3)] == lengths[0]
    assert parking.frames == [0, 0, 0]
    cache.extend(0, 5)
    for seq_id in (0, 1, 2, 3):
        cache.free(seq_id)
    cache.check_integrity()
    assert cache.stats().free_frames == (12, 9, 14)


def test_whether_it_can_come_back_is_exact():
    """Whenever the answer is yes all the tokens asked for fit; whenever it is no, frames were missing."""
    told = {True: 0, False: 0}
    for seed in range(300):
        draw = random.Random(seed)
        cache, parking = make((draw.randint(3, 8), draw.randint(3, 8)), shard_min_tokens=draw.choice((0, 0, 7)))
        grow(cache, 0, draw.randint(1, 20))
        parking.park(0)
        for seq_id in (1, 2):
            cache.add(seq_id)
            room = max(count for count in range(41) if cache.can_extend([(seq_id, count)]))
            cache.extend(seq_id, draw.randint(0, room))
        more, other = draw.randint(0, 9), draw.randint(0, 5)
        can = parking.can_return(0, more, [(1, other)])
        told[can] += 1
        try:
            parking.bring_back(0)
            cache.extend_all([(0, more), (1, other)])
        except CacheFull:
            assert not can
        else:
            assert can
        cache.check_integrity()
    assert min(told.values()) > 50


def test_pages_go_on_behind_those_published_before():
    cache, parking = make()
    text = list(range(100, 123))
    grow(cache, 0, 23)
    cache.commit_pages(0, text[:12])
    parking.park(0)
    cache.check_integrity()
    parking.bring_back(0)
    cache.commit_pages(0, text[12:], 12)
    cache.check_integrity()
    assert cache.match([*text, 0]).num_tokens == 22
    cache.free(0)
    cache.check_integrity()


def test_the_host_takes_no_more_than_its_frames_and_drops_give_them_back():
    cache, parking = make((20,), host_frames=5)
    for seq_id, count in enumerate((9, 8, 5)):
        grow(cache, seq_id, count)
    parking.park(0)
    assert parking.frames == [3]
    parking.park(1)
    assert not parking.has_room(2)
    with pytest.raises(ValueError, match="5 frames a rank do not hold it"):
        parking.park(2)
    parking.drop(1)
    assert 1 not in parking
    parking.park(2)
    assert parking.frames == [5]
    assert [(move.kind, move.seq_id, len(move.slots)) for move in parking.take_moves()] == [
        (MoveKind.OUT, 0, 9),
        (MoveKind.OUT, 1, 8),
        (MoveKind.DROP, 1, 0),
        (MoveKind.OUT, 2, 5),
    ]
    assert parking.take_moves() == []


def test_a_rank_without_frames_refuses_and_nothing_changes():
    cache, parking = make((4, 4))
    grow(cache, 0, 16)
    parking.park(0)
    grow(cache, 1, 21)
    stats = cache.stats()
    with pytest.raises(CacheFull, match="frames of rank"):
        parking.bring_back(0)
    assert cache.stats() == stats
    assert 0 in parking
    parking.cache.free(1)
    parking.bring_back(0)
    with pytest.raises(ValueError, match="sequence 0 is in the cache already"):
        cache.place(0, cache.origin(0))


def ranks_with_pools(num_frames, host_frames):
    """Return each rank's cache, pool (unused slots hold NaN) and host pool; keys are 2 heads of 3, values of 5."""
    ranks = []
    for rank in range(len(num_frames)):
        cache = KVCache(CacheLayout(num_frames, min_chunk=FRAME, max_chunk=2 * FRAME, page_size=2))
        pool = KVPool(2, num_frames[rank] * FRAME, 2, 3, torch.float32, "cpu", v_head_dim=5, poison=True)
        # 2 layers x 4 tokens x 2 heads x 8 numbers of 4 bytes
        ranks.append((cache, pool, HostPool(cache, pool, rank, host_frames * 512 + 511)))
    return ranks


def write(ranks, seq_id, start, stop):
    """Store what is told by sequence, position and layer; no token has another one's numbers."""
    for rank, (cache, pool, _) in enumerate(ranks):
        slots = cache.slots(seq_id, start, stop, rank)
        for position in np.flatnonzero(slots >= 0).tolist():
            value = 1000.0 * seq_id + start + position
            for layer in range(2):
                pool.k[layer, slots[position]] = value + 0.25 * layer
                pool.v[layer, slots[position]] = -value - 0.25 * layer


def check(ranks, seq_id):
    for rank, (cache, pool, _) in enumerate(ranks):
        slots = cache.slots(seq_id, 0, cache.length(seq_id), rank)
        positions = np.flatnonzero(slots >= 0)
        value = torch.from_numpy(1000.0 * seq_id + positions).float()[:, None, None]
        for layer in range(2):
            mine = torch.from_numpy(slots[positions])
            assert (pool.k[layer][mine] == value + 0.25 * layer).all(), (rank, seq_id)
            assert (pool.v[layer][mine] == -value - 0.25 * layer).all(), (rank, seq_id)


@pytest.mark.parametrize("num_frames", [(30,), (17, 14), (9, 14, 11)])
def test_bytes_survive_random_histories_on_every_rank(num_frames):
    """Sequences grow, leave, come back, end here or there, several of it before the copies are made."""
    ranks, draw, next_id, returned = ranks_with_pools(num_frames, 8), random.Random(7), 0, 0
    cache, _, host = ranks[0]
    for _ in range(400):
        grown = []
        for _ in range(draw.randint(1, 4)):
            live = cache.sequences()
            parked = [seq_id for seq_id in range(next_id) if seq_id in host.parking]
            what = draw.choice(("new", "grow", "grow", "park", "back", "back", "end", "drop"))
            if what == "new" and cache.can_extend([(next_id, count := draw.randint(1, 30))]):
                for each, _, _ in ranks:
                    grow(each, next_id, count)
                grown.append((next_id, 0, count))
                next_id += 1
            # a plan frees and admits before its rows store anything
            elif grown:
                break
            elif what == "grow" and live and cache.can_extend([(seq_id := draw.choice(live), 3)]):
                start = cache.length(seq_id)
                for each, _, _ in ranks:
                    each.extend(seq_id, 3)
                grown.append((seq_id, start, start + 3))
            elif what == "park" and live and host.parking.has_room(seq_id := draw.choice(live)):
                for _, _, each in ranks:
                    each.parking.park(seq_id)
            elif what == "back" and parked and host.parking.can_return(seq_id := draw.choice(parked), 0, []):
                for _, _, each in ranks:
                    each.parking.bring_back(seq_id)
                returned += 1
            elif what == "end" and live and draw.random() < 0.5:
                seq_id = draw.choice(live)
                for each, _, _ in ranks:
                    each.free(seq_id)
            elif what == "drop" and parked and draw.random() < 0.3:
                seq_id = draw.choice(parked)
                for _, _, each in ranks:
                    each.parking.drop(seq_id)
        for rank, (_, _, each) in enumerate(ranks):
            each.carry()
            assert each.frames_held == host.parking.frames[rank]
            assert each.parking.frames == host.parking.frames
        for seq_id, start, stop in grown:
            write(ranks, seq_id, start, stop)
        for seq_id in cache.sequences():
            check(ranks, seq_id)
        cache.check_integrity()
    assert returned > 20


def test_a_limit_below_one_frame_is_refused():
    cache = KVCache(CacheLayout((4,), min_chunk=FRAME, max_chunk=FRAME, page_size=2))
    pool = KVPool(2, 16, 2, 3, torch.float32, "cpu", v_head_dim=5)
    with pytest.raises(ValueError, match=r"cache.host_gb gives 511 bytes, and one frame of cache.min_chunk=4 .* 512"):
        HostPool(cache, pool, 0, 511)

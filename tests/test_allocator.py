"""The buddy allocator: any free frame is usable, buddies join, the books add up."""

import random

import pytest

from distdec.cache.allocator import CacheCorrupt, ChunkAllocator
from distdec.cache.layout import CacheLayout, Chunk


def make(*num_frames, max_frames=8):
    return ChunkAllocator(CacheLayout(num_frames, min_chunk=4, max_chunk=4 * max_frames))


def test_chunks_are_aligned_and_low_addresses_go_first():
    allocator = make(20, 16)
    assert allocator.allocate(0, 8) == Chunk(0, 0, 8)
    assert allocator.allocate(0, 1) == Chunk(0, 16, 1)
    assert allocator.allocate(0, 2) == Chunk(0, 18, 2)
    assert allocator.allocate(1, 4) == Chunk(1, 0, 4)
    allocator.check_integrity()


def test_allocation_falls_back_to_the_largest_smaller_block():
    allocator = make(7)
    assert [allocator.allocate(0, 8).num_frames for _ in range(3)] == [4, 2, 1]
    with pytest.raises(MemoryError, match="kvp rank 0"):
        allocator.allocate(0, 1)


def test_every_free_frame_is_usable_after_any_history():
    rng = random.Random(5)
    allocator = make(37, 8)
    held = []
    for _ in range(3000):
        if rng.random() < 0.55 and allocator.free_frames(0):
            held.append(allocator.allocate(0, rng.choice([1, 2, 4, 8])))
        elif held:
            allocator.release(held.pop(rng.randrange(len(held))))
        allocator.check_integrity()
    while allocator.free_frames(0):
        held.append(allocator.allocate(0, 8))
    assert sum(chunk.num_frames for chunk in held) == 37
    for chunk in held:
        allocator.release(chunk)
    assert allocator.free_frames(0) == 37
    assert allocator.fragmentation(0).free_blocks == (1, 0, 1, 4)


def test_buddies_join_in_any_order_of_freeing():
    for seed in range(20):
        allocator = make(64)
        held = [allocator.allocate(0, 1) for _ in range(64)]
        random.Random(seed).shuffle(held)
        for chunk in held:
            allocator.release(chunk)
        assert allocator.fragmentation(0).free_blocks == (0, 0, 0, 8)
        assert allocator.fragmentation(0).external == 0.0


def test_trim_gives_back_the_tail_alone():
    allocator = make(16)
    chunk = allocator.allocate(0, 8)
    chunk = allocator.trim(chunk, 3)
    assert chunk == Chunk(0, 0, 3)
    assert allocator.free_frames(0) == 13
    assert allocator.fragmentation(0).free_blocks == (1, 0, 1, 1)
    allocator.check_integrity()
    allocator.release(chunk)
    assert allocator.fragmentation(0).free_blocks == (0, 0, 0, 2)
    allocator.check_integrity()


def test_references_are_counted():
    allocator = make(8)
    chunk = allocator.allocate(0, 2)
    allocator.retain(chunk)
    assert allocator.references(chunk) == 2
    assert not allocator.release(chunk)
    assert allocator.release(chunk)
    with pytest.raises(ValueError, match="not held"):
        allocator.release(chunk)


def test_fragmentation_tells_scattered_from_whole():
    allocator = make(32)
    held = [allocator.allocate(0, 1) for _ in range(32)]
    for chunk in held[::2]:
        allocator.release(chunk)
    # 16 frames free, two blocks of 8 possible, none there
    assert allocator.fragmentation(0).external == 1.0
    for chunk in held[1:16:2]:
        allocator.release(chunk)
    assert allocator.fragmentation(0).free_frames == 24
    assert allocator.fragmentation(0).external == pytest.approx(1 / 3)


def test_frame_and_chunk_may_be_the_same():
    allocator = make(3, max_frames=1)
    assert [allocator.allocate(0, 1).frame for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"\[1\]"):
        allocator.allocate(0, 2)


def test_bad_sizes_are_refused():
    allocator = make(8)
    for size in (0, 3, 16, -1):
        with pytest.raises(ValueError, match=f"got {size}"):
            allocator.allocate(0, size)
    with pytest.raises(ValueError, match="got 0"):
        allocator.trim(allocator.allocate(0, 4), 0)


def test_the_check_sees_a_lost_frame_and_a_double_one():
    allocator = make(8)
    allocator.allocate(0, 1)
    allocator._held[0].clear()
    with pytest.raises(CacheCorrupt, match="rank 0"):
        allocator.check_integrity()
    allocator = make(8)
    allocator.allocate(0, 8)
    allocator._free[0][0][3] = None
    with pytest.raises(CacheCorrupt, match="rank 0"):
        allocator.check_integrity()

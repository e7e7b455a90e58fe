"""The cache under sustained load: it refuses only when the frames have run out, and gives all of them back."""

import random

import pytest

from distdec.cache import CacheFull, CacheLayout, KVCache


def frames_held(lengths, min_chunk):
    return sum(-(-length // min_chunk) for length in lengths)


def run(operations, num_frames, min_chunk, max_chunk, shard_min_tokens, seed):
    """Alloc, extend and free around a load of 95 percent; a recount of frames from the lengths alone is the judge."""
    rng = random.Random(seed)
    layout = CacheLayout(num_frames, min_chunk=min_chunk, max_chunk=max_chunk, shard_min_tokens=shard_min_tokens)
    cache = KVCache(layout)
    total = sum(num_frames)
    lengths = {}
    # frames held, by the lengths; kept by increments, recounted below
    held = refused = load = 0
    for number in range(operations):
        choice = rng.random()
        load += held
        if held > 0.97 * total and choice < 0.4:
            seq_id = rng.choice(list(lengths))
            held -= -(-lengths.pop(seq_id) // min_chunk)
            cache.free(seq_id)
        elif not lengths or choice < 0.3:
            seq_id = number
            cache.add(seq_id)
            lengths[seq_id] = 0
        elif choice < 0.9:
            seq_id = rng.choice(list(lengths))
        else:
            seq_id = rng.choice(list(lengths))
            cut = rng.randrange(lengths[seq_id] + 1)
            cache.truncate(seq_id, cut)
            held += -(-cut // min_chunk) - -(-lengths[seq_id] // min_chunk)
            lengths[seq_id] = cut
        if seq_id not in lengths:
            continue
        count = rng.choice((1, 1, rng.randint(1, 4096)))
        need = -(-(lengths[seq_id] + count) // min_chunk) - -(-lengths[seq_id] // min_chunk)
        if need <= total - held:
            cache.extend(seq_id, count)
            lengths[seq_id] += count
            held += need
        else:
            with pytest.raises(CacheFull) as error:
                cache.extend(seq_id, count)
            assert (error.value.needed, error.value.available) == (need, total - held)
            refused += 1
        if number % (operations // 10) == 0:
            assert held == frames_held(lengths.values(), min_chunk)
            assert sum(cache.stats().used_frames) == held
            cache.check_integrity()
    assert refused > operations // 100
    assert load / operations > 0.95 * total * (1 - 1000 / operations)
    stats = cache.stats()
    assert stats.internal_waste == pytest.approx(1 - sum(lengths.values()) / (held * min_chunk))
    assert 0.0 <= stats.external_fragmentation <= 1.0
    for seq_id in lengths:
        cache.free(seq_id)
    cache.check_integrity()
    assert cache.stats().free_frames == num_frames
    assert cache.stats().external_fragmentation == 0.0
    return stats


def test_a_hundred_thousand_operations_at_full_load_are_refused_only_when_frames_run_out():
    run(100_000, (300, 300, 256, 301), 128, 1024, 0, seed=1)


@pytest.mark.parametrize("fields", [(16, 16, 0), (1, 8, 0), (64, 1024, 2000)])
def test_load_with_other_chunks(fields):
    run(3_000, (1000, 700, 900), *fields, seed=2)

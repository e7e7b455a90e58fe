"""A step's tables say exactly which tokens a rank holds, where, and which of them a window can reach."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distdec.batch import StepBuffers
from distdec.cache.kv_cache import KVCache
from distdec.cache.layout import CacheLayout
from distdec.ops.backends import get_backend
from distdec.row_tables import Padding

WINDOWS = (0, 5, 40)


def grown_cache(lens, ranks=3, seed=0, min_chunk=4, max_chunk=16):
    """A cache whose sequences grew in random order, so that their chunks are scattered and of every size."""
    layout = CacheLayout(num_frames=(400,) * ranks, min_chunk=min_chunk, max_chunk=max_chunk, page_size=2)
    kv = KVCache(layout)
    rng = random.Random(seed)
    left = dict(enumerate(lens))
    for seq in left:
        kv.add(seq)
    while any(left.values()):
        seq = rng.choice([s for s, n in left.items() if n])
        step = min(left[seq], rng.randint(1, 9))
        kv.extend(seq, step)
        left[seq] -= step
    return kv


def buffers_for(kv, rank, tile_tokens=6, **kwargs):
    backend = get_backend("reference", "cpu")
    made = StepBuffers(kv, rank, backend, windows=WINDOWS, **kwargs)
    made.tile_tokens = tile_tokens
    made._grow(*made._capacity, force=True)
    return made


def tokens_of(tables, row):
    """Recount (slot, position) pairs of a row from its tiles."""
    begin, end = tables.tile_ranges[row].tolist()
    pairs = []
    for slot, length, position, _ in tables.tile_table[begin:end].tolist():
        assert 1 <= length <= 6
        pairs += [(slot + i, position + i) for i in range(length)]
    return pairs


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_tiles_of_a_row_are_the_tokens_the_rank_holds(rank):
    lens = [33, 1, 130, 64, 7]
    counts = [1, 1, 1, 20, 7]
    kv = grown_cache(lens)
    batch = buffers_for(kv, rank).fill(list(enumerate(counts)))
    assert (batch.decode.num_rows, batch.decode.max_q_len) == (3, 1)
    assert (batch.prefill.num_rows, batch.prefill.first_token, batch.prefill.max_q_len) == (2, 3, 20)
    for row, length in enumerate(lens):
        slots = kv.slots(row, 0, length, rank)
        want = [(int(s), p) for p, s in enumerate(slots) if s >= 0]
        section, at = ("decode", row) if row < 3 else ("prefill", row - 3)
        assert tokens_of(batch.tables(section, 0), at) == want


def test_positions_and_slots_are_those_of_the_last_tokens():
    lens, counts = [33, 5, 130], [2, 2, 11]
    kv = grown_cache(lens)
    per_rank = [buffers_for(kv, rank).fill(list(enumerate(counts))) for rank in range(3)]
    want = [p for length, n in zip(lens, counts, strict=True) for p in range(length - n, length)]
    for rank, batch in enumerate(per_rank):
        assert batch.q_positions.tolist() == want
        expected = np.concatenate([kv.slots(s, lens[s] - counts[s], lens[s], rank) for s in range(3)])
        assert batch.slot_mapping.tolist() == expected.tolist()
    owners = torch.stack([b.slot_mapping >= 0 for b in per_rank]).sum(0)
    assert owners.tolist() == [1] * 15


@pytest.mark.parametrize("window", WINDOWS[1:])
def test_a_windows_tiles_hold_every_key_it_reaches_and_none_that_end_before(window):
    lens, counts = [90, 41, 6, 200], [3, 3, 3, 17]
    kv = grown_cache(lens, seed=2)
    for rank in range(3):
        batch = buffers_for(kv, rank).fill(list(enumerate(counts)))
        for row, (length, n) in enumerate(zip(lens, counts, strict=True)):
            reach = length - n - window + 1
            section, at = ("decode", row) if row < 3 else ("prefill", row - 3)
            pairs = tokens_of(batch.tables(section, window), at)
            everything = tokens_of(batch.tables(section, 0), at)
            assert [p for p in everything if p[1] >= reach] == [p for p in pairs if p[1] >= reach]
            begin, end = batch.tables(section, window).tile_ranges[at].tolist()
            for _, tile_len, position, _ in batch.tables(section, window).tile_table[begin:end].tolist():
                assert position + tile_len > reach


def test_cumulated_tiles_start_anew_in_each_section():
    kv = grown_cache([33, 64, 130, 9])
    batch = buffers_for(kv, 0).fill([(0, 1), (1, 1), (2, 12), (3, 5)])
    for section in ("decode", "prefill"):
        for window in WINDOWS:
            tables = batch.tables(section, window)
            spans = (tables.tile_ranges[:, 1] - tables.tile_ranges[:, 0]).tolist()
            assert tables.cum_tiles.tolist() == [0, spans[0], spans[0] + spans[1]]


def test_padding_rows_hold_nothing():
    kv = grown_cache([33, 64, 9])
    batch = buffers_for(kv, 1).fill([(0, 1), (1, 1), (2, 9)], pad=Padding(5))
    assert batch.num_tokens == 5 + 9
    assert batch.q_positions.tolist()[2:5] == [-1, -1, -1]
    assert batch.slot_mapping.tolist()[2:5] == [-1, -1, -1]
    ranges = batch.tables("decode", 0).tile_ranges
    assert (ranges[2:, 0] == ranges[2:, 1]).all()
    assert batch.q_positions.tolist()[5:] == list(range(9))


def test_addresses_stay_while_a_step_fits_and_growth_is_counted():
    kv = grown_cache([33, 64])
    buffers = buffers_for(kv, 0, max_tokens=4, max_rows=2, max_views=64)
    first = buffers.fill([(0, 1), (1, 1)])
    generation, address = buffers.generation, first.q_positions.data_ptr()
    kv.extend(0, 1)
    second = buffers.fill([(0, 1), (1, 1)])
    assert (buffers.generation, second.q_positions.data_ptr()) == (generation, address)
    assert second.q_positions.tolist() == [33, 63]
    kv.extend(0, 40)
    buffers.fill([(0, 40), (1, 1)])
    assert buffers.generation == generation + 1


def test_a_window_nobody_announced_is_refused():
    kv = grown_cache([9, 4])
    batch = buffers_for(kv, 0).fill([(0, 1), (1, 1)])
    with pytest.raises(ValueError, match=r"window 77 .* \[0, 5, 40\]"):
        batch.tables("decode", 77)


def test_a_step_without_rows_and_rows_without_tokens_are_legal():
    kv = grown_cache([9, 4])
    buffers = buffers_for(kv, 0)
    empty = buffers.fill([])
    assert (empty.num_tokens, empty.decode, empty.prefill) == (0, None, None)
    batch = buffers.fill([(0, 0), (1, 4)])
    assert batch.num_tokens == 4
    assert batch.prefill.num_rows == 2
    assert batch.prefill.q_indptr.tolist() == [0, 0, 4]


def tables_of(batch):
    """All that a step's tensors say, tiles in the order of the rows."""
    said = {"slots": batch.slot_mapping, "positions": batch.q_positions}
    for name, section in (("decode", batch.decode), ("prefill", batch.prefill)):
        if section is None:
            continue
        said[f"{name}/rows"] = torch.tensor(section[:4])
        said[f"{name}/indptr"] = section.q_indptr
        for window in WINDOWS:
            tables = batch.tables(name, window)
            said[f"{name}/{window}/ranges"] = tables.tile_ranges
            said[f"{name}/{window}/cum"] = tables.cum_tiles
            tiles = [tables.tile_table[begin:end] for begin, end in tables.tile_ranges.tolist()]
            said[f"{name}/{window}/tiles"] = torch.cat(tiles)
    return {name: tensor.tolist() for name, tensor in said.items()}


OPS = st.tuples(
    st.sampled_from(("decode", "decode", "decode", "draft", "prompt", "truncate", "fork", "preempt")),
    st.integers(0, 3),
    st.integers(1, 21),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OPS, min_size=1, max_size=25), st.integers(0, 1), st.integers(0, 1))
def test_tables_kept_from_step_to_step_are_those_of_fresh_buffers(ops, padded, hooked):
    layout = CacheLayout(num_frames=(200,) * 2, min_chunk=4, max_chunk=16, page_size=2)
    kv = KVCache(layout, placement=(lambda seq, position: position // 3 % 2) if hooked else None)
    for seq in range(4):
        kv.add(seq)
        kv.extend(seq, 3 + 7 * seq)
    kept = [buffers_for(kv, rank) for rank in range(2)]
    for op, seq, count in ops:
        rows = [(other, 1) for other in range(4) if other != seq]
        if op == "draft":
            rows = [(other, 1 + count % 4) for other in range(4)]
        elif op == "prompt":
            rows = [*rows, (seq, count)]
        elif op == "truncate":
            kv.truncate(seq, max(0, kv.length(seq) - count))
        elif op in ("fork", "preempt"):
            kv.free(seq)
            if op == "fork":
                kv.fork((seq + 1) % 4, seq)
            else:
                kv.add(seq)
        for other, more in rows:
            kv.extend(other, more)
        # a row's new tokens may be in its last view, or span several of them on both ranks
        q_len = rows[0][1] if op == "draft" else 1
        tokens = sum(more for _, more in rows[3:]) if op == "prompt" and count != q_len else 0
        pad = Padding(5, 3 if tokens else 0, tokens and tokens + 6) if padded else Padding()
        for rank in range(2):
            fresh = buffers_for(kv, rank).fill(rows, q_len=q_len, pad=pad)
            batch = kept[rank].fill(rows, q_len=q_len, pad=pad)
            assert tables_of(batch) == tables_of(fresh)
            slots = [kv.slots(other, kv.length(other) - more, kv.length(other), rank) for other, more in rows]
            real = batch.slot_mapping[batch.q_positions >= 0]
            assert real.tolist() == np.concatenate(slots).tolist()
    kv.check_integrity()


def test_a_padded_prefill_section_has_the_numbers_of_the_padding():
    kv = grown_cache([33, 64, 9, 12])
    batch = buffers_for(kv, 1).fill([(0, 1), (1, 1), (2, 9), (3, 4)], q_len=1, pad=Padding(3, 4, 20))
    assert batch.decode[:4] == (0, 3, 3, 1)
    assert batch.prefill[:4] == (3, 20, 4, 20)
    assert batch.prefill.q_indptr.tolist() == [0, 9, 13, 13, 13]
    assert batch.q_positions.tolist() == [32, 63, -1, *range(9), *range(8, 12), *[-1] * 7]
    assert (batch.slot_mapping[2], batch.slot_mapping[16:].tolist()) == (-1, [-1] * 7)
    ranges = batch.tables("prefill", 0).tile_ranges
    assert (ranges[2:, 0] == ranges[2:, 1]).all()
    for row, (seq, length) in enumerate(((2, 9), (3, 12))):
        slots = kv.slots(seq, 0, length, 1)
        assert tokens_of(batch.tables("prefill", 0), row) == [(int(s), p) for p, s in enumerate(slots) if s >= 0]


@pytest.mark.parametrize("pad", [Padding(), Padding(3, 2, 9, 4)], ids=["as it is", "padded"])
def test_decode_rows_are_filled_up_to_the_tokens_of_the_longest(pad):
    """Three tokens, one, and a slice of one token that is not asked for as a decode row."""
    lens, counts, q_len = [33, 64, 9], [3, 1, 1], pad.q_len if pad != Padding() else 3
    kv = grown_cache(lens)
    for rank in range(3):
        batch = buffers_for(kv, rank).fill(list(enumerate(counts)), q_len=q_len, num_decode=2, pad=pad)
        rows = max(2, pad.decode_rows)
        assert batch.decode[:4] == (0, rows * q_len, rows, q_len)
        assert batch.prefill[:3] == (rows * q_len, max(1, pad.prefill_tokens), max(1, pad.prefill_rows))
        want = [[30, 31, 32], [63], *[[]] * (rows - 2)]
        want = [position for row in want for position in (row + [-1] * q_len)[:q_len]] + [8]
        assert batch.q_positions.tolist() == (want + [-1] * 8)[: batch.num_tokens]
        slots = np.concatenate([kv.slots(seq, lens[seq] - counts[seq], lens[seq], rank) for seq in range(3)])
        assert batch.slot_mapping[batch.q_positions >= 0].tolist() == slots.tolist()
        assert (batch.slot_mapping[batch.q_positions < 0] == -1).all()
        assert batch.decode.q_indptr.tolist()[:3] == [0, q_len, 2 * q_len]
        for row, (seq, first) in enumerate(((0, 30), (1, 63))):
            held = [(int(s), p) for p, s in enumerate(kv.slots(seq, 0, lens[seq], rank)) if s >= 0]
            assert tokens_of(batch.tables("decode", 0), row) == held
            reach = [pair for pair in tokens_of(batch.tables("decode", 5), row) if pair[1] >= first - 4]
            assert reach == [pair for pair in held if pair[1] >= first - 4], "the first new token's window"


def test_a_padded_step_is_the_same_batch_whatever_its_rows_are():
    kv = grown_cache([33, 64, 9, 12, 90])
    buffers = buffers_for(kv, 0, max_tokens=64, max_rows=8, max_views=256)
    pad = Padding(3, 2, 24)
    first = buffers.fill([(0, 1), (1, 1), (2, 9), (3, 4)], q_len=1, pad=pad)
    held = [tensor.data_ptr() for tensor in (first.slot_mapping, first.q_positions, first.prefill.q_indptr)]
    assert buffers.fill([(4, 24)], q_len=1, pad=pad) is first
    buffers.fill([(0, 1)], q_len=1)
    again = buffers.fill([(4, 1), (0, 2)], q_len=1, pad=pad)
    assert [again.decode[:4], again.prefill[:4]] == [first.decode[:4], first.prefill[:4]]
    assert [tensor.data_ptr() for tensor in (again.slot_mapping, again.q_positions, again.prefill.q_indptr)] == held


@pytest.mark.parametrize("own_apart", [False, True])
@pytest.mark.parametrize("windows", [(0,), (0, 9)])
def test_buffers_kept_from_step_to_step_hold_what_new_ones_would(own_apart, windows):
    rng = random.Random(5)
    layout = CacheLayout((300, 200), min_chunk=4, max_chunk=16, page_size=2, weights=(3, 2))
    kv = KVCache(layout)
    backend = get_backend("reference", "cpu")
    how = {"windows": windows, "own_apart": own_apart, "max_tokens": 32, "max_rows": 8, "max_views": 256}
    kept = [StepBuffers(kv, rank, backend, **how) for rank in range(2)]
    ids = list(range(6))
    for seq_id in ids:
        kv.add(seq_id)
        kv.extend(seq_id, rng.randrange(1, 30))
    generations = [buffers.generation for buffers in kept]
    for _ in range(400):
        if rng.random() < 0.1:
            rng.shuffle(ids)
        if rng.random() < 0.1:
            kv.truncate(ids[0], rng.randrange(1, kv.length(ids[0]) + 1))
        if rng.random() < 0.05:
            kv.free(ids[1])
            kv.fork(ids[0], ids[1])
        counts = [1] * rng.choice((4, 4, 4, 4, 4, 6)) + [rng.randrange(2, 5)] * (rng.random() < 0.1)
        rows = list(zip(ids, counts, strict=False))
        kv.extend_all(rows)
        for rank, buffers in enumerate(kept):
            new = StepBuffers(kv, rank, backend, **how)
            found, expected = buffers.fill(rows), new.fill(rows)
            assert (found.slot_mapping.tolist(), found.q_positions.tolist()) == (
                expected.slot_mapping.tolist(),
                expected.q_positions.tolist(),
            )
            assert buffers.num_views.item() == new.num_views.item()
            used = int(new.num_views)
            assert torch.equal(buffers.view_table[:used], new.view_table[:used])
            for section in ("decode", "prefill"):
                ours, theirs = getattr(found, section), getattr(expected, section)
                assert (ours is None) == (theirs is None)
                if ours is None:
                    continue
                assert ours.q_indptr.tolist() == theirs.q_indptr.tolist()
                for window in windows:
                    one, other = found.tables(section, window), expected.tables(section, window)
                    assert torch.equal(one.tile_ranges, other.tile_ranges)
                    assert torch.equal(one[2], other[2])
    assert [buffers.generation for buffers in kept] == generations

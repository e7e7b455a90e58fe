"""Cutting views into tiles."""

import importlib

import pytest
import torch

from distdec.ops import spans
from distdec.ops.backends import get_backend
from distdec.ops.tables import KVTables

IMPLEMENTATIONS = ["reference", "triton"]


def expected(views: list[list[int]], tile: int) -> dict[int, list[int]]:
    """Return the tiles of views, written out one by one."""
    rows = {}
    for slot, length, token, first in views:
        for number, offset in enumerate(range(0, length, tile)):
            rows[first + number] = [slot + offset, min(tile, length - offset), token + offset, 0]
    return rows


def check(name: str, device: str) -> None:
    views = [[1024, 300, 0, 5], [7, 1, 300, 8], [0, 128, 301, 9], [4096, 129, 0, 12], [99, 127, 129, 14]]
    spare = [[11, 500, 0, 0]] * 3
    table = torch.tensor(views + spare, dtype=torch.int32, device=device)
    for tile in (128, 16, 100):
        rows = expected(views, tile)
        if tile != 128:
            # starts for the other tile sizes: one gap between views
            at = 2
            for i, view in enumerate(views):
                table[i, 3] = view[3] = at
                at += -(-view[1] // tile) + 1
            rows = expected(views, tile)
        out = torch.full((max(rows) + 4, 4), -7, dtype=torch.int32, device=device)
        count = torch.tensor([len(views)], dtype=torch.int32, device=device)
        get_backend(name, device).derive_tiles(table, count, tile, out)
        for row, values in enumerate(out.tolist()):
            assert values == rows.get(row, [-7] * 4), (tile, row)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_tiles_cover_every_view_and_nothing_else_is_written(name):
    check(name, "cpu")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_no_views_write_no_tiles(name):
    out = torch.full((4, 4), -7, dtype=torch.int32)
    views = torch.full((5, 4), 2**30, dtype=torch.int32)
    get_backend(name, "cpu").derive_tiles(views, torch.zeros(1, dtype=torch.int32), 16, out)
    assert (out == -7).all()


TILES = [(3, 0, 2), (1,), (0, 0), (5, 1, 1, 9, 0, 2), (40, 3)]


def derived(module, tiles, heads, num_spans, split, device="cpu"):
    """Derive a schedule of rows whose tiles begin at 7, into tables full of rubbish."""
    ends = torch.tensor(tiles).cumsum(0).tolist()
    ranges = [[7 + end - n, 7 + end] for n, end in zip(tiles, ends, strict=True)]
    table = torch.arange(4 * (7 + ends[-1])).view(-1, 4)
    tables = KVTables(
        *(torch.tensor(x, dtype=torch.int32, device=device) for x in (table.tolist(), ranges, [0, *ends]))
    )
    schedule = spans.empty_schedule(len(tiles), heads, num_spans, 7 + ends[-1], device, split)
    schedule.entries.fill_(-9)
    schedule.ranges.fill_(-9)
    importlib.import_module(f"distdec.ops.{module}").derive_spans(tables, schedule)
    return tables, schedule


@pytest.mark.parametrize("split", [0, 2])
@pytest.mark.parametrize("num_spans", [1, 2, 5, 70])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("module", ["spans", "spans_triton"])
def test_programs_share_all_tiles_and_partials_of_a_unit_are_contiguous(module, heads, num_spans, split):
    for tiles in TILES:
        tables, schedule = derived(module, tiles, heads, num_spans, split)
        entries, found = schedule.entries.tolist(), {}
        shares, fronts = [], []
        for span in range(num_spans):
            entry, share, front = entries[span], 0, 0
            while entry[0] >= 0:
                partial, after, unit, begin, end, *first = entry
                assert first == tables.tile_table[begin, :3].tolist() and begin < end and partial not in found
                assert not split or end - begin <= split
                found[partial] = unit, begin, end
                share += end - begin
                row_begin, row_end = tables.tile_ranges[unit // heads].tolist()
                front += begin == row_begin and row_end - row_begin < -(-sum(tiles) * heads // num_spans)
                entry = entries[num_spans + after] if after >= 0 else [-1]
            shares.append(share)
            fronts.append(front)
        if not split:
            # a short unit's empty place may be in the span before the one that begins the unit
            short = sum(0 < n < -(-sum(tiles) * heads // num_spans) for n in tiles)
            used = min(num_spans, (sum(tiles) + short) * heads)
            places = [share + starts for share, starts in zip(shares, fronts, strict=True)]
            assert max(places) - min(places[:used], default=0) <= (3 if short else 1)
        for unit, (first, last) in enumerate(schedule.ranges.tolist()):
            begin, end = tables.tile_ranges[unit // heads].tolist()
            pieces = [found.pop(partial) for partial in range(first, last)]
            assert all(piece[0] == unit for piece in pieces)
            edges = [begin, *(piece[2] for piece in pieces)]
            assert [piece[1] for piece in pieces] == edges[:-1] and edges[-1] == (end if begin < end else begin)
            assert not split or all((edge - begin) % split == 0 for edge in edges[:-1])
        assert not found


def test_both_derive_the_same_schedule():
    for tiles in TILES:
        for split in (0, 3):
            want, got = (derived(module, tiles, 2, 6, split)[1] for module in ("spans", "spans_triton"))
            assert torch.equal(want.ranges, got.ranges)
            for span in range(6):
                a, b = want.entries[span].tolist(), got.entries[span].tolist()
                while a[0] >= 0:
                    assert a == b
                    a, b = (x.entries[6 + a[1]].tolist() if a[1] >= 0 else [-1] for x in (want, got))
                assert b[0] == -1


@pytest.mark.gpu
@pytest.mark.parametrize("split", [0, 3])
def test_the_schedule_on_a_gpu(split):
    for tiles in TILES:
        want, got = derived("spans", tiles, 2, 6, split)[1], derived("spans_triton", tiles, 2, 6, split, "cuda")[1]
        assert torch.equal(want.ranges, got.ranges.cpu())
        assert torch.equal(want.entries[:6, 0], got.entries[:6, 0].cpu())


@pytest.mark.gpu
def test_tiles_on_a_gpu():
    check("triton", "cuda")


@pytest.mark.parametrize("module", ["spans", "spans_triton"])
def test_a_program_that_begins_many_short_units_gets_fewer_tiles(module):
    tiles, heads, num_spans = (90, 1, 2, 1, 1, 2, 1, 3, 1, 0, 2, 40), 2, 8
    schedule = derived(module, tiles, heads, num_spans, 0)[1]
    entries, begun, shares = schedule.entries.tolist(), [], []
    for span in range(num_spans):
        entry, segments = entries[span], []
        while entry[0] >= 0:
            segments.append(entry[4] - entry[3])
            entry = entries[num_spans + entry[1]] if entry[1] >= 0 else [-1]
        begun.append(len(segments))
        shares.append(sum(segments))
    assert max(begun) >= 10
    busiest = begun.index(max(begun))
    # 288 tiles and 20 empty places over 8 programs: 38 or 39 places each
    assert shares[busiest] <= 39 - begun[busiest] + 2
    assert max(shares) == 39
    assert sum(shares) == heads * sum(tiles)


@pytest.mark.parametrize("num_spans", [7, 400])
def test_the_line_may_be_longer_than_two_to_the_31_over_spans(num_spans):
    """2**22 tiles on two heads times 400 programs: products past 2**31."""
    tiles, heads = (2**20, 0, 3, 2**21 - 9, 1), 2
    ends = torch.tensor(tiles).cumsum(0)
    ranges = torch.stack([ends - torch.tensor(tiles), ends], 1).to(torch.int32)
    table = torch.arange(4, dtype=torch.int32).repeat(int(ends[-1]), 1)
    cum = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32)
    tables = KVTables(table, ranges, cum)
    found = []
    for module in ("spans", "spans_triton"):
        schedule = spans.empty_schedule(len(tiles), heads, num_spans, len(table), "cpu")
        importlib.import_module(f"distdec.ops.{module}").derive_spans(tables, schedule)
        found.append(schedule)
    want, got = found
    assert torch.equal(want.ranges, got.ranges)
    assert torch.equal(want.entries[:num_spans], got.entries[:num_spans])

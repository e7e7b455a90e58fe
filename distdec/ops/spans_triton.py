"""Deal a step's tiles to the decode programs on the device: one launch a step, for all layers. Contract in `spans.py`.

The device function `unit_partials` is the one description, in closed form, of which partials belong to a unit.
"""

import torch
import triton
import triton.language as tl

from distdec.ops.spans import empty_schedule
from distdec.ops.tables import KVTables, Schedule

BLOCK_UNITS = 128


@triton.jit
def used_spans(line, num_spans):
    """Return how many of a grid's spans are in use on a line of W tiles: an empty span would be a hole in a range."""
    return tl.maximum(tl.minimum(line, num_spans), 1)


@triton.jit
def unit_partials(p_cum, num_rows, num_spans, row, head, HKV: tl.constexpr, SPLIT: tl.constexpr):
    """Return (first, count): the partials of units, see `spans.py`; `row` and `head` may be vectors.

    Tile x of a line of W tiles belongs to span `((x + 1) * P - 1) // W`.
    """
    before = tl.load(p_cum + row).to(tl.int64)
    tiles = tl.load(p_cum + row + 1) - before
    if SPLIT > 0:
        count = (tiles + SPLIT - 1) // SPLIT
        first = (before // SPLIT + row) * HKV + head * count
    else:
        line = tl.load(p_cum + num_rows).to(tl.int64) * HKV
        num_spans = used_spans(line, num_spans)
        # without any tile the count is 0 below; 1 only keeps the division legal
        line = tl.maximum(line, 1)
        start = before * HKV + head * tiles
        first_span = ((start + 1) * num_spans - 1) // line
        last_span = ((start + tiles) * num_spans - 1) // line
        count = tl.where(tiles > 0, last_span - first_span + 1, 0)
        first = first_span + row * HKV + head
    return first, count.to(tl.int32)


@triton.jit
def write_ranges(
    p_cum, p_unit_ranges, num_rows, num_spans, block, HKV: tl.constexpr, SPLIT: tl.constexpr, BLOCK_U: tl.constexpr
):
    """Write the ranges of `BLOCK_U` units."""
    o_u = block * BLOCK_U + tl.arange(0, BLOCK_U)
    m_u = o_u < num_rows * HKV
    o_row = tl.minimum(o_u // HKV, num_rows - 1)
    b_first, b_count = unit_partials(p_cum, num_rows, num_spans, o_row, o_u % HKV, HKV, SPLIT)
    b_first = tl.where(b_count > 0, b_first, 0).to(tl.int32)
    tl.store(p_unit_ranges + o_u * 2, b_first, mask=m_u)
    tl.store(p_unit_ranges + o_u * 2 + 1, b_first + b_count, mask=m_u)


@triton.jit(do_not_specialize=["num_rows", "num_spans"])
def derive_spans_kernel(
    p_tiles,
    p_ranges,
    p_cum,
    p_entries,
    p_unit_ranges,
    num_rows,
    num_spans,
    HKV: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """Walk one span along the line and write its segments; the programs after the spans write the units' ranges."""
    i_span = tl.program_id(0)
    if i_span >= num_spans:
        write_ranges(p_cum, p_unit_ranges, num_rows, num_spans, i_span - num_spans, HKV, SPLIT, BLOCK_U)
    else:
        o_b = tl.arange(0, BLOCK_B)
        b_base = tl.load(p_cum + o_b, mask=o_b < num_rows, other=2**30)
        line = tl.load(p_cum + num_rows)
        if SPLIT > 0:
            b_base = b_base // SPLIT + o_b
            line = line // SPLIT + num_rows
        # int64: tiles times spans passes 2**31 at some million tokens
        line = line.to(tl.int64) * HKV
        spans = num_spans
        if SPLIT == 0:
            spans = used_spans(line, spans).to(tl.int32)
        # spans past those in use begin and end at the line's end
        at = tl.minimum((line * i_span) // spans, line).to(tl.int32)
        stop = tl.minimum((line * (i_span + 1)) // spans, line).to(tl.int32)
        p_first = p_entries + i_span.to(tl.int64) * 8
        tl.store(p_first, -1)
        p_last = p_first
        found = 0
        while at < stop:
            row = tl.sum((b_base <= at // HKV).to(tl.int32), 0) - 1
            begin = tl.load(p_ranges + 2 * row)
            # not from the ranges: the walk ends whatever they hold, since a row that covers `at` has tiles here
            before = tl.load(p_cum + row)
            num_tiles = tl.load(p_cum + row + 1) - before
            if SPLIT > 0:
                offset = at - (before // SPLIT + row) * HKV
                pieces = tl.maximum((num_tiles + SPLIT - 1) // SPLIT, 1)
                head = offset // pieces
                lo = (offset % pieces) * SPLIT
                # the numbering leaves holes between rows: nothing to do there
                hi = tl.where(head < HKV, tl.minimum(lo + SPLIT, num_tiles), lo)
                partial = at
                at += 1
            else:
                offset = at - before * HKV
                head = offset // num_tiles
                lo = offset - head * num_tiles
                hi = tl.minimum(num_tiles, lo + stop - at)
                partial = i_span + row * HKV + head
                at += hi - lo
            if lo < hi:
                p_entry = tl.where(found == 0, p_first, p_entries + (num_spans + partial).to(tl.int64) * 8)
                p_tile = p_tiles + (begin + lo).to(tl.int64) * 4
                # the segment before this one, if any, now learns who follows it; the first is overwritten below
                tl.store(p_last + 1, partial)
                tl.store(p_entry, partial)
                tl.store(p_entry + 1, -1)
                tl.store(p_entry + 2, row * HKV + head)
                tl.store(p_entry + 3, begin + lo)
                tl.store(p_entry + 4, begin + hi)
                tl.store(p_entry + 5, tl.load(p_tile))
                tl.store(p_entry + 6, tl.load(p_tile + 1))
                tl.store(p_entry + 7, tl.load(p_tile + 2))
                p_last = p_entry
                found = 1


def derive_spans(tables: KVTables, schedule: Schedule) -> None:
    """Write the schedule of a step's rows; see `distdec.ops.spans.derive_spans`. One launch."""
    num_rows = tables.tile_ranges.shape[0]
    num_units = num_rows * schedule.num_kv_heads
    if num_units:
        derive_spans_kernel[(schedule.num_spans + triton.cdiv(num_units, BLOCK_UNITS),)](
            tables.tile_table,
            tables.tile_ranges,
            tables.cum_tiles,
            schedule.entries,
            schedule.ranges,
            num_rows,
            schedule.num_spans,
            schedule.num_kv_heads,
            schedule.split_tiles,
            triton.next_power_of_2(num_rows),
            BLOCK_UNITS,
            num_warps=1,
        )


def with_schedule(tables: KVTables, num_kv_heads: int, num_spans: int, split_tiles: int = 0) -> KVTables:
    """Return the tables with a schedule of their own, newly allocated and derived."""
    rows, capacity = tables.tile_ranges.shape[0], tables.tile_table.shape[0]
    device: torch.device = tables.tile_table.device
    schedule = empty_schedule(rows, num_kv_heads, num_spans, capacity, device, split_tiles)
    derive_spans(tables, schedule)
    return tables._replace(schedule=schedule)

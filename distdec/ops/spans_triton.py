"""Deal a step's tiles to the decode programs on the device: one launch for all layers. Contract in `spans.py`."""

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
    """Walk one span along the line and write its segments, and the range of every unit that begins or ends there.

    The programs after the spans write the ranges of units without tiles.
    """
    i_span = tl.program_id(0)
    if i_span >= num_spans:
        o_u = (i_span - num_spans) * BLOCK_U + tl.arange(0, BLOCK_U)
        m_u = o_u < num_rows * HKV
        b_before = tl.load(p_cum + o_u // HKV, mask=m_u, other=0)
        m_u &= tl.load(p_cum + o_u // HKV + 1, mask=m_u, other=1) == b_before
        b_none = tl.zeros([BLOCK_U], tl.int32)
        tl.store(p_unit_ranges + o_u * 2, b_none, mask=m_u)
        tl.store(p_unit_ranges + o_u * 2 + 1, b_none, mask=m_u)
    else:
        o_b = tl.arange(0, BLOCK_B)
        b_base = tl.load(p_cum + o_b, mask=o_b < num_rows, other=2**30)
        line = tl.load(p_cum + num_rows)
        # int64: tiles times spans passes 2**31 at some million tokens
        spans = num_spans.to(tl.int64)
        shortest = 0
        if SPLIT > 0:
            b_base = b_base // SPLIT + o_b
            line = line // SPLIT + num_rows
        else:
            # a unit of fewer tiles than this takes one place more, at its front
            shortest = (line.to(tl.int64) * HKV + spans - 1) // spans
            b_tiles = tl.load(p_cum + o_b + 1, mask=o_b < num_rows, other=0) - b_base
            b_short = ((b_tiles > 0) & (b_tiles < shortest)).to(tl.int32)
            b_base += tl.cumsum(b_short, 0) - b_short
            line += tl.sum(b_short, 0)
        line = line.to(tl.int64) * HKV
        if SPLIT == 0:
            spans = used_spans(line, spans)
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
            # not from the ranges: the walk ends whatever they hold, since a row that covers `at` has places here
            num_tiles = tl.load(p_cum + row + 1) - tl.load(p_cum + row)
            offset = at - tl.sum(tl.where(o_b == row, b_base, 0), 0) * HKV
            if SPLIT > 0:
                pieces = tl.maximum((num_tiles + SPLIT - 1) // SPLIT, 1)
                head = offset // pieces
                lo = (offset % pieces) * SPLIT
                # the numbering leaves holes between rows: nothing to do there
                hi = tl.where(head < HKV, tl.minimum(lo + SPLIT, num_tiles), lo)
                partial = at
                at += 1
            else:
                extra = (num_tiles < shortest).to(tl.int32)
                places = num_tiles + extra
                head = offset // places
                place = offset - head * places
                end = tl.minimum(places, place + stop - at)
                lo = tl.maximum(place - extra, 0)
                hi = end - extra
                partial = i_span + row * HKV + head
                at += end - place
            if lo < hi:
                unit = row * HKV + head
                p_entry = tl.where(found == 0, p_first, p_entries + (num_spans + partial).to(tl.int64) * 8)
                p_tile = p_tiles + (begin + lo).to(tl.int64) * 4
                # the segment before this one, if any, now learns who follows it; the first is overwritten below
                tl.store(p_last + 1, partial)
                tl.store(p_entry, partial)
                tl.store(p_entry + 1, -1)
                tl.store(p_entry + 2, unit)
                tl.store(p_entry + 3, begin + lo)
                tl.store(p_entry + 4, begin + hi)
                tl.store(p_entry + 5, tl.load(p_tile))
                tl.store(p_entry + 6, tl.load(p_tile + 1))
                tl.store(p_entry + 7, tl.load(p_tile + 2))
                if lo == 0:
                    tl.store(p_unit_ranges + 2 * unit, partial)
                if hi == num_tiles:
                    tl.store(p_unit_ranges + 2 * unit + 1, partial + 1)
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

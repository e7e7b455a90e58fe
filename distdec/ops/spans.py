"""Deal a step's tiles to the decode programs: which stretch each one attends to, and which partials a unit gets.

A unit is one row's queries on one KV head, `u = row * Hkv + kv_head`. The tiles of all units lie on one line of W
places, those of a row's heads one after the other. A unit of fewer tiles than an average span,
`cum_tiles[B] * Hkv / P`, has an empty place in front of them: a program that goes through many short units begins anew
with each, which takes about as long as a tile. With P spans in use, at most W, span p owns places `W * p // P` to
`W * (p + 1) // P - 1`. The partial that span p leaves of unit u has number `p + u`: along the line p and u never fall
and one of them always rises, so the numbers are unique, and within a unit they are contiguous, since spans between its
first and last tile hold nothing but its tiles.

Example: rows of 3, 0 and 2 tiles, 1 KV head, P = 2: no unit is short of 5 / 2 tiles but the last, so W = 6; span 0 owns
unit 0 (tiles 0 to 2), span 1 the empty place and tiles 3 and 4. Unit 0 has partial 0 + 0, unit 2 partial 1 + 2.

The deterministic schedule cuts every unit at multiples of `split_tiles` tiles instead. Row b's units have
`ceil(n_b / split_tiles)` pieces each, numbered from `(cum_tiles[b] // split_tiles + b) * Hkv` on: that leaves room for
all, since `(c + n) // s + 1 >= c // s + ceil(n / s)`. A span is then a stretch of those numbers.
"""

from __future__ import annotations

import torch

from distdec.ops.tables import KVTables, Schedule

FIXED_SPLIT_TILES = 16
"""Tiles of a piece where layers ask for the deterministic schedule: 2,048 tokens of the default layout. A row of 8K
under 8 KV heads still makes 32 pieces, and the join of one of 128K takes four rounds of loads."""


def max_partials(num_spans: int, num_rows: int, num_kv_heads: int, tile_capacity: int, split_tiles: int = 0) -> int:
    """Return how many partials a call may number: spans + units, or the pieces of the deterministic schedule."""
    if split_tiles > 0:
        return (tile_capacity // split_tiles + num_rows) * num_kv_heads
    return num_spans + num_rows * num_kv_heads


def empty_schedule(
    num_rows: int,
    num_kv_heads: int,
    num_spans: int,
    tile_capacity: int,
    device: torch.device | str,
    split_tiles: int = 0,
) -> Schedule:
    """Allocate a schedule for `derive_spans` to write."""
    partials = max_partials(num_spans, num_rows, num_kv_heads, tile_capacity, split_tiles)
    entries = torch.empty((num_spans + partials, 8), dtype=torch.int32, device=device)
    ranges = torch.empty((num_rows * num_kv_heads, 2), dtype=torch.int32, device=device)
    return Schedule(entries, ranges, num_kv_heads, num_spans, split_tiles)


def derive_spans(tables: KVTables, schedule: Schedule) -> None:
    """Write the schedule of a step's rows.

    Args:
        tables: their tiles; only lengths in device memory count, so that a captured graph may follow the step.
        schedule: output; its integers say how to cut.

    Notes:
        In-place: writes the schedule's tensors. Graph-safe and without host sync in the Triton twin; here the tables
        are read.
    """
    tiles, ranges, cum = tables.tile_table.tolist(), tables.tile_ranges.tolist(), tables.cum_tiles.tolist()
    heads, num_spans, split = schedule.num_kv_heads, schedule.num_spans, schedule.split_tiles
    segments = []  # (span, partial, unit, begin, end), in the order of the line
    shortest = -(-cum[-1] * heads // num_spans)
    extras = [int(0 < end - begin < shortest and not split) for begin, end in ranges]
    line = (cum[-1] + sum(extras)) * heads
    spans = max(min(line, num_spans), 1)
    if split:
        line = (cum[-1] // split + len(ranges)) * heads
    for row, (begin, end) in enumerate(ranges):
        for head in range(heads):
            unit, count = row * heads + head, end - begin
            first = len(segments)
            if split:
                number = (cum[row] // split + row) * heads + head * -(-count // split)
                for lo in range(0, count, split):
                    owner = ((number + 1) * num_spans - 1) // line
                    segments.append((owner, number, unit, begin + lo, begin + min(lo + split, count)))
                    number += 1
            elif count:
                # of the unit's first tile, behind its empty place if it has one
                start = (cum[row] + sum(extras[:row])) * heads + head * (count + extras[row]) + extras[row]
                for span in range(((start + 1) * spans - 1) // line, ((start + count) * spans - 1) // line + 1):
                    lo = max(line * span // spans - start, 0)
                    hi = min(line * (span + 1) // spans - start, count)
                    segments.append((span, span + unit, unit, begin + lo, begin + hi))
            mine = segments[first:]
            pair = [mine[0][1], mine[-1][1] + 1] if mine else [0, 0]
            schedule.ranges[unit] = torch.tensor(pair, dtype=torch.int32)
    schedule.entries[:num_spans, 0] = -1
    seen = -1
    for at, (span, partial, unit, begin, end) in enumerate(segments):
        after = segments[at + 1] if at + 1 < len(segments) else (-1, -1)
        entry = [partial, after[1] if after[0] == span else -1, unit, begin, end, *tiles[begin][:3]]
        schedule.entries[span if span != seen else num_spans + partial] = torch.tensor(entry, dtype=torch.int32)
        seen = span

"""The views of a step's rows on one rank as one table of numbers, kept from step to step. No torch.

Most steps hold the rows of the step before, each longer by a token in the view that it ended in. So the table is put
together only when the rows, or the number of views of any of them, have changed; otherwise the lengths of the last
views are all that is written. What follows from the table is worked out for all rows at once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distdec.cache.sequence import Int32Array, Int64Array, ViewTable


class Padding(NamedTuple):
    """Up to what a step is filled with rows and tokens that hold nothing, store nothing and belong to nobody.

    A step with prefill rows is padded in both numbers or in none: `prefill_tokens` are all of the section, and stand
    for its longest row too, whatever the rows are. Every decode row is filled up to `q_len` tokens.
    """

    decode_rows: int = 0
    prefill_rows: int = 0
    prefill_tokens: int = 0
    q_len: int = 1


NO_PADDING = Padding()


class StepShape(NamedTuple):
    """Rows and tokens of a step, padding included; `longest` bounds the tokens of a prefill row."""

    decode_rows: int
    q_len: int
    decode_tokens: int
    prefill_rows: int
    longest: int
    num_tokens: int

    def sections(self, num_decode: int, num_rows: int, half: int) -> tuple[tuple[slice, int, int, int], ...]:
        """Return for the decode section, and for the prefill section if any, where its numbers go.

        That is: its real rows, its first row after padding, its rows with padding, its place in a CSR pair.
        """
        decode = (slice(0, num_decode), 0, self.decode_rows, 0)
        prefill = (slice(num_decode, num_rows), self.decode_rows, self.prefill_rows, half)
        return (decode, prefill) if self.prefill_rows else (decode,)


class RowTables:
    """Views and tiles of the rows of a step.

    Args:
        table: where the views are written.
        tile_tokens: most tokens of a tile.

    Attributes:
        total: views of the step.
        first: first view of each row, and the one past the last.
        tiles: first tile of each row, and the one past the last.

    Shapes:
        table: [C, 4] int32: slot of the first token, length, position of the first token, first tile
        first, tiles: [B + 1] int64

    Example:
        Tiles of 128 tokens, row 0 holding 300 tokens from slot 1024 on and row 1 none: `table[:1]` is
        `[[1024, 300, 0, 0]]`, `first` is `[0, 1, 1]` and `tiles` is `[0, 3, 3]`.
    """

    def __init__(self, table: Int32Array, tile_tokens: int) -> None:
        """Start without rows."""
        self.table = table
        self.tile_tokens = tile_tokens
        self._ends = np.zeros(len(table) + 1, np.int64)
        # of each last view, when `cut` last went over all of them
        self._last_tiles: Int64Array | None = None
        self._load([])
        self.tiles = self._ends[self.first]

    def update(self, tables: list[ViewTable]) -> None:
        """Take the rows of the next step: one rank's table of each; `cut` has to follow."""
        if tables != self._tables or [table.version for table in tables] != self._versions:
            self._load(tables)
        self._lengths = np.array([span.length for span in self._spans], np.int64)
        self.table[self._last, 1] = self._cut_lengths = self._lengths

    def leave_out(self, slots: Int64Array) -> None:
        """Shorten rows by their last token where it lies here, so that `cut` makes no tile of it.

        Args:
            slots: of the rows' last tokens, as `last_slots` returns them.
        """
        self.table[self._last, 1] = self._cut_lengths = self._lengths - (slots[self._held] >= 0)

    def cut(self) -> bool:
        """Work out which tiles the views fill; returns whether they are not those of the step before.

        A step that makes rows longer inside the tiles in which they end changes none.
        """
        last_tiles = (self._cut_lengths + (self.tile_tokens - 1)) // self.tile_tokens
        if self._last_tiles is not None and (last_tiles == self._last_tiles).all():
            return False
        self._last_tiles = last_tiles
        views, total = self.table, self.total
        tiles = (views[:total, 1] + (self.tile_tokens - 1)) // self.tile_tokens
        ends = np.cumsum(tiles, out=self._ends[1 : total + 1])
        views[:total, 3] = ends - tiles
        self.tiles = self._ends[self.first]
        return True

    def last_slots(self, lengths: Int64Array) -> Int64Array:
        """Return the slot of each row's last token, -1 where it lies on another rank.

        Args:
            lengths: tokens of each row over all ranks.
        """
        slots = np.full(len(lengths), -1, np.int64)
        ends_here = self._last_start + self._lengths == lengths[self._held]
        slots[self._held] = np.where(ends_here, self._last_slot + self._lengths - 1, -1)
        return slots

    def tiles_from(self, positions: Int64Array) -> Int64Array:
        """Return the first tile of each row that holds a key at or after a position of it; its last end if none does.

        Example: one view `[0, 300, 0, 5]`, tiles of 128, position 256: tiles 5 and 6 end with tokens 127 and 255, so 7.
        """
        views, total = self.table[: self.total], self.total
        # one ascending key over all rows: the row in the upper half, the view's end in the lower one
        upper = np.arange(len(positions), dtype=np.int64) << 32
        ends = np.repeat(upper, np.diff(self.first)) + views[:, 2] + views[:, 1]
        view = np.searchsorted(ends, upper + np.maximum(positions, 0), side="right")
        found = np.flatnonzero(view < self.first[1:])
        tiles: Int64Array = self.tiles[1:].copy()
        if total:
            hit = views[view[found]].astype(np.int64)
            tiles[found] = hit[:, 3] + np.maximum(positions[found] - hit[:, 2], 0) // self.tile_tokens
        return tiles

    def _load(self, tables: Sequence[ViewTable]) -> None:
        self._tables = list(tables)
        self._versions = [table.version for table in tables]
        sizes = np.array([table.count for table in tables], np.int64)
        self.first = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        self.total = int(self.first[-1])
        self._held = np.flatnonzero(sizes)
        self._last = self.first[1:][self._held] - 1
        self._spans = [table.last for table in tables if table.last is not None]
        if self.total:
            np.concatenate([table.rows for table in tables if table.count], out=self.table[: self.total, :3])
        self._last_slot, self._last_start = self.table[self._last][:, [0, 2]].T.astype(np.int64)
        self._last_tiles = None


def shape_of(counts: list[int], num_decode: int, q_len: int, pad: Padding) -> StepShape:
    """Return the shape of a step after padding."""
    prefill = counts[num_decode:]
    tokens = sum(prefill)
    longest = max(prefill, default=0)
    if pad.prefill_tokens:
        # constants of a captured step, not the lengths of this one
        tokens = longest = pad.prefill_tokens
    decode_rows = max(num_decode, pad.decode_rows)
    decode_tokens = decode_rows * q_len
    prefill_rows = max(len(prefill), pad.prefill_rows)
    return StepShape(decode_rows, q_len, decode_tokens, prefill_rows, longest, decode_tokens + tokens)


def cumulate(out: Int32Array, counts: Int64Array) -> None:
    """Write the prefix sums of counts behind a 0; the rest of `out` is for rows that hold nothing."""
    stop = len(counts) + 1
    out[0] = 0
    np.cumsum(counts, out=out[1:stop])
    out[stop:] = out[stop - 1]

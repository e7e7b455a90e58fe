"""Keep one sequence's views, and for each rank that asks the table its kernels read, by increments."""

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from distdec.cache.allocator import require
from distdec.cache.layout import View
from distdec.cache.prefix import ChunkState, Fragment

Int32Array = np.ndarray[Any, np.dtype[np.int32]]
Int64Array = np.ndarray[Any, np.dtype[np.int64]]


class Span:
    """A view that can still change: `length` tokens of a chunk, from `offset` on."""

    __slots__ = ("length", "offset", "rank", "state", "token_start")

    def __init__(self, state: ChunkState, offset: int, length: int, token_start: int) -> None:
        """Note the rank: it is read on every step."""
        self.rank = state.chunk.kvp_rank
        self.state = state
        self.offset = offset
        self.length = length
        self.token_start = token_start


class ViewTable:
    """Rows (slot_start, length, token_start) of one rank's views, ascending in token_start.

    The rows live in a buffer that doubles; `rows` is a read-only window on it, so neither an append nor a read copies.
    Only the last view can change its length, so that one is read from the view itself, and a step that makes it longer
    has nothing to do here. A window taken earlier shows later changes of its rows from the next read on, until the
    buffer moves.

    Attributes:
        count: rows.
        last: the view of the last row, None without rows.
        version: changes with everything but the length of the last row.
    """

    __slots__ = ("_buffer", "_window", "count", "last", "version")

    def __init__(self) -> None:
        """Start without rows."""
        self.count = self.version = 0
        self.last: Span | None = None
        self._allocate(4)

    @property
    def rows(self) -> Int32Array:
        """The rows so far, [C, 3] int32, read-only."""
        if self.last is not None:
            self._buffer[self.count - 1, 1] = self.last.length
        rows: Int32Array = self._window[: self.count]
        return rows

    def append(self, slot_start: int, span: Span) -> None:
        """Add the row of a new view."""
        old = self.rows
        if self.count == len(self._buffer):
            self._allocate(2 * self.count)
            self._buffer[: self.count] = old
        self._buffer[self.count] = (slot_start, span.length, span.token_start)
        self.count += 1
        self.last = span
        self.version += 1

    def drop_last(self, last: Span | None) -> None:
        """Remove the last row; `last` is the view of the one before, if any."""
        self.count -= 1
        self.last = last
        self.version += 1

    def slots(self, start: int, stop: int) -> Int64Array:
        """Return the slots of tokens `[start, stop)`, -1 where a token is in no row; O(stop - start + log rows)."""
        rows = self.rows
        out = np.full(stop - start, -1, np.int64)
        for row in range(max(self.row_of(start), 0), self.count):
            slot, length, token = rows[row].tolist()
            if token >= stop:
                break
            begin, end = max(start, token), min(stop, token + length)
            if begin < end:
                out[begin - start : end - start] = np.arange(slot + begin - token, slot + end - token)
        return out

    def row_of(self, position: int) -> int:
        """Return the last row that starts at or before `position`, -1 if none does; O(log rows)."""
        # ndarray.searchsorted would first copy the strided column
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if self._buffer[middle, 2] <= position:
                low = middle + 1
            else:
                high = middle
        return low - 1

    def _allocate(self, capacity: int) -> None:
        """Take a buffer and its read-only window."""
        self._buffer: Int32Array = np.empty((capacity, 3), np.int32)
        self._window: Int32Array = self._buffer.view()
        self._window.flags.writeable = False


class Origin(NamedTuple):
    """What outlives a sequence that shall come back to the ranks it left.

    Attributes:
        root, keys: the sequence's.
        runs: (rank, tokens), in token order; neighbours lie on different ranks.
    """

    root: bytes
    keys: tuple[bytes, ...]
    runs: tuple[tuple[int, int], ...]


class Sequence:
    """One sequence: its spans in token order and what is derived of them, kept by increments.

    Attributes:
        loads: tokens of this sequence on each rank.
        root: key that stands before the first page, a hash of the salt.
        keys: keys of the pages found or published so far.
    """

    __slots__ = ("keys", "length", "loads", "min_chunk", "root", "seq_id", "spans", "tables")

    def __init__(self, seq_id: int, num_ranks: int, min_chunk: int, root: bytes) -> None:
        """Start without tokens."""
        self.seq_id = seq_id
        self.min_chunk = min_chunk
        self.root = root
        self.length = 0
        self.spans: list[Span] = []
        self.loads = [0] * num_ranks
        self.tables: dict[int, ViewTable] = {}
        self.keys: list[bytes] = []

    def append(self, state: ChunkState, offset: int, length: int) -> None:
        """Add tokens behind the last one: in the last view where they continue it, else as a new view."""
        last = self.spans[-1] if self.spans else None
        if last is not None and last.state is state and last.offset + last.length == offset:
            last.length += length
        else:
            last = Span(state, offset, length, self.length)
            self.spans.append(last)
            if table := self.tables.get(last.rank):
                table.append(self._slot(last), last)
        self.length += length
        self.loads[last.rank] += length

    def cut(self, tokens: int) -> None:
        """Take the last `tokens` tokens off the last view, which is gone when it held no more."""
        last = self.spans[-1]
        last.length -= tokens
        self.length -= tokens
        self.loads[last.rank] -= tokens
        if not last.length:
            self.spans.pop()
            if table := self.tables.get(last.rank):
                table.drop_last(next((span for span in reversed(self.spans) if span.rank == last.rank), None))

    def table(self, kvp_rank: int) -> ViewTable:
        """Return the table of one rank: built once, from then on kept by `append` and `cut`."""
        table = self.tables.get(kvp_rank)
        if table is None:
            table = self.tables[kvp_rank] = ViewTable()
            for span in self.spans:
                if span.rank == kvp_rank:
                    table.append(self._slot(span), span)
        return table

    def runs(self) -> tuple[tuple[int, int], ...]:
        """Return (rank, tokens) of each stretch of tokens on one rank, in token order."""
        runs: list[tuple[int, int]] = []
        for span in self.spans:
            before = runs.pop()[1] if runs and runs[-1][0] == span.rank else 0
            runs.append((span.rank, before + span.length))
        return tuple(runs)

    def views(self) -> list[View]:
        """Return the views in token order."""
        return [View(s.rank, s.state.chunk.frame, s.offset, s.length, s.token_start) for s in self.spans]

    def check_integrity(self) -> None:
        """Check spans, lengths and tables against each other.

        Raises:
            CacheCorrupt: naming the sequence.
        """
        name = f"sequence {self.seq_id}"
        position = 0
        loads = [0] * len(self.loads)
        for span in self.spans:
            require(span.rank == span.state.chunk.kvp_rank, f"{name}: a view and its chunk disagree on the rank")
            require(span.length > 0 and span.offset >= 0, f"{name}: empty view on {span.state.chunk}")
            require(span.offset + span.length <= span.state.filled, f"{name}: view past the end of {span.state.chunk}")
            require(span.token_start == position, f"{name}: token {position} is not where the next view starts")
            position += span.length
            loads[span.rank] += span.length
        require((position, loads) == (self.length, self.loads), f"{name}: lengths do not add up")
        for rank, table in self.tables.items():
            rows = [[self._slot(span), span.length, span.token_start] for span in self.spans if span.rank == rank]
            require(table.rows.tolist() == rows, f"{name}: stale view table of rank {rank}")

    def _slot(self, span: Span) -> int:
        """Return the slot of a span's first token."""
        return span.state.chunk.frame * self.min_chunk + span.offset


def fragments(seq: Sequence, position: int, size: int) -> Iterator[tuple[Fragment, ...]]:
    """Yield where the pages of `size` tokens from `position` on lie, one after the other; O(1) for a page."""
    index = bisect_right(seq.spans, position, key=lambda span: span.token_start) - 1
    while True:
        parts = []
        stop = position + size
        while position < stop:
            span = seq.spans[index]
            inside = position - span.token_start
            length = min(stop - position, span.length - inside)
            parts.append((span.state, span.offset + inside, length))
            position += length
            if inside + length == span.length:
                index += 1
        yield tuple(parts)

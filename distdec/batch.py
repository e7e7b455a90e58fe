"""This step's rows as device tensors: positions, slots and KV tables, in buffers whose addresses never change.

A step packs the tokens of all its rows, decode rows first. `StepBuffers` owns one int32 buffer per side (host staging,
device) with a fixed segment for every table, so a step costs one host-to-device copy and one launch that cuts views
into tiles, and a captured graph finds this step's tables at the addresses of the last one.

Worked example, tiles of 128 tokens, rows `[(7, 1), (9, 3)]` (sequence, new tokens), sequence 7 holding 300 tokens and
sequence 9 holding 3, all on this rank: T = 4, `q_positions = [299, 0, 1, 2]`, one decode row of one token, one prefill
row with `q_indptr = [0, 3]`; tiles 0 to 2 belong to row 0 (128 + 128 + 44 tokens) and tile 3 to row 1 (3 tokens).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distdec.cache.kv_cache import KVCache
from distdec.cache.pool import KVPool
from distdec.ops.backends import OpsBackend
from distdec.ops.spans import empty_schedule, max_partials
from distdec.ops.tables import KVTables, Schedule

MAX_DECODE_TOKENS = 16
"""Most query tokens a row may have to run in the decode kernel: one tile of the matrix unit per group of 16 rows."""


class Section(NamedTuple):
    """The decode rows or the prefill rows of a step.

    Shapes:
        q_indptr: [B + 1] int32, first query token of each row, counted from the section's first token
    """

    first_token: int
    num_tokens: int
    num_rows: int
    max_q_len: int
    q_indptr: Tensor


@dataclass(frozen=True)
class StepBatch:
    """Views into `StepBuffers` for one step; valid until the buffers are filled again.

    Shapes:
        slot_mapping: [T] int64, this rank's pool slot of each new token, -1 where another rank holds it
        q_positions: [T] int32, global position of each new token in its sequence, -1 for padding
    """

    num_tokens: int
    slot_mapping: Tensor
    q_positions: Tensor
    decode: Section | None
    prefill: Section | None
    decode_tables: dict[int, KVTables]
    prefill_tables: dict[int, KVTables]
    kv_lens: tuple[int, ...]

    def tables(self, section: str, window: int) -> KVTables:
        """Return the tables of one section for layers with this sliding window (0 = none).

        Raises:
            ValueError: the window was not announced when the buffers were made.
        """
        tables = self.decode_tables if section == "decode" else self.prefill_tables
        if window not in tables:
            raise ValueError(f"window {window} was not announced to StepBuffers; announced: {sorted(tables)}")
        return tables[window]


class StepBuffers:
    """Static tensors of a step on one rank, filled in place from the integer cache.

    Args:
        kv: the integer cache, the same on every rank.
        kvp_rank: whose slots and tables to fill in.
        backend: ops backend; its `tile_tokens` cuts the views.
        windows: sliding windows that layers will ask for; 0 is always there.
        max_tokens, max_rows, max_views: capacities; they grow when a step needs more, which moves the tensors
            (`generation` counts those moves, so a captured graph can tell that it is stale).
        device: where the tables live.
    """

    def __init__(
        self,
        kv: KVCache,
        kvp_rank: int,
        backend: OpsBackend,
        *,
        windows: Iterable[int] = (0,),
        max_tokens: int = 16,
        max_rows: int = 4,
        max_views: int = 64,
        device: torch.device | str = "cpu",
    ) -> None:
        self.kv = kv
        self.kvp_rank = kvp_rank
        self.backend = backend
        self.tile_tokens = backend.tile_tokens(kv.layout)
        self.windows = tuple(sorted({0, *windows}))
        self.device = torch.device(device)
        self.generation = 0
        self._capacity = (0, 0, 0)
        self._pool: KVPool | None = None
        self._schedules: dict[int, tuple[Tensor, Tensor]] = {}
        self._grow(max_tokens, max_rows, max_views)

    def schedule_for(self, pool: KVPool) -> None:
        """Derive from now on, with every step, how decode programs share its tiles: once for all layers of this pool.

        Without it, or with a backend that has no schedule, the decode op does so itself in every call.
        """
        self._pool = pool
        self._grow(*self._capacity, force=True)

    def reserve(self, *, tokens: int, rows: int, views: int) -> None:
        """Make the buffers large enough now, so that steps up to these sizes find their tensors where they are."""
        self._grow(tokens, rows, views)

    def announce_window(self, window: int) -> None:
        """Add a sliding window that later steps will be asked for. Takes effect at the next `fill`."""
        if window not in self.windows:
            self.windows = tuple(sorted({*self.windows, window}))
            self._grow(*self._capacity, force=True)

    def fill(self, rows: Sequence[tuple[int, int]], *, q_len: int | None = None, pad_decode_rows: int = 0) -> StepBatch:
        """Describe a step whose new tokens are already reserved in the cache.

        Args:
            rows: (seq_id, number of new tokens); a row may have none. The new tokens are the sequence's last ones.
            q_len: query tokens of a decode row. The leading rows that have exactly this many run in the decode
                kernel, the rest in the prefill kernel. Default: the first row's count where it is at most 16.
            pad_decode_rows: pad the decode rows to this many with rows that hold nothing.

        Notes:
            In-place: overwrites the batch returned before. Host sync: none, apart from waiting for the copy of the
            step before last out of the staging buffer.
        """
        if q_len is None:
            q_len = rows[0][1] if rows and 1 <= rows[0][1] <= MAX_DECODE_TOKENS else 1
        num_decode = 0
        while num_decode < len(rows) and rows[num_decode][1] == q_len:
            num_decode += 1
        pad = max(0, pad_decode_rows - num_decode)
        counts = np.array(
            [n for _, n in rows[:num_decode]] + [q_len] * pad + [n for _, n in rows[num_decode:]], np.int64
        )
        seqs = [s for s, _ in rows[:num_decode]] + [None] * pad + [s for s, _ in rows[num_decode:]]
        num_decode += pad
        lens = np.array([0 if s is None else self.kv.length(s) for s in seqs], np.int64)
        host_views = [None if s is None else self.kv.local_view_table(s, self.kvp_rank) for s in seqs]
        num_views = sum(len(v) for v in host_views if v is not None)
        self._grow(int(counts.sum()), len(seqs), num_views)
        self._rotate_staging()
        self._fill_tokens(seqs, counts, lens)
        self._fill_tables(host_views, counts, lens, num_decode)
        self._upload(num_views)
        batch = self._batch(counts, lens, num_decode, q_len)
        for tables in batch.decode_tables.values():
            if tables.schedule is not None and self.backend.derive_spans is not None:
                self.backend.derive_spans(tables, tables.schedule)
        return batch

    # the segments of the packed buffer, in int32 words; views come last so that a copy stops at the last used one
    def _grow(self, tokens: int, rows: int, views: int, *, force: bool = False) -> None:
        old = self._capacity
        if not force and tokens <= old[0] and rows <= old[1] and views <= old[2]:
            return
        new = tuple(max(o, n if force else _round_up(n)) for o, n in zip(old, (tokens, rows, views), strict=True))
        self._capacity = new
        tokens, rows, views = new
        sizes = {"slots": 2 * tokens, "positions": tokens, "q_indptr": 2 * (rows + 1), "num_views": 1}
        for window in self.windows:
            sizes[f"ranges/{window}"] = 2 * rows
            sizes[f"cum/{window}"] = 2 * (rows + 1)
        sizes["views"] = 4 * views
        self._segments: dict[str, tuple[int, int]] = {}
        offset = 0
        for name, size in sizes.items():
            # 16-byte aligned segments: kernels load table rows of four words at once
            offset = -(-offset // 4) * 4
            self._segments[name] = (offset, size)
            offset += size
        pin = self.device.type == "cuda"
        self._staging = [torch.zeros(offset, dtype=torch.int32, pin_memory=pin) for _ in range(2 if pin else 1)]
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._staging)
        self._stage = 0
        self._words = torch.zeros(offset, dtype=torch.int32, device=self.device) if pin else self._staging[0]
        # a view of n tokens has at most n / tile_tokens + 1 tiles, and no view is longer than a chunk
        tiles = views * -(-self.kv.layout.max_chunk // self.tile_tokens)
        self.tile_table = torch.zeros(tiles, 4, dtype=torch.int32, device=self.device)
        self._grow_schedules()
        self.generation += 1

    def _rotate_staging(self) -> None:
        self._stage = (self._stage + 1) % len(self._staging)
        event = self._copied[self._stage]
        if event is not None:
            event.synchronize()
        self._host = self._staging[self._stage].numpy()

    def _segment(self, name: str) -> np.ndarray:
        offset, size = self._segments[name]
        return self._host[offset : offset + size]

    def _device_segment(self, name: str, start: int, size: int) -> Tensor:
        offset = self._segments[name][0] + start
        return self._words[offset : offset + size]

    def _fill_tokens(self, seqs: list[int | None], counts: np.ndarray, lens: np.ndarray) -> None:
        slots = self._segment("slots").view(np.int64)
        positions = self._segment("positions")
        at = 0
        for seq, count, length in zip(seqs, counts.tolist(), lens.tolist(), strict=True):
            stop = at + count
            if seq is None:
                slots[at:stop], positions[at:stop] = -1, -1
            elif count:
                slots[at:stop] = self.kv.slots(seq, length - count, length, self.kvp_rank)
                positions[at:stop] = np.arange(length - count, length)
            at = stop

    def _fill_tables(
        self, views: list[np.ndarray | None], counts: np.ndarray, lens: np.ndarray, num_decode: int
    ) -> None:
        sizes = np.array([0 if v is None else len(v) for v in views], np.int64)
        total = int(sizes.sum())
        table = self._segment("views").reshape(-1, 4)[:total]
        if total:
            table[:, :3] = np.concatenate([v for v in views if v is not None and len(v)])
        tiles = -(-table[:, 1].astype(np.int64) // self.tile_tokens)
        ends = np.cumsum(tiles)
        table[:, 3] = ends - tiles
        self._segment("num_views")[0] = total
        row_views = np.concatenate([[0], np.cumsum(sizes)])
        row_tiles = np.concatenate([[0], ends])[row_views]
        for window in self.windows:
            begin = row_tiles[:-1].copy()
            if window:
                for row in np.flatnonzero(sizes):
                    reach = int(lens[row] - counts[row]) - window + 1
                    part = table[row_views[row] : row_views[row + 1]]
                    begin[row] += _tiles_before(part, reach, self.tile_tokens, int(row_tiles[row]))
            ranges = self._segment(f"ranges/{window}").reshape(-1, 2)
            ranges[: len(views), 0], ranges[: len(views), 1] = begin, row_tiles[1:]
            spans = row_tiles[1:] - begin
            cum = self._segment(f"cum/{window}")
            half = len(cum) // 2
            cum[0], cum[half] = 0, 0
            cum[1 : num_decode + 1] = np.cumsum(spans[:num_decode])
            cum[half + 1 : half + 1 + len(views) - num_decode] = np.cumsum(spans[num_decode:])
        indptr = self._segment("q_indptr")
        half = len(indptr) // 2
        indptr[0], indptr[half] = 0, 0
        indptr[1 : num_decode + 1] = np.cumsum(counts[:num_decode])
        indptr[half + 1 : half + 1 + len(views) - num_decode] = np.cumsum(counts[num_decode:])

    def _upload(self, num_views: int) -> None:
        if self._words is not self._staging[0]:
            used = self._segments["views"][0] + 4 * num_views
            self._words[:used].copy_(self._staging[self._stage][:used], non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._copied[self._stage] = event
        self.backend.derive_tiles(self.view_table, self.num_views, self.tile_tokens, self.tile_table)

    @property
    def view_table(self) -> Tensor:
        """[C, 4] int32 on the device: slot_start, length, token_start, tile_start of every view of the step."""
        return self._device_segment("views", 0, self._segments["views"][1]).view(-1, 4)

    @property
    def num_views(self) -> Tensor:
        """[1] int32 on the device: views of this step."""
        return self._device_segment("num_views", 0, 1)

    def _batch(self, counts: np.ndarray, lens: np.ndarray, num_decode: int, q_len: int) -> StepBatch:
        total = int(counts.sum())
        rows = len(counts)
        slots = self._device_segment("slots", 0, 2 * total).view(torch.int64)
        decode_tokens = num_decode * q_len
        half = self._segments["q_indptr"][1] // 2
        decode = prefill = None
        if decode_tokens:
            decode = Section(0, decode_tokens, num_decode, q_len, self._device_segment("q_indptr", 0, num_decode + 1))
        if total > decode_tokens:
            longest = int(counts[num_decode:].max())
            indptr = self._device_segment("q_indptr", half, rows - num_decode + 1)
            prefill = Section(decode_tokens, total - decode_tokens, rows - num_decode, longest, indptr)
        return StepBatch(
            num_tokens=total,
            slot_mapping=slots,
            q_positions=self._device_segment("positions", 0, total),
            decode=decode,
            prefill=prefill,
            decode_tables={w: self._scheduled(w, self._tables(w, 0, num_decode, 0), q_len) for w in self.windows},
            prefill_tables={w: self._tables(w, num_decode, rows - num_decode, 1) for w in self.windows},
            kv_lens=tuple(lens.tolist()),
        )

    def _tables(self, window: int, first_row: int, num_rows: int, section: int) -> KVTables:
        half = self._segments[f"cum/{window}"][1] // 2
        return KVTables(
            self.tile_table,
            self._device_segment(f"ranges/{window}", 2 * first_row, 2 * num_rows).view(-1, 2),
            self._device_segment(f"cum/{window}", section * half, num_rows + 1),
        )

    def _num_spans(self, rows: int, q_len: int) -> int:
        """Spans of this many decode rows; 0 where the backend has no schedule."""
        plan, pool = self.backend.plan_spans, self._pool
        if plan is None or pool is None or rows == 0:
            return 0
        dim, capacity = max(pool.head_dim, pool.v_head_dim), self.tile_table.shape[0]
        return plan(rows, pool.num_kv_heads, q_len, dim, pool.k.dtype, capacity, self.device)

    def _grow_schedules(self) -> None:
        rows = self._capacity[1]
        spans = max(self._num_spans(r, q_len) for r in range(1, rows + 1) for q_len in (1, 2))
        if spans and self._pool is not None:
            schedules = {w: empty_schedule(rows, self._pool.num_kv_heads, spans, 0, self.device) for w in self.windows}
            self._schedules = {w: (schedule.entries, schedule.ranges) for w, schedule in schedules.items()}

    def _scheduled(self, window: int, tables: KVTables, q_len: int) -> KVTables:
        rows = tables.tile_ranges.shape[0]
        spans = self._num_spans(rows, q_len)
        if not spans or self._pool is None:
            return tables
        heads, (entries, ranges) = self._pool.num_kv_heads, self._schedules[window]
        used = spans + max_partials(spans, rows, heads, 0)
        return tables._replace(schedule=Schedule(entries[:used], ranges[: rows * heads], heads, spans))


def _tiles_before(views: np.ndarray, position: int, tile_tokens: int, first_tile: int) -> int:
    """Count a row's leading tiles that hold only keys before `position`.

    Example: views `[[0, 300, 0, 5]]`, tiles of 128, position 256: tiles 5 and 6 end at tokens 128 and 256, so 2.
    """
    ends = views[:, 2] + views[:, 1]
    view = int(np.searchsorted(ends, position, side="right"))
    if view == len(views):
        last = views[-1]
        return int(last[3]) - first_tile + -(-int(last[1]) // tile_tokens)
    inside = max(0, position - int(views[view, 2])) // tile_tokens
    return int(views[view, 3]) - first_tile + inside


def _round_up(n: int) -> int:
    """Next power of two: capacities double, so that growth is rare."""
    return 1 << max(0, n - 1).bit_length()

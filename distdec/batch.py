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
from numbers import Integral
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distdec.cache.kv_cache import KVCache
from distdec.cache.layout import MAX_INDEX
from distdec.cache.pool import KVPool
from distdec.cache.sequence import ViewTable
from distdec.ops.backends import OpsBackend
from distdec.ops.spans import FIXED_SPLIT_TILES, empty_schedule, max_partials
from distdec.ops.tables import KVTables, Schedule
from distdec.row_tables import NO_PADDING, Padding, RowTables, StepShape, cumulate, shape_of

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

    Attributes:
        own_apart: the tables leave out the new token of every row, and layers attend to it apart; only in steps of
            nothing but decode rows of one token.
        split_tiles: above 0, decode cuts every row at multiples of so many tiles; see `decode`.
    """

    num_tokens: int
    slot_mapping: Tensor
    q_positions: Tensor
    decode: Section | None
    prefill: Section | None
    decode_tables: dict[int, KVTables]
    prefill_tables: dict[int, KVTables]
    own_apart: bool = False
    split_tiles: int = 0

    def tables(self, section: str, window: int) -> KVTables:
        """Return the tables of one section for layers with this sliding window (0 = none).

        Raises:
            ValueError: the window was not among `windows` when the buffers were made.
        """
        tables = self.decode_tables if section == "decode" else self.prefill_tables
        if window not in tables:
            raise ValueError(
                f"window {window} is not among the windows that the cache was made for; legal: {sorted(tables)}"
            )
        return tables[window]


class StepBuffers:
    """Static tensors of a step on one rank, filled in place from the integer cache.

    Args:
        kv: the integer cache, the same on every rank. Where its layout is deterministic, so are the decode rows.
        kvp_rank: whose slots and tables to fill in.
        backend: ops backend; its `tile_tokens` cuts the views.
        windows: sliding windows that layers will ask for; 0 is always there.
        max_tokens, max_rows, max_views: capacities; they grow when a step needs more, which moves the tensors
            (`generation` counts those moves, so a captured graph can tell that it is stale).
        device: where the tables live.
        own_apart: leave the new tokens of steps that allow it out of the tables; see `StepBatch`. Not with
            deterministic rows: a step with a prompt beside them does not allow it, and would round differently.
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
        own_apart: bool = False,
    ) -> None:
        self.kv = kv
        self.split_tiles = FIXED_SPLIT_TILES if kv.layout.deterministic else 0
        self.own_apart = own_apart and not self.split_tiles
        self.kvp_rank = kvp_rank
        self.backend = backend
        self.tile_tokens = backend.tile_tokens(kv.layout)
        self.windows = tuple(sorted({0, *map(_checked_window, windows)}))
        self.device = torch.device(device)
        self.generation = 0
        self._capacity = (0, 0, 0)
        self._pool: KVPool | None = None
        self._group_size = 1
        self._schedules: dict[int, tuple[Tensor, Tensor]] = {}
        # the only batch that layers may use now
        self.derived: StepBatch | None = None
        self._grow(max_tokens, max_rows, max_views)

    def schedule_for(self, pool: KVPool, group_size: int = 1) -> None:
        """Derive from now on, with every step, how decode programs share its tiles: once for all layers of this pool.

        `group_size` are the query heads on a KV head, as far as they are known.

        Without it, or with a backend that has no schedule, the decode op does so itself in every call.
        """
        self._pool, self._group_size = pool, group_size
        self._grow(*self._capacity, force=True)

    def reserve(self, *, tokens: int, rows: int, views: int) -> None:
        """Make the buffers large enough now, so that steps up to these sizes find their tensors where they are."""
        self._grow(tokens, rows, views)

    def fill(
        self,
        rows: Sequence[tuple[int, int]],
        *,
        q_len: int | None = None,
        num_decode: int | None = None,
        pad: Padding = NO_PADDING,
        derive: bool = True,
    ) -> StepBatch:
        """Describe a step whose new tokens are already reserved in the cache.

        Args:
            rows: (seq_id, number of new tokens); a row may have none. The new tokens are the sequence's last ones.
            q_len: query tokens of a decode row. The leading rows that have exactly this many run in the decode
                kernel, the rest in the prefill kernel. Default: the first row's count where it is at most 16.
            num_decode: so many leading rows run in the decode kernel instead, each filled up to `q_len` tokens.
            pad: to fill the step up with.
            derive: cut the views into tiles now; otherwise `derive` has to be called before a layer attends.

        Notes:
            In-place: overwrites the batch returned before. Host sync: none, apart from waiting for the copy of the
            step before last out of the staging buffer.
        """
        if q_len is None:
            q_len = rows[0][1] if rows and 1 <= rows[0][1] <= MAX_DECODE_TOKENS else 1
        counts = [count for _, count in rows]
        if num_decode is None:
            num_decode = len(counts)
            if counts.count(q_len) != num_decode:
                num_decode = next(i for i, count in enumerate(counts) if count != q_len)
        shape = shape_of(counts, num_decode, q_len, pad)
        seqs = [seq for seq, _ in rows]
        lens, tables = self.kv.local_rows(seqs, self.kvp_rank)
        self._grow(shape.num_tokens, shape.decode_rows + shape.prefill_rows, sum([table.count for table in tables]))
        self._rows.update(tables)
        ends = np.array(lens, np.int64)
        self._fill_tokens(counts, ends, tables, num_decode, shape)
        if self._leaves_out(shape):
            self._rows.leave_out(self._segment("slots")[: 2 * num_decode].view(np.int64))
        described = (shape, num_decode, counts)
        # without windows the tables follow from the tiles
        if self._rows.cut() or len(self.windows) > 1 or described != self._described:
            self._fill_tables(np.array(counts, np.int64), ends, num_decode, shape)
            self._described = described
        self._upload(self._rows.total)
        if self._made is None or self._made[0] != shape:
            self._made = (shape, self._batch(shape))
        batch = self._made[1]
        if derive:
            self.derive(batch)
        return batch

    def derive(self, batch: StepBatch) -> None:
        """Cut the step's views into tiles and deal them to the decode programs, on the device, for all layers.

        Notes:
            Graph-safe: reads what `fill` has copied to the device. Host sync: none.
        """
        self.derived = batch
        self.backend.derive_tiles(self.view_table, self.num_views, self.tile_tokens, self.tile_table)
        for tables in batch.decode_tables.values():
            if tables.schedule is not None and self.backend.derive_spans is not None:
                self.backend.derive_spans(tables, tables.schedule)

    def _leaves_out(self, shape: StepShape) -> bool:
        return self.own_apart and shape.q_len == 1 and shape.decode_rows > 0 and shape.prefill_rows == 0

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
        # filled in place from step to step; a device gets a copy by way of one of two staging buffers
        self._host = torch.zeros(offset, dtype=torch.int32)
        self._array = self._host.numpy()
        self._words = torch.zeros(offset, dtype=torch.int32, device=self.device) if pin else self._host
        self._staging = [torch.zeros(offset, dtype=torch.int32, pin_memory=True) for _ in range(2)] if pin else []
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._staging)
        self._stage = 0
        self._rows = RowTables(self._segment("views").reshape(-1, 4), self.tile_tokens)
        self._made: tuple[StepShape, StepBatch] | None = None
        self._described: tuple[StepShape, int, list[int]] | None = None
        # a view of n tokens has at most n / tile_tokens + 1 tiles, and no view is longer than a chunk
        tiles = views * -(-self.kv.layout.max_chunk // self.tile_tokens)
        self.tile_table = torch.zeros(tiles, 4, dtype=torch.int32, device=self.device)
        self._grow_schedules()
        self.generation += 1

    def _segment(self, name: str) -> np.ndarray:
        offset, size = self._segments[name]
        return self._array[offset : offset + size]

    def _device_segment(self, name: str, start: int, size: int) -> Tensor:
        offset = self._segments[name][0] + start
        return self._words[offset : offset + size]

    def _fill_tokens(
        self, counts: list[int], lens: np.ndarray, tables: list[ViewTable], num_decode: int, shape: StepShape
    ) -> None:
        slots = self._segment("slots")[: 2 * shape.num_tokens].view(np.int64)
        positions = self._segment("positions")[: shape.num_tokens]
        slots[:], positions[:] = -1, -1
        first = at = 0
        if shape.q_len == 1:
            first = at = num_decode
            positions[:at] = lens[:at] - 1
            slots[:at] = self._rows.last_slots(lens)[:at]
        for row in range(first, len(counts)):
            if row <= num_decode:
                at = row * shape.q_len if row < num_decode else shape.decode_tokens
            stop, length = at + counts[row], int(lens[row])
            slots[at:stop] = tables[row].slots(length - counts[row], length)
            positions[at:stop] = np.arange(length - counts[row], length)
            at = stop

    def _fill_tables(self, counts: np.ndarray, lens: np.ndarray, num_decode: int, shape: StepShape) -> None:
        self._segment("num_views")[0] = self._rows.total
        ends = self._rows.tiles[1:]
        for window in self.windows:
            begins = self._rows.tiles[:-1] if not window else self._rows.tiles_from(lens - counts - window + 1)
            ranges = self._segment(f"ranges/{window}").reshape(-1, 2)
            cum = self._segment(f"cum/{window}")
            half = len(cum) // 2
            for some, first, rows, at in shape.sections(num_decode, len(counts), half):
                stop = first + some.stop - some.start
                ranges[first:stop, 0], ranges[first:stop, 1] = begins[some], ends[some]
                ranges[stop : first + rows] = 0
                cumulate(cum[at : at + rows + 1], ends[some] - begins[some])
        indptr = self._segment("q_indptr")
        lengths = counts.copy()
        lengths[:num_decode] = shape.q_len
        for some, _, rows, at in shape.sections(num_decode, len(counts), len(indptr) // 2):
            cumulate(indptr[at : at + rows + 1], lengths[some])

    def _upload(self, num_views: int) -> None:
        if not self._staging:
            return
        self._stage = (self._stage + 1) % len(self._staging)
        event = self._copied[self._stage]
        if event is None:
            event = self._copied[self._stage] = torch.cuda.Event()
        else:
            event.synchronize()
        used = self._segments["views"][0] + 4 * num_views
        staging = self._staging[self._stage][:used]
        staging.copy_(self._host[:used])
        self._words[:used].copy_(staging, non_blocking=True)
        event.record()

    @property
    def view_table(self) -> Tensor:
        """[C, 4] int32 on the device: slot_start, length, token_start, tile_start of every view of the step."""
        return self._device_segment("views", 0, self._segments["views"][1]).view(-1, 4)

    @property
    def num_views(self) -> Tensor:
        """[1] int32 on the device: views of this step."""
        return self._device_segment("num_views", 0, 1)

    def _batch(self, shape: StepShape) -> StepBatch:
        half = self._segments["q_indptr"][1] // 2
        decode = prefill = None
        if shape.decode_tokens:
            indptr = self._device_segment("q_indptr", 0, shape.decode_rows + 1)
            decode = Section(0, shape.decode_tokens, shape.decode_rows, shape.q_len, indptr)
        if tokens := shape.num_tokens - shape.decode_tokens:
            indptr = self._device_segment("q_indptr", half, shape.prefill_rows + 1)
            prefill = Section(shape.decode_tokens, tokens, shape.prefill_rows, shape.longest, indptr)
        rows = shape.decode_rows
        return StepBatch(
            num_tokens=shape.num_tokens,
            slot_mapping=self._device_segment("slots", 0, 2 * shape.num_tokens).view(torch.int64),
            q_positions=self._device_segment("positions", 0, shape.num_tokens),
            decode=decode,
            prefill=prefill,
            decode_tables={w: self._scheduled(w, self._tables(w, 0, rows, 0), shape.q_len) for w in self.windows},
            prefill_tables={w: self._tables(w, rows, shape.prefill_rows, 1) for w in self.windows},
            own_apart=self._leaves_out(shape),
            split_tiles=self.split_tiles,
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
        return plan(rows, pool.num_kv_heads, q_len, dim, pool.k.dtype, capacity, self.device, self._group_size)

    def _grow_schedules(self) -> None:
        rows = self._capacity[1]
        spans = max(self._num_spans(r, q_len) for r in range(1, rows + 1) for q_len in (1, 2))
        if spans and self._pool is not None:
            sizes = (rows, self._pool.num_kv_heads, spans, self.tile_table.shape[0])
            schedules = {w: empty_schedule(*sizes, self.device, self.split_tiles) for w in self.windows}
            self._schedules = {w: (schedule.entries, schedule.ranges) for w, schedule in schedules.items()}

    def _scheduled(self, window: int, tables: KVTables, q_len: int) -> KVTables:
        rows = tables.tile_ranges.shape[0]
        spans = self._num_spans(rows, q_len)
        if not spans or self._pool is None:
            return tables
        heads, (entries, ranges) = self._pool.num_kv_heads, self._schedules[window]
        used = spans + max_partials(spans, rows, heads, self.tile_table.shape[0], self.split_tiles)
        schedule = Schedule(entries[:used], ranges[: rows * heads], heads, spans, self.split_tiles)
        return tables._replace(schedule=schedule)


def _round_up(n: int) -> int:
    """Next power of two: capacities double, so that growth is rare."""
    return 1 << max(0, n - 1).bit_length()


def _checked_window(window: int) -> int:
    """Refuse what is no window: positions are 31 bits wide, and a wider window would wrap around in the kernels."""
    if isinstance(window, bool) or not isinstance(window, Integral) or not 0 <= window <= MAX_INDEX:
        raise ValueError(f"a sliding window must be an integer from 1 to {MAX_INDEX}, or 0 for none, got {window!r}")
    return int(window)

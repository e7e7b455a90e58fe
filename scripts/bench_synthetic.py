"""Decode inputs whose tables are made by hand: chunks of any size, in order or shuffled, over one pool."""

from typing import Any

import torch
from bench_inputs import DTYPES, Shape
from bench_timing import reference_row, rotations_for
from torch import Tensor

from distdec.ops.backends import get_backend
from distdec.ops.tables import KVTables


class SyntheticInputs:
    """Random pool bytes, and tables over them that `cut` replaces. One rank, rows of equal length.

    The pool is exactly full: what the tokens are depends on the table, so the reference reads through it too.
    """

    def __init__(
        self, device: torch.device, shape: Shape, backend: str, *, copies: int | None = None, seed: int = 11
    ) -> None:
        torch.manual_seed(seed)
        self.device, self.shape = device, shape
        self.ops = get_backend(backend, device)
        self.copies = copies or rotations_for(shape.kv_bytes)
        size = (self.copies, shape.tokens, shape.num_kv_heads, shape.head_dim)
        dtype = DTYPES[shape.dtype]
        self.k = torch.randn(size, device=device, dtype=dtype)
        self.v = torch.randn(size, device=device, dtype=dtype)
        batch = len(shape.lengths)
        self.q = torch.randn(batch, shape.num_q_heads, shape.head_dim, device=device).to(dtype)
        self.q_positions = torch.tensor([n - 1 for n in shape.lengths], dtype=torch.int32, device=device)

    def cut(self, chunk: int | None, *, shuffled: bool = False) -> "SyntheticInputs":
        """Return these inputs with every row in chunks of `chunk` tokens; None is one contiguous run a row."""
        length = self.shape.lengths[0]
        size = chunk or length
        starts = torch.arange(self.shape.tokens).view(-1, length)
        # chunks may not straddle rows: cut each row, then deal the full chunks out in random order
        views = [(int(row[0]) + at, min(size, length - at), at) for row in starts for at in range(0, length, size)]
        if shuffled:
            full = [i for i, view in enumerate(views) if view[1] == size]
            slots = [views[full[i]][0] for i in torch.randperm(len(full)).tolist()]
            for i, slot in zip(full, slots, strict=True):
                views[i] = (slot, *views[i][1:])
        other = object.__new__(SyntheticInputs)
        other.__dict__.update(self.__dict__, views=views, tables=self._tables(views, size), _truth=None)
        return other

    def _tables(self, views: list[tuple[int, int, int]], size: int) -> KVTables:
        tile = self.ops.tile_tokens(_Longest(size))
        counts = [-(-length // tile) for _, length, _ in views]
        ends = torch.tensor(counts).cumsum(0)
        rows = torch.tensor([[*view, int(end) - n] for view, end, n in zip(views, ends, counts, strict=True)])
        table = rows.to(torch.int32).to(self.device)
        tiles = torch.zeros(int(ends[-1]), 4, dtype=torch.int32, device=self.device)
        self.ops.derive_tiles(table, torch.tensor([len(views)], dtype=torch.int32, device=self.device), tile, tiles)
        per_row = len(views) // len(self.shape.lengths)
        row_ends = torch.cat([torch.zeros(1, dtype=ends.dtype), ends[per_row - 1 :: per_row]]).to(torch.int32)
        ranges = torch.stack([row_ends[:-1], row_ends[1:]], 1)
        return KVTables(tiles, ranges.contiguous().to(self.device), row_ends.to(self.device))

    def pools(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.k[i], self.v[i]) for i in range(self.copies)]

    def reference(self, q: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return out and lse of copy 0 in float32, read through the views."""
        q = self.q if q is None else q
        if self._truth is not None and self._truth[0] is q:
            return self._truth[1]
        per_row = len(self.views) // len(self.shape.lengths)
        parts = []
        for row in range(len(self.shape.lengths)):
            views = self.views[row * per_row : (row + 1) * per_row]
            index = torch.cat([torch.arange(slot, slot + length) for slot, length, _ in views]).to(self.device)
            k, v = (pool[0][index].transpose(0, 1) for pool in (self.k, self.v))
            parts.append(reference_row(q[row : row + 1], k, v, self.q_positions[row : row + 1], self.scale))
        self._truth = q, (torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts]))
        return self._truth[1]

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5


class _Longest:
    """What `OpsBackend.tile_tokens` reads of a layout."""

    deterministic = False

    def __init__(self, max_chunk: Any) -> None:
        self.max_chunk = max_chunk

"""Where a merge's arithmetic runs: the rank's place among the others, its ops and its buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distdec.ops.combine import fold_ranks
from distdec.ops.packed import pack


class Ops(NamedTuple):
    """The ops of modes that send packed partials; `kernels` tells those on the device from the reference."""

    pack: Callable[..., None]
    fold_ranks: Callable[..., None]
    kernels: bool


REFERENCE = Ops(pack, fold_ranks, False)


class Place:
    """What a mode knows of where it runs: rank, number of ranks, dtype on the wire, ops, and reusable buffers."""

    def __init__(self, rank: int, size: int, wire: torch.dtype, ops: Ops = REFERENCE) -> None:
        self.rank = rank
        self.size = size
        self.wire = wire
        self.ops = ops
        self._storage: dict[tuple[str, torch.dtype, torch.device], list[Tensor]] = {}
        self._heads: dict[tuple[int, int, int, torch.device], Tensor] = {}

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory that the next call of this name reuses.

        Storage grows by doubling and outgrown storage is kept: a captured graph may still write to it.
        """
        numel = 1
        for length in shape:
            numel *= length
        kept = self._storage.setdefault((name, dtype, device), [])
        if not kept or kept[-1].numel() < numel:
            kept.append(torch.empty(1 << max(numel - 1, 0).bit_length(), dtype=dtype, device=device))
        return kept[-1][:numel].view(shape)

    def heads_of(self, columns: tuple[int, int], head_dim: int, device: torch.device) -> Tensor:
        """Head of each column, int64: columns 6 to 9 of heads of 4 belong to heads [1, 1, 2]."""
        key = (*columns, head_dim, device)
        if key not in self._heads:
            self._heads[key] = torch.arange(*columns, device=device) // head_dim
        return self._heads[key]

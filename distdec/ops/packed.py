"""What ranks send each other of their partials in one piece: layout, contract and PyTorch reference.

A message holds, of one rank's partial, all LSEs in float32, then with an 8-bit wire type the scale of each row (token,
head), then columns of the output in the wire type. Each part begins at a multiple of 64 bytes, so that the kernels know
their addresses to be aligned in elements of any type. Bytes between the parts hold anything.

Example: 3 tokens of 2 heads of 8, bfloat16, all 16 columns: LSEs at byte 0 (24), output at byte 64 (96), 192 in all.
With `float8_e4m3`: LSEs at 0, scales at 64 (24), output at 128 (48), 192 in all.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

FP8_MAX = 448.0
"""Largest number of `float8_e4m3`: what the largest |out| of a row is scaled to."""


class Parts(NamedTuple):
    """Views into N messages of T tokens: lses [N, T, Hq], scales the same or None, outs [N, T, columns]."""

    lses: Tensor
    scales: Tensor | None
    outs: Tensor


class Packing(NamedTuple):
    """The layout of messages.

    Attributes:
        num_columns: columns of the flattened Hq x Dv in one message, padding included.
        wire: dtype that they travel in.
    """

    num_tokens: int
    num_heads: int
    head_dim: int
    num_columns: int
    wire: torch.dtype

    @property
    def out_offset(self) -> int:
        """Where the output begins, in bytes."""
        lse_bytes = _aligned(4 * self.num_tokens * self.num_heads)
        return 2 * lse_bytes if self.wire.itemsize == 1 else lse_bytes

    @property
    def num_bytes(self) -> int:
        """Length of a message, a multiple of 64; a step without tokens sends one too."""
        return max(64, self.out_offset + _aligned(self.num_tokens * self.num_columns * self.wire.itemsize))

    def parts(self, messages: Tensor) -> Parts:
        """Return views into messages [N, num_bytes] uint8."""
        tokens, heads, columns, wire = self.num_tokens, self.num_heads, self.num_columns, self.wire
        number, start = messages.shape[0], self.out_offset
        # one view each: an eager merge makes them in every call
        words, elements = messages.view(torch.float32), messages.view(wire)
        at, stride = words.storage_offset(), words.stride(0)
        rows, dense = (number, tokens, heads), (stride, heads, 1)
        lses = words.as_strided(rows, dense, at)
        scales = words.as_strided(rows, dense, at + start // 8) if wire.itemsize == 1 else None
        first = elements.storage_offset() + start // wire.itemsize
        outs = elements.as_strided((number, tokens, columns), (elements.stride(0), columns, 1), first)
        return Parts(lses, scales, outs)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def pack(out: Tensor, lse: Tensor, messages: Tensor, packing: Packing) -> None:
    """Write a partial into messages, message n with columns `n * num_columns` and those that follow.

    A row (token, head) that holds NaN or +inf although it has keys gets the LSE NaN, which fails it wherever it
    arrives; `out` of a row without keys is ignored. With an 8-bit wire type a row is divided by its scale, its largest
    |out| / 448.

    Shapes:
        out: [T, Hq, Dv] floating, lse: [T, Hq] float32, natural log
        messages: [N, packing.num_bytes] uint8, written

    Notes:
        In-place: writes messages. Collective: none. Graph-safe. Host sync: none.
    """
    out, empty = out.float(), lse == -math.inf
    failed = ~empty & ~(lse.isfinite() & out.isfinite().all(-1))
    out = out.masked_fill((empty | failed)[..., None], 0.0)
    parts = packing.parts(messages)
    parts.lses.copy_(lse.masked_fill(failed, math.nan))
    if parts.scales is not None:
        scale = out.abs().amax(-1) / FP8_MAX
        scale = scale.masked_fill(scale == 0.0, 1.0)
        parts.scales.copy_(scale)
        out = (out / scale[..., None]).clamp(-FP8_MAX, FP8_MAX)
    columns, width = out.flatten(1), packing.num_columns
    for n, message in enumerate(parts.outs):
        mine = columns[:, n * width : (n + 1) * width]
        message[:, : mine.shape[1]] = mine

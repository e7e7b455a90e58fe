"""Linear maps, embeddings and norms whose features are split over ranks: plain local tensors, explicit collectives.

Each stands in for a module of a transformers model and returns what that would, on every rank of its group. A group of
None, or no sum, is one rank: nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distdec.mesh import all_gather

Reduce = Callable[[Tensor], Tensor]
"""Returns the sum of all ranks' tensors, as `RankSum` does; it may take its argument's memory for that."""


class RowLinear(nn.Module):
    """A linear map whose input features are split over ranks: local product, then a sum over the ranks.

    Shapes:
        x: [..., in_features] or [..., local columns]; returns [..., out_features], the same on all ranks

    Raises:
        ValueError: x has neither all input features nor this rank's.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, in_features: int, columns: tuple[int, int], reduce: Reduce | None
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.columns = columns
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        start, stop = self.columns
        if x.shape[-1] != stop - start:
            if x.shape[-1] != self.in_features:
                raise ValueError(
                    f"expected {self.in_features} input features or columns {start} to {stop}, got {x.shape[-1]}"
                )
            x = x[..., start:stop]
        y = F.linear(x, self.weight)
        if self.reduce is not None:
            y = self.reduce(y)
        # the bias goes on after the sum, once
        return y if self.bias is None else y + self.bias


class GatherLinear(nn.Module):
    """A linear map whose output features are split over ranks and gathered.

    Shapes:
        x: [..., in_features]; returns [..., sum(sizes)], the same on all ranks of the group
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: list[int], group: object | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.sizes = sizes
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if self.group is None:
            return y
        widest, rows = max(self.sizes), x.numel() // x.shape[-1]
        if rows == 0:
            # a step that only prefills wants no logits; every rank knows, so none waits for the gather
            return y.new_empty(*x.shape[:-1], sum(self.sizes))
        send = y.new_zeros(rows, widest)
        send[:, : y.shape[-1]] = y.reshape(rows, y.shape[-1])
        parts = send.new_empty(len(self.sizes) * rows, widest)
        all_gather(parts, send, self.group)
        parts = parts.view(len(self.sizes), rows, widest)
        full = torch.cat([parts[r, :, :n] for r, n in enumerate(self.sizes)], -1)
        return full.view(*x.shape[:-1], -1)


class VocabEmbedding(nn.Module):
    """An embedding whose rows are split over ranks: each looks up its own tokens, and the results are summed."""

    def __init__(self, weight: Tensor, rows: tuple[int, int], scale: Tensor | float, reduce: Reduce | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.rows = rows
        self.reduce = reduce
        if isinstance(scale, Tensor):
            self.register_buffer("scale", scale, persistent=False)
        else:
            self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        start, stop = self.rows
        if stop > start:
            mine = (ids >= start) & (ids < stop)
            out = F.embedding((ids - start).clamp(0, stop - start - 1), self.weight)
            out = out.masked_fill(~mine[..., None], 0)
        else:
            out = self.weight.new_zeros(*ids.shape, self.weight.shape[1])
        if self.reduce is not None:
            out = self.reduce(out)
        scale = self.scale
        return out * (scale.to(out.dtype) if isinstance(scale, Tensor) else scale)


class SplitNorm(nn.Module):
    """A root mean square norm over all heads, whose heads are split over ranks: the squares are summed over the group.

    Shapes:
        x: [..., local features]; returns the same
    """

    def __init__(self, weight: Tensor, features: int, eps: float, group: object | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.features = features
        self.eps = eps
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = wide.square().sum(-1, keepdim=True)
        if self.group is not None:
            dist.all_reduce(squares, group=self.group)
        return (self.weight * (wide * torch.rsqrt(squares / self.features + self.eps))).to(x.dtype)

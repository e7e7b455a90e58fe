"""Inputs of the merge benchmark: every rank's unmerged splits, made by all ranks alike, and the merged truth."""

import torch
from torch import Tensor

from distdec.ops.combine import combine
from distdec.ops.partial import Partial
from distdec.ops.splits import Splits as WorkspaceSplits


class Splits:
    """What decode leaves in its workspace on one rank of R: `num_splits` partials for each row and KV head.

    Made from seeds, so each rank knows the partials of all and the truth needs no communication. Ranks see scores of
    different size, and one row has no key on rank 1. Workspace rows that belong to no unit hold NaN.

    Example: 8 units of 2 splits are spans 0 to 15; partial `span + unit`, so unit u owns 3u and 3u + 1, and 3u + 2 is
    a hole.

    Shapes:
        out: [N, G, D] float32, lse2: [N, G] float32 base 2, N = units * (num_splits + 1)
        ranges: [B * Hkv, 2] int32
    """

    def __init__(self, rows: int, num_q_heads: int, num_splits: int, rank: int, device: torch.device) -> None:
        self.rows, self.num_kv_heads, self.dim = rows, 8, 128
        self.num_q_heads, self.num_splits = num_q_heads, num_splits
        self.group = num_q_heads // self.num_kv_heads
        units = rows * self.num_kv_heads
        self.num_spans = units * num_splits
        self.out, self.lse2 = self._make(rank, device)
        begin = torch.arange(units, device=device) * (num_splits + 1)
        self.ranges = torch.stack([begin, begin + num_splits], 1).to(torch.int32)

    def _make(self, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(device=device).manual_seed(100 + rank)
        units = self.rows * self.num_kv_heads
        size = (units, self.num_splits + 1, self.group, self.dim)
        out = torch.randn(size, device=device, generator=generator)
        lse2 = torch.randn(size[:3], device=device, generator=generator) + 2.0 * rank
        if rank == 1 and self.rows > 1:
            lse2[: self.num_kv_heads] = -torch.inf
            out[: self.num_kv_heads] = torch.nan
        out[:, -1], lse2[:, -1] = torch.nan, torch.nan
        return out.flatten(0, 1), lse2.flatten(0, 1)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one rank's output rows in float32."""
        return self.rows * self.num_q_heads * self.dim * 4

    def combine(self) -> Partial:
        """Join the splits as the decode op does: its kernel on a GPU, the reference elsewhere."""
        sizes = (self.num_kv_heads, 1, self.group)
        if self.out.device.type == "cpu":
            return combine(self.out, self.lse2, self.ranges, *sizes)
        from distdec.ops.combine_triton import combine_splits

        return combine_splits(WorkspaceSplits(self.out, self.lse2, self.ranges, self.rows, *sizes, self.num_spans))

    def truth(self, num_ranks: int) -> tuple[Tensor, Tensor]:
        """Return out [B, Hq * D] and lse [B, Hq] over the splits of all ranks, in float64."""
        return self._merge([self._make(rank, self.out.device) for rank in range(num_ranks)])

    def local_truth(self) -> tuple[Tensor, Tensor]:
        """Return the same over this rank's splits alone."""
        return self._merge([(self.out, self.lse2)])

    def _merge(self, tensors: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        shape = (self.rows, self.num_kv_heads, self.num_splits + 1, self.group)
        lse = torch.cat([x.double().view(shape)[:, :, :-1] for _, x in tensors], 2) * 0.6931471805599453
        out = torch.cat([x.double().view(*shape, self.dim)[:, :, :-1] for x, _ in tensors], 2)
        total = lse.logsumexp(2)
        # a row without any key: weights of 0, not of NaN
        weights = torch.exp(lse - total.nan_to_num(neginf=0.0)[:, :, None])[..., None]
        merged = torch.where(weights == 0, 0.0, weights * out).sum(2)
        return merged.reshape(self.rows, -1), total.reshape(self.rows, -1)

"""What `decode` leaves in its workspace, described for whoever joins it: a combine, or the merge across ranks."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from distdec.ops.partial import Partial


class Splits(NamedTuple):
    """Unmerged partials of one rank's decode rows, or joined ones.

    Attributes:
        num_rows, num_kv_heads, q_len, group_size: of the decode call; B * q_len tokens, Hq = num_kv_heads * group_size.
        num_spans, split_tiles: the schedule that cut the work.

    Shapes:
        out: [N, q_len * G, Dv] float32, normalised
        lse: [N, q_len * G] float32, in BASE 2, which never leaves a workspace; NaN where out holds a number that is
            not finite
        ranges: [B * Hkv, 2] int32, first partial of each unit and the one past its last; None where there is one
            partial a token and head, a `Partial`, its lse natural
    """

    out: Tensor
    lse: Tensor
    ranges: Tensor | None
    num_rows: int
    num_kv_heads: int
    q_len: int
    group_size: int
    num_spans: int = 0
    split_tiles: int = 0

    @classmethod
    def of(cls, partial: Partial) -> Splits:
        """Describe a partial whose splits are joined already."""
        tokens, heads, _ = partial.out.shape
        return cls(partial.out.contiguous(), partial.lse.contiguous(), None, tokens, 1, 1, heads)

    @property
    def num_tokens(self) -> int:
        """Query tokens."""
        return self.num_rows * self.q_len

    @property
    def num_q_heads(self) -> int:
        """Query heads on this rank."""
        return self.num_kv_heads * self.group_size

    @property
    def head_dim(self) -> int:
        """Head size of the values."""
        return self.out.shape[-1]

"""The one contract between local attention and the merges across ranks: unmerged attention over some of the keys."""

from typing import NamedTuple

from torch import Tensor


class Partial(NamedTuple):
    """Attention of every query token over the keys that one rank (or one split) holds.

    For query row i and the scaled, softcapped, masked scores s_ij of the keys j it sees here:
    `lse_i = ln(sum_j exp(s_ij))` and `out_i = sum_j exp(s_ij - lse_i) v_j`. The logarithm is natural; no other base
    leaves a kernel's workspace. A row that sees no key has `out = 0` and `lse = -inf`.

    Shapes:
        out: [T, Hq, Dv] float32
        lse: [T, Hq] float32
    """

    out: Tensor
    lse: Tensor

"""Attention to the new token of each decode row apart from the older ones: contract and PyTorch reference.

A step's own keys and values are at hand in `k` and `v`, on every rank, before any of them is in the pool. Where the
tables leave a row's new token out, `decode` need not wait for the store, and whoever joins its splits adds one more
term of the softmax. Only the rank that stores the token does so, so that it counts once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distdec.ops.partial import Partial


class OwnTokens(NamedTuple):
    """The new tokens of a step with one in every row, and where they are to be stored.

    Shapes:
        q: [T, Hq, D], k: [T, Hkv, D], v: [T, Hkv, Dv], last dimension dense
        slots: [T] int64, pool slot of each token, -1 where another rank holds it
        k_pool: [S, Hkv, D], v_pool: [S, Hkv, Dv]
    """

    q: Tensor
    k: Tensor
    v: Tensor
    slots: Tensor
    k_pool: Tensor
    v_pool: Tensor
    scale: float
    softcap: float

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, pools: tuple[Tensor, Tensor], scale: float, softcap: float
    ) -> OwnTokens:
        """Take tensors of any strides."""
        dense = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]
        return cls(*dense, slots, *pools, scale, softcap)

    @property
    def key(self) -> tuple[Any, ...]:
        """All that a launch is prepared from."""
        tensors = self[:6]
        return (*((x.shape, x.stride(), x.dtype) for x in tensors), self.scale, self.softcap)


def add_own(partial: Partial, own: OwnTokens) -> Partial:
    """Return attention to the older keys and to each row's own token, where this rank holds it.

    With s the token's scaled and softcapped score: `lse' = ln(exp(lse) + exp(s))` and
    `out' = exp(lse - lse') out + exp(s - lse') v`; rows whose token lies on another rank stay as they are. Keys and
    values count as the pool's type rounds them. A token is in every window and behind every causal mask of its own row.

    Shapes:
        partial: over keys that the own tokens are not among
        returns `Partial` of the same shapes, float32

    Notes:
        In-place: none. Collective: none. Host sync: none.
    """
    group = own.q.shape[1] // own.k.shape[1]
    k = own.k.to(own.k_pool.dtype).float().repeat_interleave(group, 1)
    v = own.v.to(own.v_pool.dtype).float().repeat_interleave(group, 1)
    score = (own.q.float() * k).sum(-1) * own.scale
    if own.softcap:
        score = own.softcap * torch.tanh(score / own.softcap)
    score = score.masked_fill((own.slots < 0)[:, None], -math.inf)
    lse = torch.logaddexp(partial.lse, score)
    base = lse.masked_fill(lse == -math.inf, 0.0)
    # out of a row without keys, or the value of a token that is not here, may be anything
    older = partial.out.float().masked_fill((partial.lse == -math.inf)[..., None], 0.0)
    v = v.masked_fill((score == -math.inf)[..., None], 0.0)
    out = older * torch.exp(partial.lse - base)[..., None] + v * torch.exp(score - base)[..., None]
    return Partial(out, lse)

"""The own token of a decode row in the kernels that join splits: one more term of its softmax, and the store.

Device functions, no kernel: `combine_kernel` and `one_shot_kernel` call them. Contract in `own.py`. A kernel takes six
tensors, eight numbers and seven constants for them, which the functions below give, without own tokens too.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from distdec.ops.own import OwnTokens
from distdec.ops.softmax_triton import tanh

LOG2_E = 1.4426950408889634


@triton.jit
def load_own(
    p_q,
    p_k,
    p_v,
    p_slots,
    p_k_pool,
    p_v_pool,
    token,
    q_head,
    score_scale,
    cap_log2,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    o_dv,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Return the score of a token with its own key, in base 2, and the columns `o_dv` of its value.

    The score is -inf where the token is not here, and NaN where its value is not finite in any column. Nothing here
    waits for the slot: a token that lies elsewhere is in these tensors all the same.
    """
    wide = token.to(tl.int64)
    head = q_head // GROUP
    o_dk = tl.arange(0, BLOCK_DK)
    o_v = tl.arange(0, BLOCK_V)
    p_value = p_v + wide * v_stride_token + head * v_stride_head
    slot = tl.load(p_slots + wide)
    b_q = tl.load(p_q + wide * q_stride_token + q_head * q_stride_head + o_dk, mask=o_dk < DK, other=0.0)
    b_k = tl.load(p_k + wide * k_stride_token + head * k_stride_head + o_dk, mask=o_dk < DK, other=0.0)
    b_v = tl.load(p_value + o_dv, mask=o_dv < DV, other=0.0)
    b_all = tl.load(p_value + o_v, mask=o_v < DV, other=0.0)
    # rounded as later steps will read them
    b_k = b_k.to(p_k_pool.dtype.element_ty).to(tl.float32)
    b_v = b_v.to(p_v_pool.dtype.element_ty).to(tl.float32)
    b_all = b_all.to(p_v_pool.dtype.element_ty).to(tl.float32)
    score = tl.sum(b_q.to(tl.float32) * b_k, 0) * score_scale
    if SOFTCAP:
        score = tanh(score) * cap_log2
    bad = tl.max((tl.abs(b_all) < float("inf")).to(tl.int32) ^ 1, 0)
    return tl.where(slot >= 0, tl.where(bad != 0, float("nan"), score), float("-inf")), b_v


@triton.jit
def add_own(b_out, lse2, score, b_v):
    """Return (out, lse2) with one more key; a score of -inf adds nothing, whatever the value is."""
    top = tl.maximum(lse2, score)
    base = tl.where(top == float("-inf"), 0.0, top)
    # a maximum may swallow a NaN; its weight is NaN then, and so is that of +inf
    older = tl.exp2(lse2 - base)
    own = tl.exp2(score - base)
    total = older + own
    safe = tl.where(total == 0.0, 1.0, total)
    b_v = tl.where(score == float("-inf"), 0.0, b_v)
    return (b_out * older + b_v * own) / safe, tl.where(total == 0.0, float("-inf"), base + tl.log2(safe))


@triton.jit
def store_own(
    p_k,
    p_v,
    p_slots,
    p_k_pool,
    p_v_pool,
    token,
    q_head,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
):
    """Store the key and value of a token into the pool, if it is here; the first query head of a group does so."""
    wide = token.to(tl.int64)
    # int64 before the stride: a pool of 2**31 elements is ordinary
    slot = tl.load(p_slots + wide)
    if (slot >= 0) & (q_head % GROUP == 0):
        head = q_head // GROUP
        o_dk = tl.arange(0, BLOCK_DK)
        o_dv = tl.arange(0, BLOCK_V)
        b_k = tl.load(p_k + wide * k_stride_token + head * k_stride_head + o_dk, mask=o_dk < DK)
        b_v = tl.load(p_v + wide * v_stride_token + head * v_stride_head + o_dv, mask=o_dv < DV)
        tl.store(p_k_pool + slot * K_STRIDE + head * DK + o_dk, b_k.to(p_k_pool.dtype.element_ty), mask=o_dk < DK)
        tl.store(p_v_pool + slot * V_STRIDE + head * DV + o_dv, b_v.to(p_v_pool.dtype.element_ty), mask=o_dv < DV)


def own_tensors(own: OwnTokens | None, stand_in: Tensor) -> tuple[Tensor, ...]:
    """Return q, k, v, slots and pools of a launch; without own tokens nothing reads them."""
    return (stand_in,) * 6 if own is None else own[:6]


def own_numbers(own: OwnTokens | None) -> tuple[int | float, ...]:
    """Return the two factors of the score, then the strides of q, k and v along tokens and heads."""
    if own is None:
        return (0.0, 0.0, 0, 0, 0, 0, 0, 0)
    strides = [stride for x in own[:3] for stride in x.stride()[:2]]
    return (float(own.scale / own.softcap if own.softcap else own.scale * LOG2_E), own.softcap * LOG2_E, *strides)


def own_constants(own: OwnTokens | None) -> tuple[Any, ...]:
    """Return OWN, SOFTCAP, DK, BLOCK_DK, BLOCK_V, K_STRIDE and V_STRIDE of a launch.

    Raises:
        ValueError: pools whose heads do not lie densely.
    """
    if own is None:
        return (False, False, 1, 1, 1, 0, 0)
    for pool in (own.k_pool, own.v_pool):
        if pool.stride(2) != 1 or pool.stride(1) != pool.shape[2]:
            raise ValueError(f"a pool {list(pool.shape)} must have dense heads, got strides {pool.stride()}")
    dim, blocks = own.k.shape[2], [triton.next_power_of_2(x.shape[2]) for x in (own.k, own.v)]
    return (True, own.softcap != 0.0, dim, *blocks, own.k_pool.stride(0), own.v_pool.stride(0))

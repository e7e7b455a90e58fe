"""Store a step's new keys and values into the pool, both in one launch. Contract in `store_kv.py`."""

import triton
import triton.language as tl
from torch import Tensor

from distdec.ops.launch_triton import Launch, Plans
from distdec.ops.store_kv import check_store

BLOCK_ELEMENTS = 4096


@triton.jit
def store_kv_kernel(
    p_k,
    p_v,
    p_slots,
    p_k_pool,
    p_v_pool,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Copy `BLOCK_H` heads of one token. Pool rows are dense; `K_STRIDE` and `V_STRIDE` are a slot's elements."""
    token = tl.program_id(0).to(tl.int64)
    # int64 before the stride: a pool of 2**31 elements is ordinary
    slot = tl.load(p_slots + token)
    if slot >= 0:
        o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        o_d = tl.arange(0, BLOCK_D)[None, :]
        m_k = (o_h < HKV) & (o_d < D)
        b_k = tl.load(p_k + token * k_stride_token + o_h * k_stride_head + o_d, mask=m_k)
        tl.store(p_k_pool + slot * K_STRIDE + o_h * D + o_d, b_k.to(p_k_pool.dtype.element_ty), mask=m_k)
        o_dv = tl.arange(0, BLOCK_DV)[None, :]
        m_v = (o_h < HKV) & (o_dv < DV)
        b_v = tl.load(p_v + token * v_stride_token + o_h * v_stride_head + o_dv, mask=m_v)
        tl.store(p_v_pool + slot * V_STRIDE + o_h * DV + o_dv, b_v.to(p_v_pool.dtype.element_ty), mask=m_v)


def store_kv(
    k: Tensor, v: Tensor, slot_mapping: Tensor, k_pool: Tensor, v_pool: Tensor, *, plans: Plans | None = None
) -> None:
    """Write token t's key and value to slot `slot_mapping[t]`, -1 for none; see `distdec.ops.store_kv.store_kv`.

    Args:
        plans: keeps the launch for the next call of these shapes.
    """
    if k.stride()[-1:] != (1,):
        k = k.contiguous()
    if v.stride()[-1:] != (1,):
        v = v.contiguous()
    key = (
        store_kv,
        (k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype),
        (slot_mapping.shape, slot_mapping.dtype),
        (k_pool.shape, k_pool.stride(), k_pool.dtype, v_pool.shape, v_pool.stride(), v_pool.dtype),
    )
    plans = Plans() if plans is None else plans
    launch = plans.get(key)
    if launch is None:
        launch = plans.keep(key, _prepare(k, v, slot_mapping, k_pool, v_pool))
    launch(k, v, slot_mapping, k_pool, v_pool)


def _prepare(k: Tensor, v: Tensor, slot_mapping: Tensor, k_pool: Tensor, v_pool: Tensor) -> Launch:
    check_store(k, v, slot_mapping, k_pool, v_pool)
    tokens, heads, dim = k.shape
    block_d, block_dv = triton.next_power_of_2(dim), triton.next_power_of_2(v.shape[2])
    block_h = min(triton.next_power_of_2(heads), max(1, BLOCK_ELEMENTS // max(block_d, block_dv)))
    return Launch(
        store_kv_kernel,
        (tokens, triton.cdiv(heads, block_h)),
        (k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        (k_pool.stride(0), v_pool.stride(0), heads, dim, v.shape[2], block_h, block_d, block_dv),
        num_warps=4,
    )

"""Prefill on the device: prompt slices against a row's tiles, the matrix unit fed by whole tiles.

Contract in `prefill.py`. The query rows of a KV head are packed as `token * G + member` and, in each row of the batch,
cut into query tiles of `BLOCK_M` rows. Query tiles are numbered without a table: row b's start at
`q_indptr[b] * G // BLOCK_M + b`, which leaves room for all since `a // m + n // m + 1 <= (a + n) // m + 1` and a row of
n packed rows has at most `n // m + 1` tiles. The tokens after `q_indptr[B]` are one more row, without keys: padding.

Example: BLOCK_M 16, G 2, `q_indptr = [0, 3, 20]`: row 0 has query tile 0; row 1 starts at `3 * 2 // 16 + 1 = 1` and
its 34 packed rows fill query tiles 1, 2 and 3.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from distdec.ops.combine import DecodeWorkspace
from distdec.ops.combine_triton import LN2, combine_splits_kernel
from distdec.ops.decode import check_attention
from distdec.ops.decode_triton import (
    LOG2_E,
    TILE_TOKENS,
    DeviceLimits,
    check_pools,
    device_limits,
    largest_block,
)
from distdec.ops.partial import Partial
from distdec.ops.prefill import check_prefill
from distdec.ops.softmax_triton import finish_softmax
from distdec.ops.tables import KVTables
from distdec.ops.whole_tiles_triton import attend_tiles, describe_pools


@triton.jit
def first_tile_past(p_tiles, begin, end, position, ENDS: tl.constexpr):
    """Return the first tile of [begin, end) whose first token (with ENDS: whose end) is past `position`.

    Tiles ascend in token position, so this is a binary search: 10 dependent loads for 64K tokens.
    """
    lo = begin
    hi = end
    while lo < hi:
        middle = (lo + hi) // 2
        p_entry = p_tiles + middle.to(tl.int64) * 4
        token = tl.load(p_entry + 2)
        if ENDS:
            token += tl.load(p_entry + 1)
        past = token > position
        hi = tl.where(past, middle, hi)
        lo = tl.where(past, lo, middle + 1)
    return lo


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def prefill_kernel(
    p_q,
    p_k,
    p_v,
    d_k,
    d_v,
    p_tiles,
    p_ranges,
    p_positions,
    p_indptr,
    p_out,
    p_lse,
    score_scale,
    cap_log2,
    q_stride_token,
    q_stride_head,
    num_rows,
    num_tokens,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEGATIVE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend with one query tile on one KV head over one split of the tiles that it can see."""
    # the last query tiles of a prompt see the most keys: they start first, so that no long one is left over at the end
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    o_b = tl.arange(0, BLOCK_B)
    m_b = o_b <= num_rows
    b_base = tl.load(p_indptr + o_b, mask=m_b, other=0) * GROUP // BLOCK_M + o_b
    row = tl.sum((m_b & (b_base <= i_tile)).to(tl.int32), 0) - 1
    q_start = tl.load(p_indptr + row)
    q_stop = tl.load(p_indptr + row + 1, mask=row < num_rows, other=num_tokens)
    packed = (q_stop - q_start) * GROUP
    first_row = (i_tile - (q_start * GROUP // BLOCK_M + row)) * BLOCK_M
    if first_row < packed:
        o_m = first_row + tl.arange(0, BLOCK_M)
        m_m = o_m < packed
        o_token = q_start + o_m // GROUP
        o_head = head * GROUP + o_m % GROUP
        b_limit = tl.load(p_positions + o_token, mask=m_m, other=-1)
        begin = tl.load(p_ranges + 2 * row, mask=row < num_rows, other=0)
        end = tl.load(p_ranges + 2 * row + 1, mask=row < num_rows, other=0)
        # tiles after the newest query or before the oldest one's window are left out
        newest = tl.max(b_limit, 0)
        oldest = tl.min(tl.where(b_limit < 0, 2**31 - 1, b_limit), 0)
        end = first_tile_past(p_tiles, begin, end, newest, False)
        if WINDOW > 0:
            begin = first_tile_past(p_tiles, begin, end, oldest - WINDOW + 1, True)
        at = begin + (end - begin) * split // SPLITS
        stop = begin + (end - begin) * (split + 1) // SPLITS
        p_q_rows = p_q + o_token.to(tl.int64)[:, None] * q_stride_token + o_head[:, None] * q_stride_head
        b_q = tl.load(p_q_rows + o_d[None, :], mask=m_m[:, None] & (o_d < D)[None, :], other=0.0)
        if NEGATIVE:
            # the largest score is looked for before the scaling, which must not turn the order
            b_q = -b_q
            score_scale = -score_scale
        b_max, b_total, b_acc = attend_tiles(
            b_q,
            b_limit,
            p_k,
            p_v,
            d_k,
            d_v,
            p_tiles,
            at,
            stop,
            oldest,
            newest,
            head,
            score_scale,
            cap_log2,
            D,
            DV,
            BLOCK_D,
            BLOCK_DV,
            K_STRIDE,
            V_STRIDE,
            BLOCK_M,
            BLOCK_N,
            TILE,
            WINDOW,
            SOFTCAP,
            STAGES,
        )
        b_out, b_lse2 = finish_softmax(b_max, b_total, b_acc)
        # worked out again from memory: held across the loops, these numbers would spill
        q_start = tl.load(p_indptr + row)
        o_m = (i_tile - (q_start * GROUP // BLOCK_M + row)) * BLOCK_M + tl.arange(0, BLOCK_M)
        m_m = o_m < packed
        o_token = q_start + o_m // GROUP
        o_head = head * GROUP + o_m % GROUP
        o_out = o_token.to(tl.int64) * (HKV * GROUP) + o_head
        if SPLITS == 1:
            # no partials to join: natural log at once
            b_lse2 *= LN2
        else:
            o_out += num_tokens.to(tl.int64) * (HKV * GROUP) * split
        tl.store(p_lse + o_out, b_lse2, mask=m_m)
        tl.store(p_out + o_out[:, None] * DV + o_dv[None, :], b_out, mask=m_m[:, None] & (o_dv < DV)[None, :])


class PrefillPlan(NamedTuple):
    """How one prefill call is launched.

    `max_registers` a thread: None leaves it to the compiler. `descriptors`: the copy engine loads the blocks that need
    no mask, where `describable` holds.
    """

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    descriptors: bool = False


def prefill_launch_plan(
    num_tokens: int,
    num_rows: int,
    max_q_len: int,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    element_bytes: int,
    tile_capacity: int,
    device: DeviceLimits,
    *,
    tile_tokens: int = TILE_TOKENS,
) -> PrefillPlan:
    """Choose the query tile and the number of splits; the one place where the cost of a prefill call is judged.

    Notes:
        The largest query tiles whose kernels compile without spilled registers; smaller where a row does not fill
        them. Where the query tiles do not fill the device, the keys are split too, into at most 16 parts. With
        warp-group products the copy engine loads blocks of up to 128 keys, two of them in flight: the rescaling of
        the output is shared by more keys, and no thread computes addresses. Bounded by the compiler's figures for
        sm_80 and sm_90, not yet fitted to times.
    """
    dim = triton.next_power_of_2(head_dim)
    num_stages = 3
    block_n = largest_block(min(64, tile_tokens), dim, element_bytes)
    if element_bytes == 4:
        # no matrix unit: plain multiplications hold all operands in registers
        largest, num_warps, num_stages, block_n = 32, 8, 2, min(32, block_n)
    elif dim > 128:
        largest, num_warps = 64, 8
    else:
        largest, num_warps = 128, 8
        if dim == 128 and not device.warp_group_products:
            block_n = min(32, block_n)
    block_m = min(largest, max(16, triton.next_power_of_2(max_q_len * group_size)))
    if block_m < 64:
        num_warps = 4 if element_bytes < 4 or block_m == 16 else num_warps
    descriptors = device.warp_group_products and element_bytes == 2 and block_m >= 64
    if descriptors and dim <= 128:
        block_n = min(128, tile_tokens)
    programs = max(triton.cdiv(num_tokens * group_size, block_m), num_rows) * num_kv_heads
    num_splits, slots = 1, device.multiprocessors
    if programs < slots:
        # fewer than four tiles a split are not worth the partials; the fewest splits that fill the last wave best
        most = max(1, min(16, 2 * slots // max(1, programs), tile_capacity // 4))
        num_splits = max(range(1, most + 1), key=lambda n: programs * n / triton.cdiv(max(1, programs * n), slots))
    return PrefillPlan(block_m, block_n, num_splits, num_warps, num_stages, None, descriptors)


def prefill(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tables: KVTables,
    q_positions: Tensor,
    q_indptr: Tensor,
    max_q_len: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    workspace: DecodeWorkspace | None = None,
    tile_tokens: int = TILE_TOKENS,
    plan: PrefillPlan | None = None,
) -> Partial:
    """Attend with a slice of query tokens in every row; see `distdec.ops.prefill.prefill`.

    Args:
        workspace: memory for the partials of a split call; None allocates it where it is needed.
        tile_tokens: tokens of a full tile in `tables`.
        plan: launch parameters in place of the chosen ones.

    Notes:
        Collective: none. Host sync: none. One launch, two where the keys are split.
    """
    check_attention(q, k_pool, v_pool)
    check_prefill(q, tables, q_positions, q_indptr)
    check_pools(k_pool, v_pool)
    num_rows, (num_tokens, num_q_heads, head_dim) = tables.tile_ranges.shape[0], q.shape
    num_kv_heads, v_dim = v_pool.shape[1:]
    group = num_q_heads // num_kv_heads
    if plan is None:
        plan = prefill_launch_plan(
            num_tokens,
            num_rows,
            max_q_len,
            num_kv_heads,
            group,
            max(head_dim, v_dim),
            k_pool.element_size(),
            tables.tile_table.shape[0],
            device_limits(q.device),
            tile_tokens=tile_tokens,
        )
    out = torch.empty((num_tokens, num_q_heads, v_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((num_tokens, num_q_heads), dtype=torch.float32, device=q.device)
    if num_tokens == 0:
        return Partial(out, lse)
    outputs = num_tokens * num_q_heads
    partial_out, partial_lse = out, lse
    if plan.num_splits > 1:
        if workspace is None:
            workspace = DecodeWorkspace.for_partials(plan.num_splits, outputs, v_dim, q.device)
        partial_out, partial_lse = workspace.take(plan.num_splits, outputs, v_dim)
    q = q if q.stride(2) == 1 else q.contiguous()
    # one more row than the batch has: the tokens after its last one
    query_tiles = num_tokens * group // plan.block_m + num_rows + 1
    block_dv = max(16, triton.next_power_of_2(v_dim))
    descriptors = describe_pools(k_pool, v_pool, plan.block_n) if plan.descriptors else (None, None)
    prefill_kernel[(query_tiles, num_kv_heads, plan.num_splits)](
        q,
        k_pool,
        v_pool,
        *descriptors,
        tables.tile_table,
        tables.tile_ranges,
        q_positions,
        q_indptr,
        partial_out,
        partial_lse,
        scale / softcap if softcap else scale * LOG2_E,
        softcap * LOG2_E,
        q.stride(0),
        q.stride(1),
        num_rows,
        num_tokens,
        num_kv_heads,
        group,
        head_dim,
        v_dim,
        max(16, triton.next_power_of_2(head_dim)),
        block_dv,
        k_pool.stride(0),
        v_pool.stride(0),
        plan.block_m,
        plan.block_n,
        tile_tokens,
        triton.next_power_of_2(num_rows + 1),
        plan.num_splits,
        window,
        softcap != 0.0,
        scale < 0,
        plan.num_stages,
        num_warps=plan.num_warps,
        maxnreg=plan.max_registers,
    )
    if plan.num_splits > 1:
        combine_splits_kernel[(outputs,)](
            partial_out,
            partial_lse,
            out,
            lse,
            outputs,
            plan.num_splits,
            v_dim,
            block_dv,
            max(4, triton.next_power_of_2(plan.num_splits)),
            num_warps=4,
        )
    return Partial(out, lse)

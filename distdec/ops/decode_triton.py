"""Decode on the device: keys and values streamed once, spread over all multiprocessors. Contract in `decode.py`.

All query rows of a KV head, `q_len * G` of them packed as `token * G + member`, share one tile of the matrix unit. The
tiles of all units lie on one line that is cut into `num_spans` spans of equal length, one program each (see
`combine_triton.py`). With `num_spans = units * S` and equal rows this is a uniform split; with a multiple of the
multiprocessors it is stream-K, where ragged rows cost nothing. Every program leaves one partial per unit that it
touches; `combine_kernel` joins them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from distdec.ops.combine import DecodeWorkspace
from distdec.ops.combine_triton import LOWEST, launch_combine, used_spans
from distdec.ops.decode import check_attention, check_decode
from distdec.ops.partial import Partial
from distdec.ops.splits import Splits
from distdec.ops.tables import KVTables

TILE_TOKENS = 64
"""Tokens of a full tile. 64 keys and values of 128 bf16 numbers are 32 KiB, a load that keeps HBM busy from three
programs a multiprocessor, two buffers each."""

LOG2_E = 1.4426950408889634


@triton.jit
def tanh(x):
    """Return tanh without cancellation near 0 and without overflow: sign(x) (1 - e) / (1 + e), e = exp(-2 |x|)."""
    b_e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    b_y = (1.0 - b_e) / (1.0 + b_e)
    return tl.where(x < 0, -b_y, b_y)


@triton.jit
def softmax_step(b_q, b_k, b_v, m_seen, b_max, b_total, b_acc, score_scale, cap_log2, SOFTCAP: tl.constexpr):
    """Fold one block of keys into a running softmax in base 2 and return (b_max, b_total, b_acc).

    `score_scale` is scale * log2(e); with a softcap it is scale / softcap and `cap_log2` is softcap * log2(e).
    """
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * score_scale
    if SOFTCAP:
        b_s = tanh(b_s) * cap_log2
    b_s = tl.where(m_seen, b_s, float("-inf"))
    b_max_new = tl.maximum(b_max, tl.max(b_s, 1))
    b_decay = tl.exp2(b_max - b_max_new)
    b_p = tl.exp2(b_s - b_max_new[:, None])
    b_total = b_total * b_decay + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision="ieee")
    return b_max_new, b_total, b_acc


@triton.jit
def finish_softmax(b_max, b_total, b_acc):
    """Return (out, lse2) of a running softmax; a row that has seen no key gets 0 and -inf."""
    b_safe = tl.where(b_total == 0.0, 1.0, b_total)
    return b_acc / b_safe[:, None], tl.where(b_total == 0.0, float("-inf"), b_max + tl.log2(b_safe))


@triton.jit(do_not_specialize=["num_rows"])
def decode_kernel(
    p_q,
    p_k,
    p_v,
    p_tiles,
    p_ranges,
    p_cum,
    p_positions,
    p_out,
    p_lse2,
    score_scale,
    cap_log2,
    q_stride_token,
    q_stride_head,
    num_rows,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    Q_LEN: tl.constexpr,
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
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend along one span of the line of tiles, for `BLOCK_M` packed query rows, and leave a partial per unit."""
    ROWS: tl.constexpr = Q_LEN * GROUP
    SUB: tl.constexpr = TILE // BLOCK_N
    i_span = tl.program_id(0)
    num_spans = tl.num_programs(0)
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    m_m = o_m < ROWS
    o_b = tl.arange(0, BLOCK_B)
    b_base = tl.load(p_cum + o_b, mask=o_b < num_rows, other=2**30)
    line = tl.load(p_cum + num_rows)
    if SPLIT > 0:
        b_base = b_base // SPLIT + o_b
        line = line // SPLIT + num_rows
    # int64: tiles times spans passes 2**31 at some million tokens
    line = line.to(tl.int64) * HKV
    if SPLIT == 0:
        num_spans = used_spans(line, num_spans)
    # programs past the spans in use get an empty span past the line's end
    at = tl.minimum((line * i_span) // num_spans, line).to(tl.int32)
    stop = tl.minimum((line * (i_span + 1)) // num_spans, line).to(tl.int32)
    while at < stop:
        row = tl.sum((b_base <= at // HKV).to(tl.int32), 0) - 1
        begin = tl.load(p_ranges + 2 * row)
        num_tiles = tl.load(p_ranges + 2 * row + 1) - begin
        before = tl.load(p_cum + row)
        if SPLIT > 0:
            offset = at - (before // SPLIT + row) * HKV
            pieces = tl.maximum((num_tiles + SPLIT - 1) // SPLIT, 1)
            head = offset // pieces
            lo = (offset % pieces) * SPLIT
            # the numbering leaves holes between rows: nothing to do there
            hi = tl.where(head < HKV, tl.minimum(lo + SPLIT, num_tiles), lo)
            head = tl.minimum(head, HKV - 1)
            partial = at
            at += 1
        else:
            offset = at - before * HKV
            head = offset // num_tiles
            lo = offset - head * num_tiles
            hi = tl.minimum(num_tiles, lo + stop - at)
            partial = i_span + row * HKV + head
            at += hi - lo
        o_token = row * Q_LEN + o_m // GROUP
        o_head = head * GROUP + o_m % GROUP
        b_limit = tl.load(p_positions + o_token, mask=m_m, other=-1)
        p_q_rows = p_q + o_token.to(tl.int64)[:, None] * q_stride_token + o_head[:, None] * q_stride_head
        b_q = tl.load(p_q_rows + o_d[None, :], mask=m_m[:, None] & (o_d < D)[None, :], other=0.0)
        b_max = tl.full([BLOCK_M], LOWEST, tl.float32)
        b_total = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        # the tile's entry is carried one block ahead: a look-up inside the loop would cost the multi-buffering of
        # the loads that depend on it
        p_entry = p_tiles + (begin + lo).to(tl.int64) * 4
        slot = tl.load(p_entry, mask=lo < hi, other=0)
        length = tl.load(p_entry + 1, mask=lo < hi, other=0)
        token = tl.load(p_entry + 2, mask=lo < hi, other=0)
        num_blocks = (hi - lo) * SUB
        for i in tl.range(0, num_blocks, num_stages=STAGES):
            skip = (i % SUB) * BLOCK_N
            left = length - skip
            start = token + skip
            o_slot = slot.to(tl.int64) + skip
            # the last block looks at its own entry again: rows past a unit's tiles are never read
            p_next = p_entry + (tl.minimum(i + 1, num_blocks - 1) // SUB) * 4
            slot = tl.load(p_next)
            length = tl.load(p_next + 1)
            token = tl.load(p_next + 2)
            # slots past the tile may hold NaN or lie past the pool
            m_n = o_n < left
            p_keys = p_k + o_slot * K_STRIDE + head * D
            b_k = tl.load(
                p_keys + o_n[:, None] * K_STRIDE + o_d[None, :], mask=m_n[:, None] & (o_d < D)[None, :], other=0.0
            )
            p_values = p_v + o_slot * V_STRIDE + head * DV
            b_v = tl.load(
                p_values + o_n[:, None] * V_STRIDE + o_dv[None, :], mask=m_n[:, None] & (o_dv < DV)[None, :], other=0.0
            )
            m_seen = o_n[None, :] < tl.minimum(left, b_limit - start + 1)[:, None]
            if WINDOW > 0:
                m_seen &= o_n[None, :] > (b_limit - WINDOW - start)[:, None]
            b_max, b_total, b_acc = softmax_step(
                b_q, b_k, b_v, m_seen, b_max, b_total, b_acc, score_scale, cap_log2, SOFTCAP
            )
        b_out, b_lse2 = finish_softmax(b_max, b_total, b_acc)
        o_row = partial.to(tl.int64) * ROWS + o_m
        tl.store(p_lse2 + o_row, b_lse2, mask=m_m)
        tl.store(p_out + o_row[:, None] * DV + o_dv[None, :], b_out, mask=m_m[:, None] & (o_dv < DV)[None, :])


class DeviceLimits(NamedTuple):
    """What the launch plans need to know of a device."""

    multiprocessors: int
    shared_bytes: int
    warp_group_products: bool


def device_limits(device: torch.device) -> DeviceLimits:
    """Return a device's limits; those of a small stand-in where the interpreter runs."""
    if device.type != "cuda":
        return DeviceLimits(4, 227 * 1024, True)
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits(
        properties.multi_processor_count, properties.shared_memory_per_multiprocessor, properties.major == 9
    )


def largest_block(tile_tokens: int, dim: int, element_bytes: int) -> int:
    """Return the most tokens, dividing a tile, of which keys and values fit 32 KiB; at least the matrix unit's 16."""
    block = tile_tokens
    while block > 16 and 2 * block * dim * element_bytes > 32 * 1024:
        block //= 2
    return block


class DecodePlan(NamedTuple):
    """How one decode call is launched. All of it is fixed when a graph is captured; no length enters."""

    num_spans: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_launch_plan(
    num_rows: int,
    num_kv_heads: int,
    packed_rows: int,
    head_dim: int,
    element_bytes: int,
    tile_capacity: int,
    device: DeviceLimits,
    *,
    tile_tokens: int = TILE_TOKENS,
    deterministic: bool = False,
) -> DecodePlan:
    """Choose spans and tile shape; the one place where the cost of a decode call is judged.

    Args:
        packed_rows: `q_len * G`, rows that share a KV head's keys.
        head_dim: the wider of key and value size.
        tile_capacity: most tiles that the tables can hold.
        deterministic: choose from head size and type alone, so that bits do not follow the batch or q_len.

    Notes:
        Programs per multiprocessor: as many as shared memory and registers hold, at most 3. Where a whole number of
        spans per unit nearly fills the device it is taken, since equal rows then are cut into equal pieces with the
        fewest partials; else the device is filled exactly, and spans cross units. First version, from probes on one
        H200 (8 KV heads of 128: 64 x 4 warps x 3 stages the best or near it from 8K to 128K tokens).
    """
    # more than 64 rows without warp-group products spill registers: those rows read the keys twice instead
    largest = 128 if device.warp_group_products else 64
    block_m = 16 if deterministic else min(largest, max(16, triton.next_power_of_2(packed_rows)))
    dim = triton.next_power_of_2(head_dim)
    block_n, num_stages = largest_block(tile_tokens, dim, element_bytes), 3
    num_warps = 8 if block_m == largest else 4
    program_bytes = (num_stages - 1) * 2 * block_n * dim * element_bytes + (block_m + 16) * dim * element_bytes
    by_registers = 3 if block_m == 16 else 2 if block_m <= 32 else 1
    occupancy = max(1, min(by_registers, device.shared_bytes // program_bytes))
    units = max(1, num_rows * num_kv_heads)
    resident = device.multiprocessors * occupancy
    whole = units * max(1, resident // units)
    num_spans = whole if 0.9 * resident <= whole <= resident else resident
    num_spans = max(1, min(num_spans, tile_capacity * num_kv_heads))
    return DecodePlan(num_spans, block_m, block_n, num_warps, num_stages)


def max_partials(num_spans: int, num_rows: int, num_kv_heads: int, tile_capacity: int, split_tiles: int = 0) -> int:
    """Return how many partials a call may number: spans + units, or the pieces of the deterministic schedule."""
    if split_tiles > 0:
        return (tile_capacity // split_tiles + num_rows) * num_kv_heads
    return num_spans + num_rows * num_kv_heads


def check_pools(k_pool: Tensor, v_pool: Tensor) -> None:
    """Raise ValueError unless a slot's heads lie densely, as the kernels' address arithmetic takes for granted."""
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if pool.stride(2) != 1 or pool.stride(1) != pool.shape[2]:
            raise ValueError(f"{name} {list(pool.shape)} must have dense heads, got strides {pool.stride()}")


def decode_splits(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tables: KVTables,
    q_positions: Tensor,
    q_len: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    num_spans: int | None = None,
    workspace: DecodeWorkspace | None = None,
    split_tiles: int = 0,
    tile_tokens: int = TILE_TOKENS,
    plan: DecodePlan | None = None,
) -> Splits:
    """Attend as `decode` does, but leave the partials in the workspace, for a merge that joins them itself.

    Args:
        num_spans: programs that share the tiles; None lets `decode_launch_plan` choose.
        workspace: memory for the partials; None allocates it.
        split_tiles: above 0, cut every row at multiples of so many tiles (deterministic schedule).
        tile_tokens: tokens of a full tile in `tables`.
        plan: launch parameters in place of the chosen ones.

    Notes:
        In-place: none but the workspace. Collective: none. Graph-safe. Host sync: none. One launch.
        The splits are good until the workspace is used again.
    """
    check_attention(q, k_pool, v_pool)
    check_decode(q, tables, q_positions, q_len)
    check_pools(k_pool, v_pool)
    num_rows, (_, num_q_heads, head_dim) = tables.tile_ranges.shape[0], q.shape
    num_kv_heads, v_dim = v_pool.shape[1:]
    group = num_q_heads // num_kv_heads
    packed, capacity = q_len * group, tables.tile_table.shape[0]
    if plan is None:
        plan = decode_launch_plan(
            num_rows,
            num_kv_heads,
            packed,
            max(head_dim, v_dim),
            k_pool.element_size(),
            capacity,
            device_limits(q.device),
            tile_tokens=tile_tokens,
            deterministic=split_tiles > 0,
        )
    if num_spans is not None:
        plan = plan._replace(num_spans=num_spans)
    partials = max_partials(plan.num_spans, num_rows, num_kv_heads, capacity, split_tiles)
    if workspace is None:
        workspace = DecodeWorkspace.for_partials(partials, packed, v_dim, q.device)
    partial_out, partial_lse2 = workspace.take(partials, packed, v_dim)
    q = q if q.stride(2) == 1 else q.contiguous()
    if num_rows and capacity:
        decode_kernel[(plan.num_spans, triton.cdiv(packed, plan.block_m))](
            q,
            k_pool,
            v_pool,
            tables.tile_table,
            tables.tile_ranges,
            tables.cum_tiles,
            q_positions,
            partial_out,
            partial_lse2,
            scale / softcap if softcap else scale * LOG2_E,
            softcap * LOG2_E,
            q.stride(0),
            q.stride(1),
            num_rows,
            num_kv_heads,
            group,
            q_len,
            head_dim,
            v_dim,
            max(16, triton.next_power_of_2(head_dim)),
            max(16, triton.next_power_of_2(v_dim)),
            k_pool.stride(0),
            v_pool.stride(0),
            plan.block_m,
            plan.block_n,
            tile_tokens,
            triton.next_power_of_2(num_rows),
            split_tiles,
            window,
            softcap != 0.0,
            plan.num_stages,
            num_warps=plan.num_warps,
        )
    return Splits(
        partial_out,
        partial_lse2,
        tables.cum_tiles,
        num_rows,
        num_kv_heads,
        q_len,
        group,
        plan.num_spans,
        split_tiles,
    )


def decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tables: KVTables,
    q_positions: Tensor,
    q_len: int,
    **options: Any,
) -> Partial:
    """Attend with `q_len` query tokens in every row; see `distdec.ops.decode.decode`.

    Args:
        options: those of `decode_splits`.

    Notes:
        In-place: none but the workspace. Collective: none. Graph-safe. Host sync: none. Two launches.
    """
    splits = decode_splits(q, k_pool, v_pool, tables, q_positions, q_len, **options)
    return launch_combine(*splits[:7], num_spans=splits.num_spans, split_tiles=splits.split_tiles)

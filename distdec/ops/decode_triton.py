"""Decode on the device: keys and values streamed once, spread over all multiprocessors. Contract in `decode.py`.

All query rows of a KV head, `q_len * G` of them packed as `token * G + member`, share one tile of the matrix unit. The
tiles of all units lie on one line that is cut into `num_spans` spans of equal length, one program each (see `spans.py`;
the schedule is derived once a step). With `num_spans = units * S` and equal rows this is a uniform split; with a
multiple of the multiprocessors it is stream-K, where ragged rows cost nothing. Every program leaves one partial per
unit that it touches; `combine_kernel` joins them.

More than 64 packed rows, 71 query heads on one KV head or 8 tokens of 16 heads, keep the matrix unit as busy as memory.
On Hopper they run in the loops of prefill, see `whole_tiles_triton.py`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from distdec.ops.combine import DecodeWorkspace
from distdec.ops.combine_triton import LOWEST, combine_splits
from distdec.ops.decode import check_attention, check_decode
from distdec.ops.launch_triton import Launch, Plans
from distdec.ops.partial import Partial
from distdec.ops.softmax_triton import finish_softmax, fold_keys, load_some_rows
from distdec.ops.spans import max_partials
from distdec.ops.spans_triton import with_schedule
from distdec.ops.splits import Splits
from distdec.ops.tables import KVTables, Schedule
from distdec.ops.whole_tiles_triton import attend_tiles, describe_pools

TILE_TOKENS = 128
"""Tokens of a full tile. 128 keys and values of 128 bf16 numbers are 64 KiB, a block that keeps HBM busy from one
program a multiprocessor with two buffers; smaller blocks divide it. One frame of the cache's default layout."""

LOG2_E = 1.4426950408889634


@triton.jit
def load_entry(p_entries, partial):
    """Return (address, partial, after, unit, begin, end, slot, length, token) of a segment; partial -1 means none."""
    p_entry = p_entries + (tl.num_programs(0) + tl.maximum(partial, 0)).to(tl.int64) * 8
    after = tl.load(p_entry + 1, mask=partial >= 0, other=-1)
    unit = tl.load(p_entry + 2, mask=partial >= 0, other=0)
    begin = tl.load(p_entry + 3, mask=partial >= 0, other=0)
    end = tl.load(p_entry + 4, mask=partial >= 0, other=0)
    slot = tl.load(p_entry + 5, mask=partial >= 0, other=0)
    length = tl.load(p_entry + 6, mask=partial >= 0, other=0)
    token = tl.load(p_entry + 7, mask=partial >= 0, other=0)
    return p_entry, partial, after, unit, begin, end, slot, length, token


@triton.jit
def decode_kernel(
    d_k,
    d_v,
    p_q,
    p_k,
    p_v,
    p_tiles,
    p_entries,
    p_positions,
    p_out,
    p_lse2,
    score_scale,
    cap_log2,
    q_stride_token,
    q_stride_head,
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
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend along one span of the line of tiles, for `BLOCK_M` packed query rows, and leave a partial per unit."""
    ROWS: tl.constexpr = Q_LEN * GROUP
    SUB: tl.constexpr = TILE // BLOCK_N
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    # one trip to memory and the address of the first keys is known
    p_entry = p_entries + tl.program_id(0) * 8
    partial = tl.load(p_entry)
    after = tl.load(p_entry + 1)
    unit = tl.load(p_entry + 2)
    begin = tl.load(p_entry + 3)
    end = tl.load(p_entry + 4)
    slot = tl.load(p_entry + 5)
    length = tl.load(p_entry + 6)
    token = tl.load(p_entry + 7)
    while partial >= 0:
        row = unit // HKV
        head = unit % HKV
        first_row = tl.program_id(1) * BLOCK_M
        if d_k is not None:
            # a zero that the compiler cannot see through: row numbers held across the loops over keys would spill
            first_row += tl.minimum(begin, 0)
        o_m = first_row + tl.arange(0, BLOCK_M)
        m_m = o_m < ROWS
        o_token = row * Q_LEN + o_m // GROUP
        o_head = head * GROUP + o_m % GROUP
        b_limit = tl.load(p_positions + o_token, mask=m_m, other=-1)
        p_q_rows = p_q + o_token.to(tl.int64)[:, None] * q_stride_token + o_head[:, None] * q_stride_head
        b_q = tl.load(p_q_rows + o_d[None, :], mask=m_m[:, None] & (o_d < D)[None, :], other=0.0)
        if d_k is not None:
            newest = tl.max(b_limit, 0)
            oldest = tl.min(tl.where(b_limit < 0, 2**31 - 1, b_limit), 0)
            b_max, b_total, b_acc = attend_tiles(
                b_q,
                b_limit,
                p_k,
                p_v,
                d_k,
                d_v,
                p_tiles,
                begin,
                end,
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
            # looked up again, not held across the loops
            partial = tl.load(p_entry)
            following = load_entry(p_entries, tl.load(p_entry + 1))
        else:
            # what this program does next is read while it is busy here
            following = load_entry(p_entries, after)
            b_max = tl.full([BLOCK_M], LOWEST, tl.float32)
            b_total = tl.zeros([BLOCK_M], tl.float32)
            b_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
            # the tile's entry is carried one block ahead: a look-up inside the loop would cost the multi-buffering of
            # the loads that depend on it
            p_tile = p_tiles + begin.to(tl.int64) * 4
            num_blocks = (end - begin) * SUB
            for i in tl.range(0, num_blocks, num_stages=STAGES):
                skip = (i % SUB) * BLOCK_N
                left = length - skip
                start = token + skip
                o_slot = slot.to(tl.int64) + skip
                # the last block looks at its own entry again: rows past a unit's tiles are never read
                p_next = p_tile + (tl.minimum(i + 1, num_blocks - 1) // SUB) * 4
                slot = tl.load(p_next)
                length = tl.load(p_next + 1)
                token = tl.load(p_next + 2)
                m_n = o_n < left
                p_keys = p_k + o_slot * K_STRIDE + head * D
                b_k = load_some_rows(p_keys, o_n, m_n, o_d, K_STRIDE, D)
                p_values = p_v + o_slot * V_STRIDE + head * DV
                b_v = load_some_rows(p_values, o_n, m_n, o_dv, V_STRIDE, DV)
                m_seen = o_n[None, :] < tl.minimum(left, b_limit - start + 1)[:, None]
                if WINDOW > 0:
                    m_seen &= o_n[None, :] > (b_limit - WINDOW - start)[:, None]
                b_max, b_total, b_acc = fold_keys(
                    b_q, b_k, b_v, m_seen, b_max, b_total, b_acc, score_scale, cap_log2, SOFTCAP, True
                )
        b_out, b_lse2 = finish_softmax(b_max, b_total, b_acc)
        # 0, or NaN where the row is not finite: whoever joins partials may look at some of its columns only
        b_lse2 += tl.sum(b_out * 0.0, 1)
        o_row = partial.to(tl.int64) * ROWS + o_m
        tl.store(p_lse2 + o_row, b_lse2, mask=m_m)
        tl.store(p_out + o_row[:, None] * DV + o_dv[None, :], b_out, mask=m_m[:, None] & (o_dv < DV)[None, :])
        p_entry, partial, after, unit, begin, end, slot, length, token = following


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
        properties.multi_processor_count,
        properties.shared_memory_per_multiprocessor,
        properties.major == 9,
    )


def largest_block(tile_tokens: int, dim: int, element_bytes: int, num_bytes: int = 32 * 1024) -> int:
    """Return the most tokens, dividing a tile, whose keys and values fit `num_bytes`; at least the matrix unit's 16."""
    block = tile_tokens
    while block > 16 and 2 * block * dim * element_bytes > num_bytes:
        block //= 2
    return block


class DecodePlan(NamedTuple):
    """How one decode call is launched. All of it is fixed when a graph is captured; no length enters.

    `descriptors`: the copy engine loads whole tiles, which take no mask, where `describable` holds.
    """

    num_spans: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False


PER_SM = 2
"""Programs that share a multiprocessor: each has two buffers of 32 KiB on their way."""


def decode_launch_plan(
    num_rows: int,
    num_kv_heads: int,
    packed_rows: int,
    head_dim: int,
    element_bytes: int,
    tile_capacity: int,
    device: DeviceLimits,
    *,
    q_len: int = 1,
    tile_tokens: int = TILE_TOKENS,
    deterministic: bool = False,
) -> DecodePlan:
    """Choose spans and tile shape; the one place where the cost of a decode call is judged.

    Args:
        packed_rows: `q_len * G`, rows that share a KV head's keys. Spans are fixed when a step begins, before any query
            is there: what enters their number must follow from what `plan_spans` is told.
        head_dim: the wider of key and value size.
        tile_capacity: most tiles that the tables can hold.
        deterministic: choose from head size and type alone, so that bits do not follow the batch or q_len.

    Notes:
        Fitted to sweeps on one H200 (29 Nov 2026, bf16, D 128, 8 KV heads, medians in us; block/warps/stages x spans).
        Two programs a multiprocessor with blocks of 64 are the best or near it everywhere: 8 rows of 128K 64/8/3 x 256
        941.8 (128/8/3 x 128 1072, 64/8/3 x 384 1179), 8 rows of 8K 64/4/3 x 256 68.9 and 64/8/3 x 256 69.4, 32 rows of
        8K 64/8/3 x 256 246.3, 16 ragged rows 64/8/3 x 264 333.7 (64/4/4 x 792 337.0), one row of 128K under 64 query
        heads 64/4/3 x 256 129.0 (128/4/3 x 128 139.2), one row of 512K 64/8/3 x 256 478.4 and 64/4/3 x 256 484.6. One
        row of 8K prefers 128/4/3 x 128 (14.9) by 1 us or so. Asking for the first keys ahead of the queries and letting
        the combine onto the device early (programmatic dependent launch) cost 0.6 and 0.2 us there and gained nothing
        that lasts elsewhere. Other head sizes and types take the block of the same bytes.

        One row of 1M under 71 query heads on one KV head (30 Nov 2026, 128 rows a tile): 128/8/3 x 132 by the copy
        engine and without masks 144.3, the same without the copy engine 166.0, with masks 189.4, and 64/8/3 x 256 with
        masks 206.7. One program fills a multiprocessor there, so that 256 spans would take two rounds.
    """
    # more than 64 rows without warp-group products spill registers: those rows read the keys twice instead
    largest = 128 if device.warp_group_products else 64
    block_m = 16 if deterministic else min(largest, max(16, triton.next_power_of_2(packed_rows)))
    dim = triton.next_power_of_2(head_dim)
    block_n, num_warps = largest_block(tile_tokens, dim, element_bytes), 4
    units = max(1, num_rows * num_kv_heads)
    if block_m > 16:
        num_warps = 8 if block_m == largest else 4
    elif num_rows > 1 and not (deterministic or element_bytes == 4 or q_len > 1) and device.warp_group_products:
        num_warps = 8
    num_spans = spread(units, device.multiprocessors * PER_SM)
    descriptors = block_m == 128 and element_bytes == 2 and dim == head_dim <= 128
    if descriptors:
        num_spans, block_n = device.multiprocessors, min(128, tile_tokens)
    num_spans = max(1, min(num_spans, tile_capacity * num_kv_heads))
    return DecodePlan(num_spans, block_m, block_n, num_warps, 3, descriptors)


def spread(units: int, resident: int) -> int:
    """Return how many spans units get: the same number each where that nearly fills the device, else a full device.

    A power of two a unit comes first, since lengths that are one then split without a rest. More units than programs
    are dealt out whole, the same number to each program, under the same condition: 64 rows of 8K on 8 KV heads took
    478 us so, and 498 cut into 264 on an H200.

    Example: 8 units and room for 264 programs: 32 each, 256; 24 units: 11 each, 264; 100 units: 264; 512 units: two to
    a span, 256.
    """
    many = -(-units // resident)
    if units % many == 0 and units // many >= 0.9 * resident:
        return units // many
    each = max(1, resident // units)
    for count in (1 << (each.bit_length() - 1), each):
        if 0.9 * resident <= units * count <= resident:
            return units * count
    return resident


def plan_spans(
    num_rows: int,
    num_kv_heads: int,
    q_len: int,
    head_dim: int,
    dtype: torch.dtype,
    tile_capacity: int,
    device: Any,
    group_size: int = 1,
) -> int:
    """Return the spans of a step's decode rows, which are fixed before the queries are there.

    Args:
        group_size: query heads on a KV head, as far as it is known: with more of them than that, results are the same.
    """
    packed, size = q_len * group_size, dtype.itemsize
    limits = device_limits(device)
    return decode_launch_plan(
        num_rows, num_kv_heads, packed, head_dim, size, tile_capacity, limits, q_len=q_len
    ).num_spans


def check_pools(k_pool: Tensor, v_pool: Tensor) -> None:
    """Raise ValueError unless a slot's heads lie densely, as the kernels' address arithmetic takes for granted."""
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if pool.stride(2) != 1 or pool.stride(1) != pool.shape[2]:
            raise ValueError(f"{name} {list(pool.shape)} must have dense heads, got strides {pool.stride()}")


def scheduled(tables: KVTables, num_kv_heads: int, num_spans: int | None, split_tiles: int) -> Schedule | None:
    """Return the tables' own schedule where it is the one asked for; `num_spans` None takes any."""
    schedule = tables.schedule
    if schedule is None or schedule.num_kv_heads != num_kv_heads or schedule.split_tiles != split_tiles:
        return None
    return schedule if num_spans in (None, schedule.num_spans) else None


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
    plans: Plans | None = None,
) -> Splits:
    """Attend as `decode` does, but leave the partials in the workspace, for a merge that joins them itself.

    Args:
        num_spans: programs that share the tiles; None takes those of the tables' schedule, or lets
            `decode_launch_plan` choose.
        workspace: memory for the partials; None allocates it.
        split_tiles: above 0, cut every row at multiples of so many tiles (deterministic schedule).
        tile_tokens: tokens of a full tile in `tables`.
        plan: launch parameters in place of the chosen ones.
        plans: keeps what is derived from these shapes for the next call.

    Notes:
        In-place: none but the workspace. Collective: none. Graph-safe. Host sync: none. One launch, and one before it
        where the tables bring no schedule, or another one. The splits are good until the workspace is used again.
    """
    if q.stride()[-1:] != (1,):
        q = q.contiguous()
    tile_table, tile_ranges, _, schedule = tables
    key = (
        decode_splits,
        (q.shape, q.stride(), q.dtype, q.device, q_positions.shape, q_positions.dtype),
        (q_len, scale, window, softcap),
        (k_pool.shape, k_pool.stride(), k_pool.dtype, v_pool.shape, v_pool.stride(), v_pool.dtype),
        (tile_table.shape, tile_ranges.shape, None if schedule is None else (*schedule[2:], schedule.entries.shape)),
        (num_spans, split_tiles, tile_tokens, plan),
    )
    plans = Plans() if plans is None else plans
    call = plans.get(key)
    if call is None:
        options = (scale, window, softcap, num_spans, split_tiles, tile_tokens, plan)
        call = plans.keep(key, _prepare(q, k_pool, v_pool, tables, q_positions, q_len, *options))
    if call.new_schedule is not None:
        tables = with_schedule(tables, *call.new_schedule)
        schedule = tables.schedule
    assert schedule is not None
    if workspace is None:
        out = torch.empty(call.out_shape, dtype=torch.float32, device=q.device)
        lse2 = torch.empty(call.out_shape[:2], dtype=torch.float32, device=q.device)
    else:
        out, lse2 = workspace.take(*call.out_shape)
    descriptors = describe_pools(k_pool, v_pool, call.block_n) if call.block_n else (None, None)
    call.launch(q, k_pool, v_pool, tile_table, schedule.entries, q_positions, out, lse2, descriptors=descriptors)
    return Splits(out, lse2, schedule.ranges, *call.units)


class _Prepared(NamedTuple):
    """What a decode call derives from shapes.

    `new_schedule`: heads, spans, split of the schedule that the tables do not bring; `units`: the integers of `Splits`;
    `block_n`: slots that the copy engine takes at once, 0 where it is left out.
    """

    launch: Launch
    new_schedule: tuple[int, int, int] | None
    out_shape: tuple[int, int, int]
    units: tuple[int, ...]
    block_n: int


def _prepare(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tables: KVTables,
    q_positions: Tensor,
    q_len: int,
    scale: float,
    window: int,
    softcap: float,
    num_spans: int | None,
    split_tiles: int,
    tile_tokens: int,
    plan: DecodePlan | None,
) -> _Prepared:
    """Check the shapes of a decode call and make its launch ready."""
    check_attention(q, k_pool, v_pool)
    check_decode(q, tables, q_positions, q_len)
    check_pools(k_pool, v_pool)
    num_rows, (_, num_q_heads, head_dim) = tables.tile_ranges.shape[0], q.shape
    num_kv_heads, v_dim = v_pool.shape[1:]
    group = num_q_heads // num_kv_heads
    packed, capacity = q_len * group, tables.tile_table.shape[0]
    wanted = num_spans if num_spans is not None or plan is None else plan.num_spans
    if plan is None:
        plan = decode_launch_plan(
            num_rows,
            num_kv_heads,
            packed,
            max(head_dim, v_dim),
            k_pool.element_size(),
            capacity,
            device_limits(q.device),
            q_len=q_len,
            tile_tokens=tile_tokens,
            deterministic=split_tiles > 0,
        )
    schedule, new_schedule = scheduled(tables, num_kv_heads, wanted, split_tiles), None
    spans = plan.num_spans if wanted is None else wanted
    if schedule is None:
        new_schedule = (num_kv_heads, spans, split_tiles)
        partials = max_partials(spans, num_rows, num_kv_heads, capacity, split_tiles)
    else:
        spans = schedule.num_spans
        partials = schedule.entries.shape[0] - spans
    launch = Launch(
        decode_kernel,
        (spans if num_rows else 0, triton.cdiv(packed, plan.block_m)),
        (float(scale / softcap if softcap else scale * LOG2_E), softcap * LOG2_E, q.stride(0), q.stride(1)),
        (
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
            window,
            softcap != 0.0,
            plan.num_stages,
        ),
        num_warps=plan.num_warps,
    )
    units = (num_rows, num_kv_heads, q_len, group, spans, split_tiles)
    # a negative scale would turn the order of the scores, of which that loop takes the largest before it scales them
    block_n = plan.block_n if plan.descriptors and scale >= 0 else 0
    return _Prepared(launch, new_schedule, (partials, packed, v_dim), units, block_n)


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
        In-place: none but the workspace. Collective: none. Graph-safe. Host sync: none. Two launches, three where the
        tables bring no schedule.
    """
    splits = decode_splits(q, k_pool, v_pool, tables, q_positions, q_len, **options)
    return combine_splits(splits, plans=options.get("plans"))

"""Keys in two loops: whole tiles that every query sees, without any mask, and the others. Device functions, no kernel.

Prefill and decode of many packed query rows share them: there the matrix unit is what is short of time, and a mask, or
an address in every thread, holds it up.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from distdec.ops.combine_triton import LOWEST
from distdec.ops.softmax_triton import fold_keys, load_some_rows


@triton.jit
def stretch_end(
    p_tiles,
    begin,
    end,
    oldest,
    newest,
    WHOLE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Return where the stretch of tiles from `begin` ends that all queries see entirely (not WHOLE: of the others).

    Such a tile is full and holds no key after the oldest query position nor one that the window hides from the newest.
    """
    at = begin
    while at < end:
        o_tile = at + tl.arange(0, SCAN)
        p_entries = p_tiles + o_tile.to(tl.int64) * 4
        length = tl.load(p_entries + 1, mask=o_tile < end, other=0)
        token = tl.load(p_entries + 2, mask=o_tile < end, other=0)
        whole = (length == TILE) & (token + TILE - 1 <= oldest)
        if WINDOW > 0:
            whole &= token > newest - WINDOW
        stops = (o_tile >= end) | (whole != WHOLE)
        past = at + SCAN
        at = tl.min(tl.where(stops, o_tile, past), 0)
        end = tl.where(at < past, at, end)
    return at


@triton.jit
def load_rows(p_rows, o_row, o_d, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows of keys or values that all exist, columns past D as 0."""
    p_block = p_rows + o_row[:, None] * STRIDE + o_d[None, :]
    if D == BLOCK_D:
        return tl.load(p_block)
    return tl.load(p_block, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def attend_tiles(
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
    """Attend to the tiles [at, stop) and return the running softmax (b_max, b_total, b_acc) of `finish_softmax`.

    `b_limit` are the query positions, below 0 where a row is padding; `oldest` and `newest` bound the others.
    `score_scale` must not be negative.
    """
    SUB: tl.constexpr = TILE // BLOCK_N
    # masks take registers: smaller blocks where they are needed
    EDGE_N: tl.constexpr = BLOCK_N if BLOCK_N < 64 else 64
    EDGE_SUB: tl.constexpr = TILE // EDGE_N
    SCAN: tl.constexpr = 256
    o_n = tl.arange(0, BLOCK_N)
    o_edge = tl.arange(0, EDGE_N)
    o_d = tl.arange(0, BLOCK_D)
    o_dv = tl.arange(0, BLOCK_DV)
    b_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    b_total = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    while at < stop:
        # two loops in turn: one without any mask, for nearly all tiles of a long prompt, and one for the rest
        lo = at
        at = stretch_end(p_tiles, lo, stop, oldest, newest, True, TILE, WINDOW, SCAN)
        num_blocks = (at - lo) * SUB
        # carried one block ahead, see decode_kernel
        p_entry = p_tiles + lo.to(tl.int64) * 4
        slot = tl.load(p_entry, mask=lo < at, other=0)
        for i in tl.range(0, num_blocks, num_stages=STAGES):
            block_slot = slot + (i % SUB) * BLOCK_N
            slot = tl.load(p_entry + (tl.minimum(i + 1, num_blocks - 1) // SUB) * 4)
            # values first: the buffer written last gets the loop's barrier in front of its product, and the
            # barrier in front of the second product would let no warp group compute while another one multiplies
            if d_k is not None:
                b_v = d_v.load([block_slot, head * DV])
                b_k = d_k.load([block_slot, head * D])
            else:
                p_values = p_v + block_slot.to(tl.int64) * V_STRIDE + head * DV
                b_v = load_rows(p_values, o_n, o_dv, V_STRIDE, DV, BLOCK_DV)
                p_keys = p_k + block_slot.to(tl.int64) * K_STRIDE + head * D
                b_k = load_rows(p_keys, o_n, o_d, K_STRIDE, D, BLOCK_D)
            b_max, b_total, b_acc = fold_keys(
                b_q, b_k, b_v, None, b_max, b_total, b_acc, score_scale, cap_log2, SOFTCAP, False
            )
        lo = at
        at = stretch_end(p_tiles, lo, stop, oldest, newest, False, TILE, WINDOW, SCAN)
        num_blocks = (at - lo) * EDGE_SUB
        p_entry = p_tiles + lo.to(tl.int64) * 4
        slot = tl.load(p_entry, mask=lo < at, other=0)
        length = tl.load(p_entry + 1, mask=lo < at, other=0)
        token = tl.load(p_entry + 2, mask=lo < at, other=0)
        for i in tl.range(0, num_blocks, num_stages=STAGES):
            skip = (i % EDGE_SUB) * EDGE_N
            left = length - skip
            start = token + skip
            o_slot = slot.to(tl.int64) + skip
            p_next = p_entry + (tl.minimum(i + 1, num_blocks - 1) // EDGE_SUB) * 4
            slot = tl.load(p_next)
            length = tl.load(p_next + 1)
            token = tl.load(p_next + 2)
            m_n = o_edge < left
            p_keys = p_k + o_slot * K_STRIDE + head * D
            b_k = load_some_rows(p_keys, o_edge, m_n, o_d, K_STRIDE, D)
            p_values = p_v + o_slot * V_STRIDE + head * DV
            b_v = load_some_rows(p_values, o_edge, m_n, o_dv, V_STRIDE, DV)
            m_seen = o_edge[None, :] < tl.minimum(left, b_limit - start + 1)[:, None]
            if WINDOW > 0:
                m_seen &= o_edge[None, :] > (b_limit - WINDOW - start)[:, None]
            b_max, b_total, b_acc = fold_keys(
                b_q, b_k, b_v, m_seen, b_max, b_total, b_acc, score_scale, cap_log2, SOFTCAP, True
            )
    # padding has looked at the keys that all others see
    return b_max, tl.where(b_limit < 0, 0.0, b_total), tl.where((b_limit < 0)[:, None], 0.0, b_acc)


def describable(pool: Tensor) -> bool:
    """Say whether the copy engine can load heads of this pool: whole blocks, and rows that start at 16 bytes."""
    dim = pool.shape[2]
    row_bytes = pool.stride(0) * pool.element_size()
    whole = dim >= 16 and dim & (dim - 1) == 0 and pool.shape[0] > 0
    return whole and row_bytes % 16 == 0 and pool.data_ptr() % 16 == 0


def describe(pool: Tensor, block_n: int) -> TensorDescriptor:
    """Return a pool as the copy engine sees it: [slots, heads * D], of which it takes `block_n` slots of one head."""
    slots, heads, dim = pool.shape
    return TensorDescriptor(pool, [slots, heads * dim], [pool.stride(0), 1], [block_n, dim])


def describe_pools(
    k_pool: Tensor, v_pool: Tensor, block_n: int
) -> tuple[TensorDescriptor, TensorDescriptor] | tuple[None, None]:
    """Return both pools as the copy engine sees them, or (None, None) where it cannot read one of them."""
    if describable(k_pool) and describable(v_pool):
        return describe(k_pool, block_n), describe(v_pool, block_n)
    return None, None

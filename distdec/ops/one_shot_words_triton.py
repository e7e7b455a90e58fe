"""The kernel of `one_shot_triton` for few rows: numbers that carry the epoch themselves, and need no flag.

A row of `D` columns is cut into parts of `WIDTH`, 32 or 64, and a program of one warp joins, pushes, awaits and merges
one part of one item, so that it needs no shared memory and no other program. Item i's part p is program, and channel,
`i * PARTS + p`. A slot is the LSE in base 2, in a word, then from byte 16 on a word a column; every part has a copy of
the LSE. The protocol of words is that of `slab_triton`; the time that it saves is that of a fence and of a flag, some
1.5 us of 5, for twice the bytes.

A part need not see the other columns to know that its row has failed: `decode` marks the LSE where any column is not
finite, and so does `load_own`. A `Partial` has no such mark, and takes the other kernel. So does the deterministic
schedule, whose sums must not depend on the number of rows.

Why ranks agree to the bit: as in `one_shot_triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from distdec.ops.combine_triton import (
    LN2,
    LOG2E,
    add_sink,
    combine_block,
    flag_failure,
    fold_partials,
    unit_range,
)
from distdec.ops.fetch_triton import fetch_share
from distdec.ops.own_triton import add_own, load_own, store_own
from distdec.ops.slab_triton import Slab, channel_area, lost_sources, own_columns
from distdec.ops.splits import Splits

WORD_WARPS = 1
WIDTHS = (32, 64)
"""Columns of a part: one or two a thread. More parts join faster as long as all of them are on the device at once."""
WORD_BYTES = 640
"""Room of a slot, in a slab's words: its LSE, 64 columns, and the rest of a line of memory."""
MAX_BLOCK_ELEMENTS = 2048
"""Most floats of the tile [splits, WIDTH] that a program joins at once: 64 registers a thread."""
MAX_PUSHED_BYTES = 512 << 10
"""Most that a rank pushes in rows, which words double: 512 KiB more take the 1.4 us that the flag would, at the
372 GB/s at which two H200 read each other's memory."""


def word_width(slab: Slab, splits: Splits, payload: torch.dtype, columns: int) -> int:
    """Return the columns of a part, or 0 where the rows do not travel as words; the same on every rank.

    Args:
        columns: as in `one_shot`.

    Example: 32 rows of 128 float32 on 528 channels: 32, 128 programs; 256 rows: 64, 512 programs.
    """
    dim, num_items = splits.head_dim, splits.num_tokens * splits.num_q_heads
    if payload != torch.float32 or splits.ranges is None or splits.split_tiles > 0 or slab.words < WORD_BYTES:
        return 0
    if num_items * dim * 4 * (1 if columns else slab.num_ranks - 1) > MAX_PUSHED_BYTES:
        return 0
    return next((width for width in WIDTHS if 0 < num_items * triton.cdiv(dim, width) <= slab.channels), 0)


def word_splits_at_once(splits: Splits, width: int) -> int:
    """Return how many splits a program of `width` columns loads together."""
    return min(combine_block(splits), MAX_BLOCK_ELEMENTS // width)


@triton.jit
def as_words(b_numbers, epoch):
    """Return float32 numbers as words of 8 bytes: the epoch above, the number below."""
    return (epoch.to(tl.int64) << 32) | b_numbers.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def numbers_of(b_words):
    """Return the numbers in words."""
    return b_words.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def are_late(b_words, m_words, epoch):
    """Return 1 where a word is not of this use. Equality alone counts: a word may be of any older use."""
    return (((b_words >> 32).to(tl.int32) != epoch) & m_words).to(tl.int32)


@triton.jit
def look(p_words, m_words, p_lses, m_lses, epoch):
    """Return the words of a row's columns and LSEs as they are now, and for each whether it or its LSE is late."""
    # volatile: past the first-level cache, and a word of 8 bytes arrives whole
    b_words = tl.load(p_words, mask=m_words, other=0, volatile=True)
    b_lses = tl.load(p_lses, mask=m_lses, other=0, volatile=True)
    return b_words, b_lses, are_late(b_words, m_words, epoch) | are_late(b_lses, m_lses, epoch)


@triton.jit
def wait_for_words(p_words, m_words, p_lses, m_lses, epoch, polls):
    """Look until no word is late, or `polls` times more; return what `look` does, and whether any is late."""
    b_words, b_lses, b_late = look(p_words, m_words, p_lses, m_lses, epoch)
    late = tl.max(tl.max(b_late, 0), 0)
    while (late != 0) & (polls > 0):
        b_words, b_lses, b_late = look(p_words, m_words, p_lses, m_lses, epoch)
        late = tl.max(tl.max(b_late, 0), 0)
        polls -= 1
    return b_words, b_lses, b_late, late


@triton.jit
def merge_words(b_words, b_lses, m_lses):
    """Fold words [source, column]; return out, lse2 and whether one failed, each [column]."""
    b_lse2 = tl.where(m_lses, numbers_of(b_lses), float("-inf"))
    b_bad = tl.max((b_lse2 != b_lse2).to(tl.int32), 0)
    b_top = tl.max(b_lse2, 0)
    b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_weight = tl.exp2(b_lse2 - b_base[None, :])
    b_total = tl.sum(b_weight, 0)
    b_total = tl.where(b_top == float("-inf"), 1.0, b_total)
    return tl.sum(numbers_of(b_words) * b_weight, 0) / b_total, b_top + tl.log2(b_total), b_bad != 0


# as in `one_shot_kernel`
@triton.jit(do_not_specialize=["num_items", "rank", "out_stride", "spin_limit", "num_pieces"])
def one_shot_words_kernel(
    p_in,
    p_in_lse,
    p_ranges,
    p_out,
    p_lse,
    p_sinks,
    p_peers,
    p_state,
    p_next,
    p_q,
    p_k,
    p_v,
    p_slots,
    p_k_pool,
    p_v_pool,
    num_items,
    rank,
    out_stride,
    spin_limit,
    num_pieces,
    score_scale,
    cap_log2,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    WORDS_AT: tl.constexpr,
    WORDS: tl.constexpr,
    Q_LEN: tl.constexpr,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PUSH: tl.constexpr,
    MERGE: tl.constexpr,
    FETCHERS: tl.constexpr,
    BULK: tl.constexpr,
    THREADS: tl.constexpr,
    OWN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
):
    """Join, push, wait for and merge one part of one item; arguments as in `one_shot_kernel`, items too."""
    R: tl.constexpr = Q_LEN * G
    PARTS: tl.constexpr = (D + WIDTH - 1) // WIDTH
    c = tl.program_id(0)
    programs = num_items * PARTS
    # the outer one is decided when the kernel is compiled
    if FETCHERS > 0:  # noqa: SIM102
        if c >= programs:
            fetch_share(p_next, num_pieces, c - programs, FETCHERS, BULK, THREADS)
            return
    epoch = tl.load(p_state + c) + 1
    failed = tl.load(p_state + CHANNELS)
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < N
    # early, so that the addresses are at hand when the row is. Every rank begins with another peer, so that no link
    # carries all at once, and ends with itself
    peer = (rank + 1 + o_n) % N
    b_peers = tl.load(p_peers + peer, mask=m_n, other=0)
    mine = tl.load(p_peers + rank)
    o_w = tl.arange(0, WIDTH)
    part = c % PARTS
    o_d = part * WIDTH + o_w
    m_d = o_d < D
    unit = c // PARTS // R
    r = c // PARTS % R
    head = (unit % HKV) * G + r % G
    row = unit // HKV
    area = WORDS_AT + channel_area(c, epoch, N, WORDS)

    if PUSH:
        if OWN:
            # on its way before the partials are
            score, b_v = load_own(
                p_q,
                p_k,
                p_v,
                p_slots,
                p_k_pool,
                p_v_pool,
                row,
                head,
                score_scale,
                cap_log2,
                q_stride_token,
                q_stride_head,
                k_stride_token,
                k_stride_head,
                v_stride_token,
                v_stride_head,
                o_d,
                G,
                D,
                DK,
                BLOCK_DK,
                BLOCK_V,
                SOFTCAP,
            )
        first, count = unit_range(p_ranges, unit)
        b_out, lse2 = fold_partials(p_in, p_in_lse, first * R + r, R, count, o_d, D, BLOCK_C)
        if OWN:
            b_out, lse2 = add_own(b_out, lse2, score, b_v)
        lse2 = flag_failure(b_out, lse2)
        # after a failure nothing is pushed any more, see the protocol
        m_live = m_n & (failed == 0)
        m_sent = own_columns(head * D, o_d[None, :], m_d[None, :], peer[:, None], COLUMNS) & m_live[:, None]
        p_slot = (b_peers + (area + rank * WORDS)).to(tl.pointer_type(tl.int64))
        tl.store(p_slot[:, None] + (2 + o_w)[None, :], as_words(b_out, epoch)[None, :], mask=m_sent)
        tl.store(p_slot, as_words(lse2, epoch), mask=m_live)
        # without it a compiler may move these stores behind the wait: the peers wait for them meanwhile
        tl.debug_barrier()
        # the outer one is decided when the kernel is compiled
        if OWN:  # noqa: SIM102
            if part == 0:
                store_own(
                    p_k,
                    p_v,
                    p_slots,
                    p_k_pool,
                    p_v_pool,
                    row,
                    head,
                    k_stride_token,
                    k_stride_head,
                    v_stride_token,
                    v_stride_head,
                    G,
                    D,
                    DK,
                    BLOCK_DK,
                    BLOCK_V,
                    K_STRIDE,
                    V_STRIDE,
                )

    if MERGE:
        m_k = own_columns(head * D, o_d, m_d, rank, COLUMNS)
        p_slot = (mine + area + o_n * WORDS).to(tl.pointer_type(tl.int64))
        # the LSE once for every column, so that nothing crosses threads but the look at what is late
        p_words = p_slot[:, None] + (2 + o_w)[None, :]
        p_lses = p_slot[:, None] + (0 * o_w)[None, :]
        m_words = m_n[:, None] & m_k[None, :]
        m_lses = m_n[:, None] & (o_w >= 0)[None, :]
        polls = tl.where(failed != 0, 0, spin_limit)
        b_words, b_lses, b_late, lost = wait_for_words(p_words, m_words, p_lses, m_lses, epoch, polls)
        if (lost != 0) | (failed != 0):
            lost = tl.sum(tl.max(b_late, 1) << o_n, 0)
            lost = lost_sources(p_peers, p_state, lost, failed, N, CHANNELS)
        b_out, b_lse2, b_bad = merge_words(b_words, b_lses, m_lses)
        if HAS_SINKS:
            b_out, b_lse2 = add_sink(b_out, b_lse2, tl.load(p_sinks + head).to(tl.float32) * LOG2E)
        b_bad |= lost != 0
        token = row * Q_LEN + r // G
        o_out = out_stride.to(tl.int64) * token + head * D + o_d
        if COLUMNS > 0:
            o_out -= rank * COLUMNS
        tl.store(p_out + o_out, tl.where(b_bad, float("nan"), b_out).to(p_out.dtype.element_ty), mask=m_k)
        o_lse = token * (HKV * G) + head + 0 * o_w
        tl.store(p_lse + o_lse, tl.where(b_bad, float("nan"), b_lse2 * LN2), mask=o_d == 0)
        tl.store(p_state + c, epoch)

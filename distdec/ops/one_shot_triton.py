"""One kernel that joins the local splits, pushes the result into the peers' memory, waits for theirs and merges.

A launch of n items, an item being one query head of one token, runs `min(n, channels)` programs; program c works on
items c, c + programs, c + 2 programs, ... and keeps the j-th of them in slot j of channel c. A slot is the item's
output row, then its LSE in base 2 and, where the payload has 8 bits, its scale. Slab, channels and the protocol that
keeps ranks in step are those of `slab_triton`.

Why ranks agree to the bit. Payloads are read back from the slab, the own one too, so each rank folds the same rounded
numbers in the same order with the same instructions.

Source of the arithmetic: with `M = max_r lse2_r`, `w_r = 2^(lse2_r - M)`: `out = sum w_r out_r / sum w_r`,
`lse2 = M + log2 sum w_r`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from distdec.ops.combine_triton import (
    LN2,
    LOG2E,
    add_sink,
    combine_block,
    flag_failure,
    fold_partials,
    unit_range,
)
from distdec.ops.fetch_triton import fetch_of, fetch_share
from distdec.ops.launch_triton import Launch, Plans
from distdec.ops.one_shot_words_triton import (
    WORD_WARPS,
    one_shot_words_kernel,
    word_splits_at_once,
    word_width,
)
from distdec.ops.own import OwnTokens
from distdec.ops.own_triton import add_own, load_own, own_constants, own_numbers, own_tensors, store_own
from distdec.ops.packed import FP8_MAX as FP8_MAX_VALUE
from distdec.ops.packed_triton import row_scale, scaled_down
from distdec.ops.slab_triton import (
    MAX_REGISTERS,
    NUM_WARPS,
    Slab,
    channel_area,
    channel_flags,
    own_columns,
    raise_flags,
    wait_for_all,
)
from distdec.ops.splits import Splits

FP8_MAX = tl.constexpr(FP8_MAX_VALUE)
LSE_BYTES = 16
"""Room of the LSE and the scale behind a slot's output row; 16 keeps the rows aligned."""
MAX_BLOCK_ELEMENTS = 8192
"""Most floats of the tile [splits, Dv] that a program joins at once: 64 registers a thread, 118 in all."""
PAYLOADS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float8_e4m3fn: tl.float8e4nv}


def slot_bytes(dim: int, element_bytes: int) -> int:
    """Bytes of one slot: the row rounded up to 16 bytes, and its LSE."""
    return -(-dim * element_bytes // 16) * 16 + LSE_BYTES


def max_items(slab: Slab, dim: int, element_bytes: int) -> int:
    """Return how many rows (token, head) of `dim` elements one launch can take.

    Example: 528 channels of 15,872 bytes, 128 floats: slots of 528 bytes, 30 a channel, 15,840 rows.
    """
    return slab.channels * (slab.capacity // slot_bytes(dim, element_bytes))


@triton.jit
def push_row(
    p_peers,
    at,
    b_out,
    lse2,
    scale,
    live,
    column,
    o_d,
    m_d,
    rank,
    N: tl.constexpr,
    SLOT: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Store a row, in the type it travels in, its lse2 and scale into slot `at` of every slab if `live`."""
    for k in tl.static_range(N):
        # every rank begins with another peer, so that no link carries all at once
        peer = (rank + k) % N
        slot = tl.load(p_peers + peer) + at
        m_k = own_columns(column, o_d, m_d, peer, COLUMNS) & live
        tl.store(slot.to(tl.pointer_type(b_out.dtype)) + o_d, b_out, mask=m_k)
        tl.store((slot + (SLOT - 16)).to(tl.pointer_type(tl.float32)), lse2, mask=live)
        if SCALED:
            tl.store((slot + (SLOT - 12)).to(tl.pointer_type(tl.float32)), scale, mask=live)


@triton.jit
def merge_row(
    at,
    o_d,
    m_d,
    N: tl.constexpr,
    CAPACITY: tl.constexpr,
    SLOT: tl.constexpr,
    PAYLOAD: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Fold the slots `at`, `at + CAPACITY`, ... of all sources in rank order; return out, lse2, whether one failed."""
    top = tl.full([], float("-inf"), tl.float32)
    bad = tl.full([], 0, tl.int1)
    for k in tl.static_range(N):
        lse2 = tl.load((at + (k * CAPACITY + SLOT - 16)).to(tl.pointer_type(tl.float32)), volatile=True)
        bad |= lse2 != lse2
        top = tl.maximum(top, lse2)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.full([], 0.0, tl.float32)
    b_acc = tl.zeros_like(o_d).to(tl.float32)
    for k in tl.static_range(N):
        slot = at + k * CAPACITY
        lse2 = tl.load((slot + (SLOT - 16)).to(tl.pointer_type(tl.float32)), volatile=True)
        b_out = tl.load(slot.to(tl.pointer_type(PAYLOAD)) + o_d, mask=m_d, other=0.0, volatile=True)
        b_out = b_out.to(tl.float32)
        if SCALED:
            b_out *= tl.load((slot + (SLOT - 12)).to(tl.pointer_type(tl.float32)), volatile=True)
        weight = tl.exp2(lse2 - base)
        total += weight
        b_acc += b_out * weight
    total = tl.where(top == float("-inf"), 1.0, total)
    return b_acc / total, top + tl.log2(total), bad


# rank and the counts are left unspecialised: every rank must run the very same instructions
@triton.jit(do_not_specialize=["num_items", "rank", "out_stride", "spin_limit", "num_pieces"])
def one_shot_kernel(
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
    CAPACITY: tl.constexpr,
    SLOT: tl.constexpr,
    Q_LEN: tl.constexpr,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    JOINED: tl.constexpr,
    PAYLOAD: tl.constexpr,
    SCALED: tl.constexpr,
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
    """Push, wait and merge; protocol in the module's docstring.

    Item i is row `i % R` of unit `i // R`, R = Q_LEN * G, unit = row * HKV + kv head, as `decode` leaves them in its
    workspace. With JOINED the input is a `Partial` [T, Hq, D], LSE in natural log, with Q_LEN 1, HKV 1, G = Hq.
    COLUMNS: width of a rank's share of the Hq * D columns, 0 where every rank gets all.
    PUSH, MERGE: both in one launch; apart, in two launches, where all ranks are simulated one after the other.
    FETCHERS: programs, the last ones, that ask for `num_pieces` pieces at `p_next` instead.
    OWN: each token itself is added before its row is pushed, and stored while the rows are on their way; takes Q_LEN 1.
    """
    R: tl.constexpr = Q_LEN * G
    c = tl.program_id(0)
    programs = tl.num_programs(0) - FETCHERS
    # the outer one is decided when the kernel is compiled
    if FETCHERS > 0:  # noqa: SIM102
        if c >= programs:
            fetch_share(p_next, num_pieces, c - programs, FETCHERS, BULK, THREADS)
            return
    epoch = tl.load(p_state + c) + 1
    failed = tl.load(p_state + CHANNELS)
    # early, so that the addresses are at hand when the row is; nothing here waits for these three loads
    mine = tl.load(p_peers + rank)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    # slots of this channel, this parity; [source][slot] follow
    area = channel_area(c, epoch, N, CAPACITY)
    flags = channel_flags(c, N, CHANNELS, CAPACITY)

    if PUSH:
        at = area + rank * CAPACITY
        wide = tl.full([], D, tl.int64)
        # after a failure nothing is pushed any more: this rank waits for nobody now, so it could overwrite what a late
        # peer still reads; silent, it makes the peer fail too
        live = failed == 0
        for item in range(c, num_items, programs):
            unit = item // R
            r = item % R
            head = unit % HKV
            if JOINED:
                lse2 = tl.load(p_in_lse + item) * LOG2E
                b_out = tl.load(p_in + wide * item + o_d, mask=m_d, other=0.0).to(tl.float32)
                b_out = tl.where(lse2 == float("-inf"), 0.0, b_out)
            else:
                if OWN:
                    # on its way before the partials are
                    score, b_v = load_own(
                        p_q,
                        p_k,
                        p_v,
                        p_slots,
                        p_k_pool,
                        p_v_pool,
                        unit // HKV,
                        head * G + r,
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
            scale = 1.0
            if SCALED:
                scale = row_scale(b_out, FP8_MAX)
                b_out = scaled_down(b_out, scale, FP8_MAX)
            b_sent = b_out.to(PAYLOAD)
            column = (head * G + r % G) * D
            push_row(p_peers, at, b_sent, lse2, scale, live, column, o_d, m_d, rank, N, SLOT, COLUMNS, SCALED)
            at += SLOT
        raise_flags(p_peers, flags, epoch, live, rank, N, BLOCK_N)
        if OWN:
            for item in range(c, num_items, programs):
                unit = item // R
                store_own(
                    p_k,
                    p_v,
                    p_slots,
                    p_k_pool,
                    p_v_pool,
                    unit // HKV,
                    (unit % HKV) * G + item % R,
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
        lost = wait_for_all(p_peers, p_state, mine + flags, epoch, failed, spin_limit, rank, N, CHANNELS)
        at = mine + area
        for item in range(c, num_items, programs):
            unit = item // R
            r = item % R
            head = (unit % HKV) * G + r % G
            token = (unit // HKV) * Q_LEN + r // G
            m_k = own_columns(head * D, o_d, m_d, rank, COLUMNS)
            b_out, lse2, bad = merge_row(at, o_d, m_k, N, CAPACITY, SLOT, PAYLOAD, SCALED)
            if HAS_SINKS:
                b_out, lse2 = add_sink(b_out, lse2, tl.load(p_sinks + head).to(tl.float32) * LOG2E)
            bad |= lost != 0
            o_out = out_stride.to(tl.int64) * token + head * D + o_d
            if COLUMNS > 0:
                o_out -= rank * COLUMNS
            tl.store(p_out + o_out, tl.where(bad, float("nan"), b_out).to(p_out.dtype.element_ty), mask=m_k)
            tl.store(p_lse + token * (HKV * G) + head, tl.where(bad, float("nan"), lse2 * LN2))
            at += SLOT
        tl.store(p_state + c, epoch)


def splits_at_once(splits: Splits, block_d: int) -> int:
    """Return how many splits a program loads together: what an average unit has, since each round costs a latency."""
    most = max(1, MAX_BLOCK_ELEMENTS // block_d)
    if splits.split_tiles > 0:
        # fixed, so that the order of sums does not follow the batch
        return min(combine_block(splits), most)
    return min(triton.next_power_of_2(splits.num_spans // (splits.num_rows * splits.num_kv_heads) + 1), most)


def one_shot(
    slab: Slab,
    splits: Splits,
    out: Tensor,
    lse: Tensor,
    *,
    payload: torch.dtype,
    spin_limit: int,
    columns: int = 0,
    sinks: Tensor | None = None,
    own: OwnTokens | None = None,
    following: Tensor | None = None,
    push: bool = True,
    merge: bool = True,
    plans: Plans | None = None,
) -> None:
    """Launch the kernel: one launch, whatever the sizes.

    Args:
        slab: where to push, and this rank's state.
        splits: this rank's partials, joined or not.
        payload: float32, bfloat16 or float8_e4m3fn with a scale a row, as the rows travel; LSEs travel in float32.
        spin_limit: polls of flags by one program before ranks count as lost.
        columns: width of every rank's share of the flattened Hq x Dv columns; 0: every rank gets all of them.
        own: tokens to add to splits that are not joined, one a row, and to store; see `own.py`.
        following: what is read next: its first bytes are fetched into the cache meanwhile, see `fetch_triton`.
        push, merge: both; apart only where all ranks are simulated in one process.
        plans: keeps the launch for the next call of these shapes.

    Shapes:
        out: [T, Hq * Dv] or [T, own columns], unit stride along the columns; lse: [T, Hq] float32, natural log
        sinks: [Hq]

    Raises:
        ValueError: more rows than the slab takes.

    Notes:
        In-place: writes out, lse, the slabs. Collective: the ranks of the slab. Graph-safe. Host sync: none.
    """
    partial_out, partial_lse, ranges, *units = splits
    how = (payload, spin_limit, columns, push, merge, None if sinks is None else sinks.dtype)
    key = (one_shot, slab[2:], *units, ranges is None, partial_out.shape[-1], out.dtype, how)
    key = key if own is None else (*key, own.key)
    key = key if following is None else (*key, following.shape, following.dtype)
    plans = Plans() if plans is None else plans
    launch = plans.get(key)
    if launch is None:
        launch = plans.keep(key, _prepare(slab, splits, own, following, out.stride(0), *how))
    table = partial_lse if ranges is None else ranges
    tensors = (partial_out, partial_lse, table, out, lse, lse if sinks is None else sinks, slab.peers, slab.state)
    launch(*tensors, lse if following is None else following, *own_tensors(own, lse))


def _prepare(
    slab: Slab,
    splits: Splits,
    own: OwnTokens | None,
    following: Tensor | None,
    out_stride: int,
    payload: torch.dtype,
    spin_limit: int,
    columns: int,
    push: bool,
    merge: bool,
    sinks_dtype: torch.dtype | None,
) -> Launch:
    """Check that the rows fit the slab and make the launch ready."""
    assert own is None or (splits.ranges is not None and splits.q_len == 1), "own tokens join splits of one token"
    dim, size = splits.head_dim, payload.itemsize
    num_items = splits.num_tokens * splits.num_q_heads
    if num_items > max_items(slab, dim, size):
        raise ValueError(
            f"{splits.num_tokens} tokens of {splits.num_q_heads} heads of {dim} do not fit the slab: "
            f"{num_items} rows, {max_items(slab, dim, size)} at most"
        )
    width = word_width(slab, splits, payload, columns)
    num_programs = num_items * triton.cdiv(dim, width) if width else min(num_items, slab.channels)
    block_d, num_warps = (width, WORD_WARPS) if width else (triton.next_power_of_2(dim), NUM_WARPS)
    slots = (slab.words_offset, slab.words) if width else (slab.capacity, slot_bytes(dim, size))
    forms: tuple[Any, ...] = () if width else (splits.ranges is None, PAYLOADS[payload], size == 1)
    at_once = word_splits_at_once(splits, width) if width else splits_at_once(splits, block_d) if num_items else 1
    fetch = fetch_of(following, slab, num_programs)
    numbers = (num_items, slab.rank, out_stride, spin_limit, fetch.num_pieces)
    return Launch(
        one_shot_words_kernel if width else one_shot_kernel,
        (num_programs + fetch.num_programs if num_programs else 0,),
        (*numbers, *own_numbers(own)),
        (
            slab.num_ranks,
            slab.channels,
            *slots,
            splits.q_len,
            splits.num_kv_heads,
            splits.group_size,
            dim,
            block_d,
            triton.next_power_of_2(slab.num_ranks),
            at_once,
            *forms,
            columns,
            sinks_dtype is not None,
            push,
            merge,
            *fetch.constants,
            *own_constants(own),
        ),
        num_warps=num_warps,
        maxnreg=MAX_REGISTERS,
    )

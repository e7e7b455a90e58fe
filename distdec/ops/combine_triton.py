"""Join the partials of a rank's own programs on the device. Contract in `combine.py`.

The device functions here are the one description of how partials are folded and how a row is finished; the kernels
that merge across ranks build on them too. Which partials belong to a unit: `spans.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from distdec.ops.launch_triton import Launch, Plans
from distdec.ops.own import OwnTokens
from distdec.ops.own_triton import add_own, load_own, own_constants, own_numbers, own_tensors, store_own
from distdec.ops.partial import Partial
from distdec.ops.splits import Splits

# finite, so that "no key yet" minus "no key yet" is 0 and not NaN; every score is at least this
LOWEST = tl.constexpr(-3.4028234663852886e38)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def unit_range(p_ranges, unit):
    """Return (first, count) of one unit's partials."""
    first = tl.load(p_ranges + 2 * unit)
    return first.to(tl.int64), tl.load(p_ranges + 2 * unit + 1) - first


@triton.jit
def fold_partials(p_out, p_lse2, start, step, count, o_d, DV: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return (out, lse2) of one row's columns `o_d` over `count` partials, which lie at `start`, `start + step`, ...

    Where lse2 is -inf, the partial's out is ignored, whatever it is. NaN in lse2 gives NaN.
    """
    o_c = tl.arange(0, BLOCK_C)
    top = LOWEST
    total = 0.0
    b_acc = tl.zeros([o_d.shape[0]], tl.float32)
    done = 0
    while done < count:
        m_c = done + o_c < count
        o_at = start + (done + o_c).to(tl.int64) * step
        b_lse2 = tl.load(p_lse2 + o_at, mask=m_c, other=float("-inf"))
        b_out = tl.load(p_out + o_at[:, None] * DV + o_d[None, :], mask=m_c[:, None] & (o_d < DV)[None, :], other=0.0)
        b_out = tl.where((b_lse2 == float("-inf"))[:, None], 0.0, b_out)
        new_top = tl.maximum(top, tl.max(b_lse2, 0))
        b_weight = tl.exp2(b_lse2 - new_top)
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(b_weight, 0)
        b_acc = b_acc * decay + tl.sum(b_out * b_weight[:, None], 0)
        top = new_top
        done += BLOCK_C
    safe = tl.where(total == 0.0, 1.0, total)
    return b_acc / safe, tl.where(total == 0.0, float("-inf"), top + tl.log2(safe))


@triton.jit
def flag_failure(b_out, lse2):
    """Return lse2, NaN where the row holds a number that is not finite: that fails the whole row."""
    bad = tl.max((tl.abs(b_out) < float("inf")).to(tl.int32) ^ 1, 0)
    return tl.where((bad != 0) | (lse2 == float("inf")), float("nan"), lse2)


@triton.jit
def add_sink(b_out, lse2, sink):
    """Add one more term of the softmax, without a value; a row without keys stays one."""
    seen = lse2 != float("-inf")
    top = tl.where(seen, tl.maximum(lse2, sink), 0.0)
    weight = tl.exp2(lse2 - top)
    total = tl.where(seen, weight + tl.exp2(sink - top), 1.0)
    return b_out * (weight / total), tl.where(seen, top + tl.log2(total), lse2)


@triton.jit
def finish_row(b_out, lse2, p_sink, HAS_SINKS: tl.constexpr):
    """Return what a layer hands on: a failed row is NaN throughout, and the sink, in natural log, is counted once."""
    lse2 = flag_failure(b_out, lse2)
    if HAS_SINKS:
        b_out, lse2 = add_sink(b_out, lse2, tl.load(p_sink).to(tl.float32) * LOG2E)
    return tl.where(lse2 != lse2, float("nan"), b_out), lse2


@triton.jit
def combine_kernel(
    p_partial_out,
    p_partial_lse2,
    p_ranges,
    p_out,
    p_lse,
    p_sinks,
    p_q,
    p_k,
    p_v,
    p_slots,
    p_k_pool,
    p_v_pool,
    score_scale,
    cap_log2,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    Q_LEN: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_C: tl.constexpr,
    FINISH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OWN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DK: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
):
    """Join one query token's partials on one query head, for `BLOCK_DV` columns.

    With OWN, which takes Q_LEN 1, the token itself is added, and stored.
    """
    ROWS: tl.constexpr = Q_LEN * GROUP
    i_out = tl.program_id(0)
    i_part = tl.program_id(1)
    o_d = i_part * BLOCK_DV + tl.arange(0, BLOCK_DV)
    q_head = i_out % (HKV * GROUP)
    i_token = i_out // (HKV * GROUP)
    first, count = unit_range(p_ranges, i_token // Q_LEN * HKV + q_head // GROUP)
    start = first * ROWS + (i_token % Q_LEN) * GROUP + q_head % GROUP
    if OWN:
        # on its way before the partials are
        score, b_v = load_own(
            p_q,
            p_k,
            p_v,
            p_slots,
            p_k_pool,
            p_v_pool,
            i_token,
            q_head,
            score_scale,
            cap_log2,
            q_stride_token,
            q_stride_head,
            k_stride_token,
            k_stride_head,
            v_stride_token,
            v_stride_head,
            o_d,
            GROUP,
            DV,
            DK,
            BLOCK_DK,
            BLOCK_V,
            SOFTCAP,
        )
    b_out, lse2 = fold_partials(p_partial_out, p_partial_lse2, start, ROWS, count, o_d, DV, BLOCK_C)
    if OWN:
        b_out, lse2 = add_own(b_out, lse2, score, b_v)
    if FINISH:
        b_out, lse2 = finish_row(b_out, lse2, p_sinks + q_head, HAS_SINKS)
    tl.store(p_out + i_out.to(tl.int64) * DV + o_d, b_out.to(p_out.dtype.element_ty), mask=o_d < DV)
    tl.store(p_lse + i_out, lse2 * LN2, mask=i_part == 0)
    # the outer one is decided when the kernel is compiled
    if OWN:  # noqa: SIM102
        if i_part == 0:
            store_own(
                p_k,
                p_v,
                p_slots,
                p_k_pool,
                p_v_pool,
                i_token,
                q_head,
                k_stride_token,
                k_stride_head,
                v_stride_token,
                v_stride_head,
                GROUP,
                DV,
                DK,
                BLOCK_DK,
                BLOCK_V,
                K_STRIDE,
                V_STRIDE,
            )


@triton.jit
def combine_splits_kernel(
    p_partial_out,
    p_partial_lse2,
    p_out,
    p_lse,
    num_outputs,
    SPLITS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Join output `i`'s partials, which lie at `i`, `i + num_outputs`, ...: the splits of a prefill."""
    i_out = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BLOCK_DV)
    b_out, lse2 = fold_partials(p_partial_out, p_partial_lse2, i_out, num_outputs, SPLITS, o_d, DV, BLOCK_C)
    tl.store(p_out + i_out * DV + o_d, b_out, mask=o_d < DV)
    tl.store(p_lse + i_out, lse2 * LN2)


@triton.jit(do_not_specialize=["rank_stride_lse", "num_columns"])
def fold_ranks_kernel(
    p_in,
    p_in_lse,
    p_scales,
    p_out,
    p_lse,
    p_sinks,
    rank_stride,
    rank_stride_lse,
    first_column,
    num_columns,
    RANKS: tl.constexpr,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Fold one row (token, head) of every rank in rank order and finish it; LSEs are natural here.

    WIDTH: columns of a token in the input where it holds a stretch of them, `num_columns` from `first_column` on; 0
    where rows are whole.
    """
    i_out = tl.program_id(0)
    o_d = tl.arange(0, BLOCK_DV)
    m_d = o_d < DV
    o_in = i_out.to(tl.int64) * DV + o_d
    o_out = o_in
    if WIDTH > 0:
        token = (i_out // HEADS).to(tl.int64)
        o_column = (i_out % HEADS) * DV + o_d - first_column
        m_d = m_d & (o_column >= 0) & (o_column < num_columns)
        o_in = token * WIDTH + o_column
        o_out = token * num_columns + o_column
    top = tl.load(p_in_lse + i_out) * LOG2E
    for rank in tl.static_range(1, RANKS):
        top = tl.maximum(top, tl.load(p_in_lse + rank * rank_stride_lse.to(tl.int64) + i_out) * LOG2E)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    b_acc = tl.zeros([BLOCK_DV], tl.float32)
    for rank in tl.static_range(RANKS):
        o_lse = rank * rank_stride_lse.to(tl.int64) + i_out
        lse2 = tl.load(p_in_lse + o_lse) * LOG2E
        b_out = tl.load(p_in + rank * rank_stride.to(tl.int64) + o_in, mask=m_d, other=0.0).to(tl.float32)
        if SCALED:
            b_out *= tl.load(p_scales + o_lse)
        b_out = tl.where(lse2 == float("-inf"), 0.0, b_out)
        weight = tl.exp2(lse2 - base)
        total += weight
        b_acc += b_out * weight
    # a maximum may swallow a NaN, but its weight is NaN, and so is infinity times 0: both are found below
    total = tl.where(total == 0.0, 1.0, total)
    b_out, lse2 = finish_row(
        b_acc / total, base + tl.where(top == float("-inf"), top, tl.log2(total)), p_sinks + i_out % HEADS, HAS_SINKS
    )
    # an LSE of NaN reaches the sum by its weight, in columns that are not here too
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=m_d)
    tl.store(p_lse + i_out, lse2 * LN2)


def combine(
    partial_out: Tensor, partial_lse2: Tensor, ranges: Tensor, num_kv_heads: int, q_len: int, group_size: int
) -> Partial:
    """Join the partials of every unit; see `distdec.ops.combine.combine`."""
    rows = ranges.shape[0] // num_kv_heads
    return combine_splits(Splits(partial_out, partial_lse2, ranges, rows, num_kv_heads, q_len, group_size))


def combine_splits(
    splits: Splits,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    finish: bool = False,
    sinks: Tensor | None = None,
    own: OwnTokens | None = None,
    plans: Plans | None = None,
) -> Partial:
    """Join what `decode_splits` left, with one program or more per query token and query head.

    Args:
        out, lse: where to write, out in any floating dtype; None allocates float32.
        finish: turn rows that hold NaN or +inf into NaN throughout, and add the sinks: what a layer on one rank
            hands on.
        own: tokens to add, one a row, and to store; see `own.py`.
        plans: keeps the launch for the next call of these shapes.
    """
    partial_out, partial_lse2, ranges, *units = splits
    assert ranges is not None, "joined already"
    dim, device = splits.head_dim, partial_out.device
    if out is None:
        out = torch.empty((splits.num_tokens, splits.num_q_heads, dim), dtype=torch.float32, device=device)
    if lse is None:
        lse = torch.empty((splits.num_tokens, splits.num_q_heads), dtype=torch.float32, device=device)
    key = (combine_splits, *units, dim, out.dtype, out.device, finish, None if sinks is None else sinks.dtype)
    key = key if own is None else (*key, own.key)
    plans = Plans() if plans is None else plans
    launch = plans.get(key)
    if launch is None:
        assert own is None or splits.q_len == 1, "own tokens join splits of one token"
        launch = plans.keep(key, _prepare_combine(splits, finish, sinks is not None, own))
    launch(partial_out, partial_lse2, ranges, out, lse, lse if sinks is None else sinks, *own_tensors(own, lse))
    return Partial(out, lse)


def _prepare_combine(splits: Splits, finish: bool, has_sinks: bool, own: OwnTokens | None) -> Launch:
    """Make the launch of a combine ready.

    Few rows are cut into columns, since a program of one warp adds partials without a barrier: on an H200 the join of
    32 partials of 32 heads took 2.1 us in four parts of a warp, 2.9 in one of four warps; from 1,024 heads on two parts
    and then one are faster. The deterministic schedule has four always: the order of a sum follows the tile's layout.
    """
    dim, num_outputs = splits.head_dim, splits.num_tokens * splits.num_q_heads
    block_dv = triton.next_power_of_2(dim)
    parts = 4 if num_outputs <= 512 or splits.split_tiles > 0 else 2 if num_outputs <= 1024 else 1
    width = max(min(32, block_dv), block_dv // parts)
    block = combine_block(splits)
    constants = (splits.num_kv_heads, splits.group_size, splits.q_len, dim, width, block, finish)
    return Launch(
        combine_kernel,
        (num_outputs, triton.cdiv(dim, width)),
        own_numbers(own),
        (*constants, finish and has_sinks, *own_constants(own)),
        num_warps=max(1, min(4, block * width // 1024)),
    )


def fold_ranks(
    outs: Tensor,
    lses: Tensor,
    *,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
    head_dim: int = 0,
    first_column: int = 0,
    plans: Plans | None = None,
) -> None:
    """Fold the partials of all ranks in rank order and finish them; see `distdec.ops.combine.fold_ranks`.

    Args:
        plans: keeps the launch for the next call of these shapes.
    """
    options = (first_column, scales is not None, None if sinks is None else sinks.dtype)
    shapes = (outs.shape, outs.stride(), lses.shape, lses.stride(), out.shape)
    key = (fold_ranks, shapes, outs.dtype, out.dtype, out.device, head_dim, options)
    plans = Plans() if plans is None else plans
    launch = plans.get(key)
    if launch is None:
        num_ranks, tokens, heads = lses.shape
        if outs[0].numel() and not (outs[0].is_contiguous() and lses[0].is_contiguous() and out.is_contiguous()):
            raise ValueError(f"expected dense rows of each rank, got strides {outs.stride()} and {lses.stride()}")
        dim, width = (head_dim, outs.shape[2]) if head_dim else (outs.shape[3], 0)
        block_dv = triton.next_power_of_2(dim)
        launch = Launch(
            fold_ranks_kernel,
            (tokens * heads,),
            (outs.stride(0), lses.stride(0), first_column, out.shape[1] if head_dim else heads * dim),
            (num_ranks, heads, dim, block_dv, width, scales is not None, sinks is not None),
            num_warps=1 if block_dv <= 128 else 2,
        )
        plans.keep(key, launch)
    launch(outs, lses, lses if scales is None else scales, out, lse, lse if sinks is None else sinks)


def combine_block(splits: Splits) -> int:
    """Return how many partials a program folds at once: all that a unit has, where that is at most 64.

    In the deterministic schedule it is fixed, since the order of sums must not follow the batch.
    """
    if splits.split_tiles != 0:
        return 16
    average = -(-splits.num_spans // max(1, splits.num_rows * splits.num_kv_heads))
    # a long row among others may have several times the average
    equal = splits.num_rows == 1
    return min(64, max(4 if equal else 16, triton.next_power_of_2(average if equal else 4 * average)))

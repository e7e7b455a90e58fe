"""Join the partials of a rank's own programs on the device. Contract in `combine.py`.

The device functions here are the one description of which partials belong to a unit and of how they are folded; the
kernels that merge across ranks build on them too.

A unit is one row's queries on one KV head, `u = row * Hkv + kv_head`. The tiles of all units lie on one line of
`W = cum_tiles[B] * Hkv` tiles, those of unit u from `cum_tiles[row] * Hkv + kv_head * n_row` on. With P spans in use,
at most W so that none is empty, span p owns tiles `W * p // P` to `W * (p + 1) // P - 1`, and tile x belongs to span
`((x + 1) * P - 1) // W`. The partial that span p leaves of unit u has number `p + u`: along the line p and u never
fall and one of them always rises, so the numbers are unique, and within a unit they are contiguous.

Example: rows of 3, 0 and 2 tiles, 1 KV head, P = 2: W = 5, span 0 owns tiles 0 and 1, span 1 tiles 2 to 4. Unit 0
(tiles 0 to 2) has partials 0 + 0 and 1 + 0; unit 2 (tiles 3 and 4) has partial 1 + 2.

The deterministic schedule cuts every unit at multiples of `SPLIT` tiles instead. Row b's units have
`ceil(n_b / SPLIT)` pieces each, numbered from `(cum_tiles[b] // SPLIT + b) * Hkv` on: that leaves room for all, since
`(c + n) // s + 1 >= c // s + ceil(n / s)`, without a second table of prefix sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from distdec.ops.partial import Partial

# finite, so that "no key yet" minus "no key yet" is 0 and not NaN; every score is at least this
LOWEST = tl.constexpr(-3.4028234663852886e38)
LN2 = tl.constexpr(0.6931471805599453)

FROM_TABLE = tl.constexpr(-1)
"""`SPLIT` of `combine_kernel` for ranges that are read from a table; 0 is spans, above 0 pieces."""


@triton.jit
def used_spans(line, num_spans):
    """Return how many of a grid's spans are in use on a line of W tiles: an empty span would be a hole in a range."""
    return tl.maximum(tl.minimum(line, num_spans), 1)


@triton.jit
def unit_partials(p_cum, num_rows, num_spans, row, head, HKV: tl.constexpr, SPLIT: tl.constexpr):
    """Return (first, count): the partials of one unit, see the module's docstring."""
    before = tl.load(p_cum + row).to(tl.int64)
    tiles = tl.load(p_cum + row + 1) - before
    if SPLIT > 0:
        count = (tiles + SPLIT - 1) // SPLIT
        first = (before // SPLIT + row) * HKV + head * count
    else:
        line = tl.load(p_cum + num_rows).to(tl.int64) * HKV
        num_spans = used_spans(line, num_spans)
        # without any tile the count is 0 below; 1 only keeps the division legal
        line = tl.maximum(line, 1)
        start = before * HKV + head * tiles
        first_span = ((start + 1) * num_spans - 1) // line
        last_span = ((start + tiles) * num_spans - 1) // line
        count = tl.where(tiles > 0, last_span - first_span + 1, 0)
        first = first_span + row * HKV + head
    return first, count.to(tl.int32)


@triton.jit
def fold_partials(p_out, p_lse2, start, step, count, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return (out [BLOCK_DV], lse2) of one row over `count` partials, which lie at `start`, `start + step`, ...

    Where lse2 is -inf, the partial's out is ignored, whatever it is. NaN in lse2 gives NaN.
    """
    o_c = tl.arange(0, BLOCK_C)
    o_d = tl.arange(0, BLOCK_DV)
    top = LOWEST
    total = 0.0
    b_acc = tl.zeros([BLOCK_DV], tl.float32)
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


@triton.jit(do_not_specialize=["num_rows", "num_spans"])
def combine_kernel(
    p_partial_out,
    p_partial_lse2,
    p_ranges,
    p_out,
    p_lse,
    num_rows,
    num_spans,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    Q_LEN: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Join one query token's partials on one query head. `p_ranges` is the table of ranges, or `cum_tiles`."""
    i_out = tl.program_id(0).to(tl.int64)
    q_head = (i_out % (HKV * GROUP)).to(tl.int32)
    i_token = (i_out // (HKV * GROUP)).to(tl.int32)
    row = i_token // Q_LEN
    head = q_head // GROUP
    if SPLIT < 0:
        unit = row * HKV + head
        first = tl.load(p_ranges + 2 * unit).to(tl.int64)
        count = tl.load(p_ranges + 2 * unit + 1) - first.to(tl.int32)
    else:
        first, count = unit_partials(p_ranges, num_rows, num_spans, row, head, HKV, SPLIT)
    ROWS: tl.constexpr = Q_LEN * GROUP
    start = first * ROWS + (i_token % Q_LEN) * GROUP + q_head % GROUP
    b_out, lse2 = fold_partials(p_partial_out, p_partial_lse2, start, ROWS, count, DV, BLOCK_DV, BLOCK_C)
    o_d = tl.arange(0, BLOCK_DV)
    tl.store(p_out + i_out * DV + o_d, b_out, mask=o_d < DV)
    tl.store(p_lse + i_out, lse2 * LN2)


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
    b_out, lse2 = fold_partials(p_partial_out, p_partial_lse2, i_out, num_outputs, SPLITS, DV, BLOCK_DV, BLOCK_C)
    o_d = tl.arange(0, BLOCK_DV)
    tl.store(p_out + i_out * DV + o_d, b_out, mask=o_d < DV)
    tl.store(p_lse + i_out, lse2 * LN2)


def combine(
    partial_out: Tensor, partial_lse2: Tensor, ranges: Tensor, num_kv_heads: int, q_len: int, group_size: int
) -> Partial:
    """Join the partials of every unit, their ranges read from a table; see `distdec.ops.combine.combine`."""
    rows = ranges.shape[0] // num_kv_heads
    return launch_combine(
        partial_out, partial_lse2, ranges, rows, num_kv_heads, q_len, group_size, num_spans=0, split_tiles=-1
    )


def launch_combine(
    partial_out: Tensor,
    partial_lse2: Tensor,
    ranges: Tensor,
    num_rows: int,
    num_kv_heads: int,
    q_len: int,
    group_size: int,
    *,
    num_spans: int,
    split_tiles: int,
) -> Partial:
    """Launch one program per query token and query head.

    Args:
        ranges: the table of ranges where split_tiles is -1, else `cum_tiles`, from which the kernel works them out.
        num_spans, split_tiles: of the schedule that made the partials.
    """
    dim = partial_out.shape[2]
    tokens, heads = num_rows * q_len, num_kv_heads * group_size
    out = torch.empty((tokens, heads, dim), dtype=torch.float32, device=partial_out.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=partial_out.device)
    if tokens:
        combine_kernel[(tokens * heads,)](
            partial_out,
            partial_lse2,
            ranges,
            out,
            lse,
            num_rows,
            num_spans,
            num_kv_heads,
            group_size,
            q_len,
            dim,
            triton.next_power_of_2(dim),
            combine_block(num_rows * num_kv_heads, num_spans, split_tiles),
            split_tiles,
            num_warps=4,
        )
    return Partial(out, lse)


def combine_block(num_units: int, num_spans: int, split_tiles: int) -> int:
    """Return how many partials a program folds at once: what an average unit has, 4 to 32.

    In the deterministic schedule it is fixed, since the order of sums must not follow the batch.
    """
    if split_tiles != 0:
        return 16
    return min(32, max(4, triton.next_power_of_2(num_spans // max(1, num_units) + 1)))

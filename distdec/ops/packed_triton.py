"""Pack a partial for its way to other ranks in one launch. Contract in `packed.py`."""

import triton
import triton.language as tl
from torch import Tensor

from distdec.ops.combine_triton import flag_failure
from distdec.ops.launch_triton import Launch, Plans
from distdec.ops.packed import FP8_MAX, Packing


@triton.jit
def row_scale(b_out, FP8_MAX: tl.constexpr):
    """Return what a row is divided by, so that its largest element becomes the largest number of the wire type."""
    scale = tl.max(tl.abs(b_out), 0) / FP8_MAX
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def scaled_down(b_out, scale, FP8_MAX: tl.constexpr):
    """Return the row as it is rounded to 8 bits: a quotient may lie a little above the largest number."""
    return tl.minimum(tl.maximum(b_out / scale, -FP8_MAX), FP8_MAX)


@triton.jit
def pack_kernel(
    p_in,
    p_in_lse,
    p_out,
    p_lse,
    p_scales,
    message_stride,
    message_stride_lse,
    MESSAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    FP8_MAX: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Write one row (token, head) into all messages, each with its columns of the row; strides are in elements."""
    i_in = tl.program_id(0)
    token = (i_in // HEADS).to(tl.int64)
    o_d = tl.arange(0, BLOCK_DV)
    m_d = o_d < DV
    lse = tl.load(p_in_lse + i_in)
    b_out = tl.load(p_in + i_in.to(tl.int64) * DV + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_out = tl.where(lse == float("-inf"), 0.0, b_out)
    lse = flag_failure(b_out, lse)
    b_out = tl.where(lse != lse, 0.0, b_out)
    if SCALED:
        scale = row_scale(b_out, FP8_MAX)
        b_out = scaled_down(b_out, scale, FP8_MAX)
    b_sent = b_out.to(p_out.dtype.element_ty)
    o_column = (i_in % HEADS) * DV + o_d
    for n in tl.static_range(MESSAGES):
        m_n = m_d & (o_column >= n * COLUMNS) & (o_column < (n + 1) * COLUMNS)
        tl.store(p_out + n * message_stride.to(tl.int64) + token * COLUMNS + (o_column - n * COLUMNS), b_sent, mask=m_n)
        o_lse = n * message_stride_lse.to(tl.int64) + i_in
        tl.store(p_lse + o_lse, lse)
        if SCALED:
            tl.store(p_scales + o_lse, scale)


def pack(out: Tensor, lse: Tensor, messages: Tensor, packing: Packing, *, plans: Plans | None = None) -> None:
    """Write a partial into messages; see `distdec.ops.packed.pack`. Padding columns keep what they held.

    Args:
        plans: keeps the launch for the next call of these shapes.
    """
    lses, scales, outs = packing.parts(messages)
    out, lse = out.contiguous(), lse.contiguous()
    key = (pack, packing, messages.shape, out.dtype, out.device)
    plans = Plans() if plans is None else plans
    launch = plans.get(key)
    if launch is None:
        block_dv = triton.next_power_of_2(packing.head_dim)
        launch = Launch(
            pack_kernel,
            (packing.num_tokens * packing.num_heads,),
            (outs.stride(0), lses.stride(0)),
            (
                messages.shape[0],
                packing.num_columns,
                packing.num_heads,
                packing.head_dim,
                block_dv,
                FP8_MAX,
                scales is not None,
            ),
            num_warps=1 if block_dv <= 128 else 2,
        )
        plans.keep(key, launch)
    launch(out, lse, outs, lses, lses if scales is None else scales)

"""The softmax over blocks of keys that decode and prefill share: device functions, no kernel."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Return tanh without cancellation near 0 and without overflow: sign(x) (1 - e) / (1 + e), e = exp(-2 |x|)."""
    b_e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    b_y = (1.0 - b_e) / (1.0 + b_e)
    return tl.where(x < 0, -b_y, b_y)


@triton.jit
def load_some_rows(p_rows, o_n, m_n, o_d, STRIDE: tl.constexpr, D: tl.constexpr):
    """Return the rows where `m_n`, zeros elsewhere: slots past a tile may hold NaN or lie past the pool."""
    return tl.load(p_rows + o_n[:, None] * STRIDE + o_d[None, :], mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def fold_keys(
    b_q,
    b_k,
    b_v,
    m_seen,
    b_max,
    b_total,
    b_acc,
    score_scale,
    cap_log2,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold one block of keys into a running softmax in base 2 and return (b_max, b_total, b_acc).

    `score_scale` is scale * log2(e), not negative unless MASKED; with a softcap it is scale / softcap and `cap_log2` is
    softcap * log2(e). Where all keys are seen, scores are scaled on the way into exp2, one multiply-add for both.
    """
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if SOFTCAP:
        b_s = tanh(b_s * score_scale)
        score_scale = cap_log2
    if MASKED:
        # scaled first: a scale of 0 would make NaN of -inf
        b_s = tl.where(m_seen, b_s * score_scale, float("-inf"))
        b_max_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_max_new[:, None])
    else:
        b_max_new = tl.maximum(b_max, tl.max(b_s, 1) * score_scale)
        b_p = tl.exp2(b_s * score_scale - b_max_new[:, None])
    b_decay = tl.exp2(b_max - b_max_new)
    b_total = b_total * b_decay + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_decay[:, None], input_precision="ieee")
    return b_max_new, b_total, b_acc


@triton.jit
def finish_softmax(b_max, b_total, b_acc):
    """Return (out, lse2) of a running softmax; a row that has seen no key gets 0 and -inf."""
    b_safe = tl.where(b_total == 0.0, 1.0, b_total)
    return b_acc / b_safe[:, None], tl.where(b_total == 0.0, float("-inf"), b_max + tl.log2(b_safe))

"""Attention of a few query tokens per row over the keys that this rank holds: contract and PyTorch reference.

The reference walks a row's tiles with a running softmax, in float32, reading slices of the pool in place. It never
holds scores of more than one tile times `MAX_BLOCK_TOKENS` query tokens, whatever the context.
"""

import math
from typing import Any

import torch
from torch import Tensor

from distdec.ops.partial import Partial
from distdec.ops.tables import KVTables

MAX_Q_LEN = 16
"""Most query tokens a row may bring to `decode`; longer slices go to `prefill`."""

MAX_BLOCK_TOKENS = 128
"""Query tokens that attend at once in the reference: bounds the scores it holds."""


def decode(
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
    workspace: Any = None,
    split_tiles: int = 0,
) -> Partial:
    """Attend with `q_len` query tokens in every row; row b's tokens are `q[b * q_len : (b + 1) * q_len]`.

    Query token t of row b sees the key at position p iff the key is in one of row b's tiles, `p <= q_positions[t]`,
    and `window == 0` or `p > q_positions[t] - window`. Scores are `scale * q.k`, then
    `softcap * tanh(score / softcap)` where softcap is not 0, then masked. Query head h reads KV head `h // G`.

    Args:
        q_len: 1 to 16 query tokens a row.
        scale: factor on q.k.
        window: sliding window in tokens, 0 for none. `tables` must hold every tile that it reaches.
        softcap: 0.0 for none.
        num_spans, workspace: how the Triton twin spreads the work; without meaning here.
        split_tiles: above 0, a row's result has the same bits whatever its batch mates and however its tokens are
            dealt into steps. The Triton twin then cuts every row at multiples of so many tiles.

    Shapes:
        q: [B * q_len, Hq, D], k_pool: [S, Hkv, D], v_pool: [S, Hkv, Dv], float32, float16 or bfloat16
        q_positions: [B * q_len] int32, global positions; -1 marks a padding token (out 0, lse -inf)
        returns `Partial`: out [B * q_len, Hq, Dv] float32, lse [B * q_len, Hq] float32, natural log

    Raises:
        ValueError: shapes that do not match, or q_len outside 1 to 16.

    Notes:
        Collective: none. Graph-safe and without host sync in the Triton twin; here the tables are read.
        Source: Flash-Decoding (Dao et al., 2023), softmax over tiles as in Milakov and Gimelshein, 2018.
    """
    check_attention(q, k_pool, v_pool)
    check_decode(q, tables, q_positions, q_len)
    out = torch.empty((*q.shape[:2], v_pool.shape[2]), dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    # one token at a time has the same bits whether it comes alone or with others, whatever the BLAS chooses
    block = 1 if split_tiles > 0 else MAX_BLOCK_TOKENS
    for row, (begin, end) in enumerate(tables.tile_ranges.tolist()):
        tiles = tables.tile_table[begin:end].tolist()
        for start in range(row * q_len, (row + 1) * q_len, block):
            some = slice(start, min(start + block, (row + 1) * q_len))
            attend(q[some], k_pool, v_pool, tiles, q_positions[some], scale, window, softcap, out[some], lse[some])
    return Partial(out, lse)


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tiles: list[list[int]],
    q_positions: Tensor,
    scale: float,
    window: int,
    softcap: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend with n query tokens of one row over its tiles; the heart of both references.

    With m the running maximum of the scores s: `l <- l exp(m_old - m) + sum exp(s - m)`, the same for `acc` with the
    values, and at the end `out = acc / l`, `lse = m + ln l`.

    Shapes:
        q: [n, Hq, D], q_positions: [n], out: [n, Hq, Dv] and lse: [n, Hq], both written
        inside: [Hkv, n * G, ...], all query heads of a KV head in one product
    """
    n, num_q_heads, head_dim = q.shape
    num_kv_heads, group = k_pool.shape[1], num_q_heads // k_pool.shape[1]
    grouped = (q.float() * scale).view(n, num_kv_heads, group, head_dim).transpose(0, 1)
    grouped = grouped.reshape(num_kv_heads, n * group, head_dim)
    m = grouped.new_full((num_kv_heads, n * group, 1), -math.inf)
    total = torch.zeros_like(m)
    acc = grouped.new_zeros(num_kv_heads, n * group, v_pool.shape[2])
    positions = q_positions.tolist()
    first, last = min(positions), max(positions)
    for slot, length, token_start, _ in tiles:
        # keys after every query, or out of every query's window, are left out of the products altogether
        skip = max(0, first - window + 1 - token_start) if window else 0
        stop = min(length, last + 1 - token_start)
        if skip >= stop:
            continue
        keys = k_pool[slot + skip : slot + stop].float()
        values = v_pool[slot + skip : slot + stop].float()
        scores = torch.bmm(grouped, keys.permute(1, 2, 0))
        if softcap:
            scores = torch.tanh_(scores.div_(softcap)).mul_(softcap)
        if token_start + stop - 1 > first or (window and token_start + skip <= last - window):
            key_positions = torch.arange(token_start + skip, token_start + stop, device=q.device)
            hidden = key_positions > q_positions[:, None]
            if window:
                hidden |= key_positions <= q_positions[:, None] - window
            scores.view(num_kv_heads, n, group, -1).masked_fill_(hidden[:, None], -math.inf)
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        # a token that has seen no key yet must not compute -inf minus -inf
        m_safe = m_new.masked_fill(m_new == -math.inf, 0.0)
        weights = scores.sub_(m_safe).exp_()
        decay = (m - m_safe).exp_()
        total = total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        acc = acc.mul_(decay).baddbmm_(weights, values.transpose(0, 1))
        m = m_new
    seen = total != 0
    acc = torch.where(seen, acc / total, 0.0)
    lse_grouped = torch.where(seen, m + total.log(), -math.inf)
    out.copy_(acc.view(num_kv_heads, n, group, -1).transpose(0, 1).reshape(out.shape))
    lse.copy_(lse_grouped.view(num_kv_heads, n, group).transpose(0, 1).reshape(lse.shape))


def check_attention(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Raise ValueError where queries and pools do not fit each other."""
    if q.dim() != 3 or k_pool.dim() != 3 or q.shape[2] != k_pool.shape[2] or q.shape[1] % k_pool.shape[1]:
        raise ValueError(
            f"expected q [T, Hq, D] and k_pool [S, Hkv, D] with Hq a multiple of Hkv, "
            f"got {list(q.shape)} and {list(k_pool.shape)}"
        )
    if v_pool.shape[:2] != k_pool.shape[:2]:
        raise ValueError(f"expected k_pool and v_pool of equal slots and heads, got {k_pool.shape} and {v_pool.shape}")


def check_decode(q: Tensor, tables: KVTables, q_positions: Tensor, q_len: int) -> None:
    """Raise ValueError where the rows of a decode call do not fit each other."""
    rows = tables.tile_ranges.shape[0]
    if not 1 <= q_len <= MAX_Q_LEN:
        raise ValueError(f"q_len must be 1 to {MAX_Q_LEN}, got {q_len}")
    if q.shape[0] != rows * q_len or q_positions.shape[0] != rows * q_len:
        raise ValueError(
            f"{rows} rows of {q_len} query tokens need {rows * q_len} tokens, "
            f"got {q.shape[0]} queries and {q_positions.shape[0]} positions"
        )

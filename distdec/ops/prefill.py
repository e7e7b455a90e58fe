"""Attention of prompt slices over the keys that this rank holds: contract and PyTorch reference."""

from typing import Any

import torch
from torch import Tensor

from distdec.ops.decode import MAX_BLOCK_TOKENS, attend, check_attention
from distdec.ops.partial import Partial
from distdec.ops.tables import KVTables


def prefill(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    tables: KVTables,
    q_positions: Tensor,
    q_indptr: Tensor,
    max_q_len: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    workspace: Any = None,
) -> Partial:
    """Attend with a slice of query tokens in every row; row b's tokens are `q[q_indptr[b] : q_indptr[b + 1]]`.

    What a query token sees and how scores are made is as in `decode`. The slice's own keys and values are in the
    pool already, those that this rank holds.

    Args:
        max_q_len: at least the longest row's number of query tokens.
        scale, window, softcap: as in `decode`.
        workspace: for the Triton twin; without meaning here.

    Shapes:
        q: [T, Hq, D], k_pool: [S, Hkv, D], v_pool: [S, Hkv, Dv], float32, float16 or bfloat16
        q_positions: [T] int32, ascending inside a row; -1 marks a padding token (out 0, lse -inf)
        q_indptr: [B + 1] int32, `q_indptr[B] <= T`; tokens from `q_indptr[B]` on are padding
        returns `Partial`: out [T, Hq, Dv] float32, lse [T, Hq] float32, natural log

    Raises:
        ValueError: shapes that do not match.

    Notes:
        Collective: none. Without host sync in the Triton twin; here the tables are read.
    """
    check_attention(q, k_pool, v_pool)
    check_prefill(q, tables, q_positions, q_indptr)
    out = torch.zeros((*q.shape[:2], v_pool.shape[2]), dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    bounds = q_indptr.tolist()
    for row, (begin, end) in enumerate(tables.tile_ranges.tolist()):
        tiles = tables.tile_table[begin:end].tolist()
        for start in range(bounds[row], bounds[row + 1], MAX_BLOCK_TOKENS):
            some = slice(start, min(start + MAX_BLOCK_TOKENS, bounds[row + 1]))
            attend(q[some], k_pool, v_pool, tiles, q_positions[some], scale, window, softcap, out[some], lse[some])
    return Partial(out, lse)


def check_prefill(q: Tensor, tables: KVTables, q_positions: Tensor, q_indptr: Tensor) -> None:
    """Raise ValueError where the rows of a prefill call do not fit each other."""
    rows = tables.tile_ranges.shape[0]
    if q_indptr.shape[0] != rows + 1 or q_positions.shape[0] != q.shape[0]:
        raise ValueError(
            f"{rows} rows of {q.shape[0]} query tokens need {rows + 1} row pointers and as many positions as tokens, "
            f"got {q_indptr.shape[0]} and {q_positions.shape[0]}"
        )

"""The importable attention layer: store this step's keys and values, attend to the local shard, merge across ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from distdec.batch import StepBatch
from distdec.merge import Merge, Merged, make_merge
from distdec.mesh import Mesh
from distdec.one_shot import OneShotMerge
from distdec.ops.partial import Partial
from distdec.sharded_cache import ShardedCache


class DistributedAttention:
    """Attention of a step's new tokens over a cache that is sharded along the sequence.

    One object serves all layers of a model. It holds no parameters: it takes the queries, keys and values that a
    model's projections made, on every rank of a kvp group the same, and returns the attention output, either all
    columns on every rank or this rank's columns (see `columns`), as the merge mode says.

    Args:
        mesh: the ranks; the merge runs over its kvp axis.
        cache: where keys and values are stored; made for the same mesh.
        merge: merge mode, or a merge object made by `make_merge`.
        out_dtype: of the output; None is the queries' dtype.

    Source: partial softmax as in FlashDecoding (Dao et al., 2023); the merge is
    `out = sum_r exp(lse_r - lse) out_r`, `lse = ln sum_r exp(lse_r)` over the ranks r.
    """

    def __init__(
        self,
        mesh: Mesh,
        cache: ShardedCache,
        *,
        merge: str | Merge = "auto",
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.mesh = mesh
        self.cache = cache
        self.merge = make_merge(merge, mesh) if isinstance(merge, str) else merge
        self.out_dtype = out_dtype

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: StepBatch,
        layer: int,
        *,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Merged:
        """Attend.

        Args:
            batch: this step's rows, from `ShardedCache.begin_step`.
            layer: whose keys and values these are.
            scale: factor on q.k; None is `1 / sqrt(D)`.
            window: a query at position t sees keys p with `t - window < p <= t`; 0 is no window.
            softcap: scores become `softcap * tanh(score / softcap)` before the mask; 0 is none.
            sinks: one extra logit a query head that takes part in the softmax without a value, counted once.

        Shapes:
            q: [T, Hq, D], k: [T, Hkv, D], v: [T, Hkv, Dv], heads of this rank, the model's dtype
            sinks: [Hq]
            returns `Merged`: out [T, columns] of the flattened Hq x Dv, lse [T, Hq] float32 (natural log, over all
            ranks, sinks included), columns (start, stop)

        Raises:
            ValueError: shapes that do not match the step or the pool.

        Notes:
            In-place: writes the pool. Collective: the merge's, over the kvp axis, on every rank, with or without
            tokens. Graph-safe. Host sync: none.
        """
        k_pool, v_pool = self.cache.pool.layer(layer)
        self._check(q, k, v, k_pool, v_pool, batch.num_tokens)
        self.cache.backend.store_kv(k, v, batch.slot_mapping, k_pool, v_pool)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out_dtype = self.out_dtype or q.dtype
        if self._fuses(q, v_pool, batch):
            part, options = batch.decode, {"scale": scale, "window": window, "softcap": softcap}
            tables = batch.tables("decode", window)
            splits = self.cache.backend.decode_splits(
                q, k_pool, v_pool, tables, batch.q_positions, part.max_q_len, **options
            )
            return self.merge.merge_splits(splits, sinks=sinks, out_dtype=out_dtype)
        partial = self._partial(q, k_pool, v_pool, batch, scale, window, softcap)
        return self.merge(partial, sinks=sinks, out_dtype=out_dtype)

    def _fuses(self, q: Tensor, v_pool: Tensor, batch: StepBatch) -> bool:
        """Tell whether the merge joins the splits of this step itself; the same on every rank."""
        return (
            isinstance(self.merge, OneShotMerge)
            and self.cache.backend.decode_splits is not None
            and batch.decode is not None
            and batch.prefill is None
            and self.merge.fits(batch.num_tokens, q.shape[1], v_pool.shape[-1])
        )

    def _partial(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: StepBatch, scale: float, window: int, softcap: float
    ) -> Partial:
        ops = self.cache.backend
        parts = []
        if batch.decode is not None:
            part = batch.decode
            parts.append(
                ops.decode(
                    q[: part.num_tokens],
                    k_pool,
                    v_pool,
                    batch.tables("decode", window),
                    batch.q_positions[: part.num_tokens],
                    part.max_q_len,
                    scale=scale,
                    window=window,
                    softcap=softcap,
                )
            )
        if batch.prefill is not None:
            part = batch.prefill
            parts.append(
                ops.prefill(
                    q[part.first_token :],
                    k_pool,
                    v_pool,
                    batch.tables("prefill", window),
                    batch.q_positions[part.first_token :],
                    part.q_indptr,
                    part.max_q_len,
                    scale=scale,
                    window=window,
                    softcap=softcap,
                )
            )
        if not parts:
            # a step without tokens still enters the merge, so that ranks never disagree on the collectives
            shape = (0, q.shape[1], v_pool.shape[-1])
            return Partial(q.new_zeros(shape, dtype=torch.float32), q.new_zeros(shape[:2], dtype=torch.float32))
        if len(parts) == 1:
            return parts[0]
        return Partial(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))

    def _check(self, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, tokens: int) -> None:
        want_k, want_v = (tokens, *k_pool.shape[1:]), (tokens, *v_pool.shape[1:])
        if tuple(k.shape) != want_k or tuple(v.shape) != want_v:
            raise ValueError(
                f"expected k {want_k} and v {want_v} for this step and pool, got {tuple(k.shape)} and {tuple(v.shape)}"
            )
        heads, head_dim = k_pool.shape[1:]
        if q.dim() != 3 or q.shape[0] != tokens or q.shape[2] != head_dim or q.shape[1] % heads:
            raise ValueError(f"expected q [{tokens}, a multiple of {heads} heads, {head_dim}], got {tuple(q.shape)}")

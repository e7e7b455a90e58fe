"""The importable attention layer: store this step's keys and values, attend to the local shard, merge across ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distdec.batch import StepBatch
from distdec.merge import CollectiveMerge, Merge, Merged, make_merge
from distdec.merge_choice import deterministic_mode
from distdec.mesh import Mesh
from distdec.one_shot import OneShotMerge
from distdec.ops.own import OwnTokens, add_own
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

    Raises:
        ValueError: a merge whose bits follow the size of a step, with a deterministic cache.

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
        if cache.layout.deterministic:
            mode = deterministic_mode(merge if isinstance(merge, str) else merge.mode)
            merge = mode if isinstance(merge, str) else merge
        self.merge = make_merge(merge, mesh) if isinstance(merge, str) else merge
        self.out_dtype = out_dtype
        self._checked: tuple[Any, ...] = ()

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
        following: Tensor | None = None,
    ) -> Merged:
        """Attend.

        Args:
            batch: this step's rows, from `ShardedCache.begin_step`.
            layer: whose keys and values these are.
            scale: factor on q.k; None is `1 / sqrt(D)`.
            window: a query at position t sees keys p with `t - window < p <= t`; 0 is no window.
            softcap: scores become `softcap * tanh(score / softcap)` before the mask; 0 is none.
            sinks: one extra logit a query head that takes part in the softmax without a value, counted once.
            following: a weight that is read next; a merge of one kernel fetches its first bytes into the device's cache
                while the partials of decode rows are on their way.

        Shapes:
            q: [T, Hq, D], k: [T, Hkv, D], v: [T, Hkv, Dv], heads of this rank, the model's dtype
            sinks: [Hq]
            returns `Merged`: out [T, columns] of the flattened Hq x Dv, lse [T, Hq] float32 (natural log, over all
            ranks, sinks included), columns (start, stop)

        Raises:
            ValueError: shapes, dtypes or devices that do not match the step or the pool; a batch that is not the
                cache's last one; a negative scale or softcap.
            RuntimeError: a gradient is asked for.

        Notes:
            In-place: writes the pool. Collective: the merge's, over the kvp axis, on every rank, with or without
            tokens. Graph-safe. Host sync: none.
        """
        k_pool, v_pool = self.cache.pool.layer(layer)
        shapes = (q.shape, k.shape, v.shape, k_pool.shape, v_pool.shape, batch.num_tokens)
        kinds = (q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
        # the same in all layers of a step
        if (shapes, kinds) != self._checked:
            self._check(q, k, v, k_pool, v_pool, batch.num_tokens)
            self._checked = (shapes, kinds)
        self._check_call(q, k, v, batch, scale, softcap, sinks)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        options = {"scale": scale, "window": window, "softcap": softcap}
        pools, out_dtype, own = (k_pool, v_pool), self.out_dtype or q.dtype, None
        if batch.own_apart:
            own = OwnTokens.of(q, k, v, batch.slot_mapping, pools, scale, softcap)
        else:
            self.cache.backend.store_kv(k, v, batch.slot_mapping, k_pool, v_pool)
        if self._fuses(q, v_pool, batch):
            splits = self._section(self.cache.backend.decode_splits, "decode", q, pools, batch, options)
            how = {"sinks": sinks, "own": own, "following": following}
            return self.merge.merge_splits(splits, out_dtype=out_dtype, **how)
        if self._alone():
            return self._finish(q, pools, batch, options, out_dtype, sinks, own)
        partial = self._partial(q, pools, batch, options, own)
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

    def _alone(self) -> bool:
        """Tell whether there is nobody to merge with and the ops write what the layer hands on."""
        ops = self.cache.backend
        kernels = ops.decode_splits is not None and ops.finish_splits is not None and ops.fold_ranks is not None
        return kernels and self.mesh.kvp_size == 1 and type(self.merge) is CollectiveMerge

    def _finish(
        self,
        q: Tensor,
        pools: tuple[Tensor, Tensor],
        batch: StepBatch,
        options: dict[str, Any],
        out_dtype: torch.dtype,
        sinks: Tensor | None,
        own: OwnTokens | None,
    ) -> Merged:
        """Attend on one rank: two launches for the decode rows, and for the others one more than their kernel."""
        ops, heads, dim = self.cache.backend, q.shape[1], pools[1].shape[-1]
        if sinks is not None and sinks.shape != (heads,):
            raise ValueError(f"expected sinks [{heads}], one a query head, got {tuple(sinks.shape)}")
        out = torch.empty((batch.num_tokens, heads, dim), dtype=out_dtype, device=q.device)
        lse = torch.empty((batch.num_tokens, heads), dtype=torch.float32, device=q.device)
        if batch.decode is not None:
            splits = self._section(ops.decode_splits, "decode", q, pools, batch, options)
            mine = (out, lse) if batch.prefill is None else (out[: splits.num_tokens], lse[: splits.num_tokens])
            ops.finish_splits(splits, out=mine[0], lse=mine[1], finish=True, sinks=sinks, own=own)
        if batch.prefill is not None:
            some = slice(batch.prefill.first_token, None)
            partial = self._section(ops.prefill, "prefill", q, pools, batch, options)
            ops.fold_ranks(partial.out[None], partial.lse[None], out=out[some], lse=lse[some], sinks=sinks)
        return Merged(out.flatten(1), lse, (0, heads * dim))

    def _partial(
        self,
        q: Tensor,
        pools: tuple[Tensor, Tensor],
        batch: StepBatch,
        options: dict[str, Any],
        own: OwnTokens | None,
    ) -> Partial:
        ops, parts = self.cache.backend, []
        if own is not None:
            if ops.decode_splits is not None and ops.finish_splits is not None:
                splits = self._section(ops.decode_splits, "decode", q, pools, batch, options)
                return ops.finish_splits(splits, own=own)
            partial = add_own(self._section(ops.decode, "decode", q, pools, batch, options), own)
            ops.store_kv(own.k, own.v, own.slots, *pools)
            return partial
        if batch.decode is not None:
            parts.append(self._section(ops.decode, "decode", q, pools, batch, options))
        if batch.prefill is not None:
            parts.append(self._section(ops.prefill, "prefill", q, pools, batch, options))
        if not parts:
            # a step without tokens still enters the merge, so that ranks never disagree on the collectives
            shape = (0, q.shape[1], pools[1].shape[-1])
            return Partial(q.new_zeros(shape, dtype=torch.float32), q.new_zeros(shape[:2], dtype=torch.float32))
        if len(parts) == 1:
            return parts[0]
        return Partial(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))

    def _section(
        self,
        op: Callable[..., Any],
        name: str,
        q: Tensor,
        pools: tuple[Tensor, Tensor],
        batch: StepBatch,
        options: dict[str, Any],
    ) -> Any:
        """Run one op on the decode rows or the prefill rows."""
        part = batch.decode if name == "decode" else batch.prefill
        positions, tables = batch.q_positions, batch.tables(name, options["window"])
        if part.num_tokens != batch.num_tokens:
            some = slice(part.first_token, part.first_token + part.num_tokens)
            q, positions = q[some], positions[some]
        indptr = () if name == "decode" else (part.q_indptr,)
        if name == "decode" and batch.split_tiles:
            # foreign ops need not know of it
            options = {**options, "split_tiles": batch.split_tiles}
        return op(q, *pools, tables, positions, *indptr, part.max_q_len, **options)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, tokens: int) -> None:
        want_k, want_v = (tokens, *k_pool.shape[1:]), (tokens, *v_pool.shape[1:])
        if tuple(k.shape) != want_k or tuple(v.shape) != want_v:
            raise ValueError(
                f"expected k {want_k} and v {want_v} for this step and pool, got {tuple(k.shape)} and {tuple(v.shape)}"
            )
        heads, head_dim = k_pool.shape[1:]
        if q.dim() != 3 or q.shape[0] != tokens or q.shape[2] != head_dim or q.shape[1] % heads or not q.shape[1]:
            raise ValueError(f"expected q [{tokens}, a multiple of {heads} heads, {head_dim}], got {tuple(q.shape)}")
        if not (q.is_floating_point() and k.is_floating_point() and v.is_floating_point()):
            raise ValueError(f"expected floating q, k and v, got {q.dtype}, {k.dtype} and {v.dtype}")
        if not q.device == k.device == v.device == k_pool.device:
            raise ValueError(f"expected q, k and v on {k_pool.device}, got {q.device}, {k.device} and {v.device}")

    def _check_call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: StepBatch,
        scale: float | None,
        softcap: float,
        sinks: Tensor | None,
    ) -> None:
        """Refuse what can differ from call to call."""
        if batch is not self.cache.buffers.derived:
            raise ValueError("this batch is not what begin_step() of this cache returned last; its tables are gone")
        if softcap < 0.0 or (scale is not None and scale < 0.0):
            # the kernels take the largest score for the largest product
            raise ValueError(f"scale and softcap must not be negative, got {scale} and {softcap}")
        if sinks is not None and (sinks.device != q.device or not sinks.is_floating_point()):
            raise ValueError(f"expected floating sinks on {q.device}, got {sinks.dtype} on {sinks.device}")
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            # the store would make the pool a part of the graph, which would then grow with every step
            raise RuntimeError("attention over the cache is for inference: call it under torch.no_grad()")

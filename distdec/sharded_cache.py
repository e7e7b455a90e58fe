"""A KV cache sharded along the sequence over the kvp axis of a mesh: the integers that say where, and the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from distdec.batch import MAX_DECODE_TOKENS, StepBatch, StepBuffers
from distdec.cache.kv_cache import KVCache
from distdec.cache.layout import CacheLayout, _chunk_sizes, _integer
from distdec.cache.pool import KVPool
from distdec.host_pool import HostPool
from distdec.mesh import Mesh
from distdec.ops.backends import OpsBackend, get_backend
from distdec.row_tables import NO_PADDING, Padding


class ShardedCache:
    """Hold the keys and values of many sequences, each spread over the kvp ranks of a mesh.

    Every rank makes the same calls in the same order; the placement is deterministic integer code, so no communication
    is needed to agree on it. The pool holds this rank's tokens only.

    Args:
        mesh: the ranks that share the cache.
        num_layers, num_kv_heads, head_dim: of the model, KV heads counted on this rank (after tensor parallelism).
        max_tokens: tokens that the cache holds over all sequences and ranks. Rounded up to whole frames, with one
            `max_chunk` of slack a rank, which is what an even placement may need.
        num_frames: instead of `max_tokens`, the frames of each kvp rank.
        dtype: of the stored keys and values.
        v_head_dim: where values are narrower or wider than keys.
        group_size: query heads on a KV head, where known; with many of them fewer decode programs share the tiles.
        windows: sliding windows of the model's layers (tokens); 0, full attention, is always served.
        weights: relative share of each kvp rank (integers); None is even.
        shard_min_tokens: sequences up to this length stay on one rank.
        backend: ops backend name, `auto`, `reference` or `triton`.
        placement: test-only hook `(seq_id, position) -> kvp_rank`.
        prefix_caching: whether an engine shall share the pages of equal prefixes.
        host_bytes: host memory that this rank takes to keep preempted requests of an engine; 0: none.
        own_apart: in steps of nothing but decode rows of one token, layers attend to the new tokens apart from the
            older ones, and store them in the kernel that joins the splits instead of in one before.
        deterministic: attention of a decode row has the same bits whatever rows share its steps, and however the pool
            was used before; what that takes is in docs/numerics.md. Merges are `all_gather` or `all_to_all`, own_apart
            is off, prefixes are shared in whole frames (`page_size` is `min_chunk`), every sequence begins on the same
            rank, tiles divide a frame (so `min_chunk` should be 128 or more), and decode is slower: splits of 16
            tiles whatever the number of programs, query rows in tiles of 16. Its partials follow the capacity of the
            tables instead of the programs: `(views * max_chunk / tile / 16 + rows) * KV heads` of them, each of
            `q_len * G * (Dv + 1)` floats, reserved in each call (67 MB for 8,192 views, 8 KV heads, G 4, Dv 128 and one
            token a row).

    Raises:
        ValueError: neither or both of `max_tokens` and `num_frames`, a size below 1, a dtype that cannot be stored, a
            layout that `CacheLayout` refuses, or a deterministic cache on a backend that has no fixed splits.

    Example:
        >>> cache = ShardedCache(mesh, num_layers=2, num_kv_heads=2, head_dim=64, max_tokens=4096)
        >>> cache.kv.add(0)
        >>> batch = cache.begin_step([(0, 17)])      # room for 17 tokens of sequence 0, and where they go
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_tokens: int | None = None,
        num_frames: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        v_head_dim: int | None = None,
        group_size: int = 1,
        min_chunk: int = 128,
        max_chunk: int = 1024,
        page_size: int = 16,
        weights: Sequence[int] | None = None,
        shard_min_tokens: int = 0,
        windows: Iterable[int] = (),
        backend: str | OpsBackend = "auto",
        placement: Callable[[int, int], int] | None = None,
        prefix_caching: bool = True,
        host_bytes: int = 0,
        own_apart: bool = False,
        deterministic: bool = False,
    ) -> None:
        if (max_tokens is None) == (num_frames is None):
            raise ValueError(
                f"give either max_tokens or num_frames, got max_tokens={max_tokens}, num_frames={num_frames}"
            )
        sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "group_size": group_size}
        for name, size in sizes.items():
            _integer(name, size, 1)
        if num_frames is None:
            min_chunk, max_chunk = _chunk_sizes(min_chunk, max_chunk)
            if weights is not None:
                weights = [_integer("weights", weight, 1) for weight in weights]
            max_tokens = _integer("max_tokens", max_tokens, 0)
            num_frames = _frames_for(max_tokens, mesh.kvp_size, min_chunk, max_chunk, weights)
        if len(num_frames) != mesh.kvp_size:
            # tokens would go to ranks that do not exist, and be missing from every attention
            raise ValueError(
                f"num_frames and weights must have one entry for each of the {mesh.kvp_size} kvp ranks, got "
                f"{len(num_frames)}"
            )
        self.mesh = mesh
        self.prefix_caching = prefix_caching
        self.layout = CacheLayout(
            num_frames=tuple(num_frames),
            min_chunk=min_chunk,
            max_chunk=max_chunk,
            page_size=page_size,
            weights=None if weights is None else tuple(weights),
            shard_min_tokens=shard_min_tokens,
            deterministic=deterministic,
        )
        self.kv = KVCache(self.layout, placement=placement)
        slots = self.layout.num_frames[mesh.kvp_rank] * min_chunk
        self.pool = KVPool(num_layers, slots, num_kv_heads, head_dim, dtype, mesh.device, v_head_dim=v_head_dim)
        self.host = HostPool(self.kv, self.pool, mesh.kvp_rank, host_bytes) if host_bytes else None
        self.backend = get_backend(backend, mesh.device) if isinstance(backend, str) else backend
        if deterministic and not self.backend.fixed_splits:
            raise ValueError(f"deterministic rows need a backend with fixed splits; {self.backend.name!r} has none")
        how = {"windows": windows, "device": mesh.device, "own_apart": own_apart}
        self.buffers = StepBuffers(self.kv, mesh.kvp_rank, self.backend, **how)
        self.buffers.schedule_for(self.pool, group_size)

    def begin_step(
        self,
        rows: Sequence[tuple[int, int]],
        *,
        q_len: int | None = None,
        num_decode: int | None = None,
        pad: Padding = NO_PADDING,
        derive: bool = True,
    ) -> StepBatch:
        """Reserve room for this step's tokens and describe the step to the attention layers.

        Args:
            rows: (seq_id, new tokens), decode rows first.
            q_len, num_decode, pad, derive: see `StepBuffers.fill`.

        Raises:
            CacheFull: the step does not fit; nothing was reserved.
            KeyError, ValueError: a sequence that is not in the cache or stands in two rows, a count or q_len that no
                row may have, a decode row of more tokens than q_len; nothing was reserved.

        Notes:
            In-place: overwrites the batch of the step before. Collective: none.
        """
        if len(dict(rows)) < len(rows):
            # both rows would be the sequence's last tokens
            raise ValueError(f"a sequence may stand in one row of a step only, got rows {list(rows)}")
        if q_len is not None and not 1 <= q_len <= MAX_DECODE_TOKENS:
            raise ValueError(f"q_len must be 1 to {MAX_DECODE_TOKENS}, got {q_len}")
        if num_decode and max([count for _, count in rows[:num_decode]], default=0) > (q_len or 1):
            raise ValueError(f"the first {num_decode} rows may have {q_len or 1} tokens at most, got {list(rows)}")
        self.kv.extend_all(rows)
        return self.buffers.fill(rows, q_len=q_len, num_decode=num_decode, pad=pad, derive=derive)

    def local_tokens(self) -> int:
        """Tokens that this rank holds over all live sequences (a shared prefix counts once per sequence)."""
        return sum(self.kv.local_length(seq, self.mesh.kvp_rank) for seq in self.kv.sequences())


def _frames_for(
    max_tokens: int, kvp_size: int, min_chunk: int, max_chunk: int, weights: Sequence[int] | None
) -> tuple[int, ...]:
    """Frames a rank needs so that any `max_tokens` tokens placed by weight fit.

    Example: 4096 tokens on 3 even ranks, frames of 128, chunks up to 1024: ceil(4096 / 3 / 128) + 8 = 19 frames each.
    """
    share = [1] * kvp_size if weights is None else list(weights)
    total = sum(share)
    slack = -(-max_chunk // min_chunk)
    return tuple(-(-max_tokens * w // (total * min_chunk)) + slack for w in share)

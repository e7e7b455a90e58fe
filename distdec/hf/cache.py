"""A cache for `model.generate` whose keys and values are sharded along the sequence over the ranks of a mesh.

    mesh = Mesh.create()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="distdec").to(mesh.device)
    cache = DistributedCache(model, mesh, max_tokens=200_000)
    tokens = model.generate(**inputs, **cache_argument(cache))

transformers counts COLUMNS: all rows of a batch are equally long, the short ones with pads on the left. The pool counts
TOKENS: pads are never stored. Worked example, columns c0 to c3 of a batch of two, then one decode step (c4):

    row 0:  a  b  c  d | e      sequence 0: positions 0 1 2 3 | 4
    row 1:  .  .  f  g | h      sequence 1: positions     0 1 | 2

`get_seq_length()` is 4, then 5; sequence 1 holds 2, then 3 tokens. A window or a causal mask compares differences of
columns within a row, and those are the same in both countings.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from distdec.attention import DistributedAttention
from distdec.batch import StepBatch
from distdec.hf.attention import KVPair
from distdec.hf.compiled import LayerCall
from distdec.hf.padding import new_tokens
from distdec.hf.sharding import merge_for
from distdec.hf.support import UnsupportedModel, check_model
from distdec.mesh import Mesh
from distdec.sharded_cache import ShardedCache


class _Forward:
    """One forward of the model: its tokens, reserved once, at the first layer, and shared by all layers."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.num_rows = num_rows
        self.num_columns = num_columns
        self.layers: set[int] = set()
        self.batch: StepBatch | None = None
        # flat [B * S] indices of the real tokens; None where there are no pads
        self.index: Tensor | None = None

    def pack(self, x: Tensor) -> Tensor:
        """[B, H, S, D] with pads -> [T, H, D] without."""
        flat = x.transpose(1, 2).flatten(0, 1)
        return flat if self.index is None else flat.index_select(0, self.index)

    def unpack(self, out: Tensor, num_heads: int) -> Tensor:
        """[T, columns] -> [B, S, heads, columns / heads]; pads get zeros. Scattered columns come as one head."""
        if self.index is not None:
            full = out.new_zeros(self.num_rows * self.num_columns, out.shape[1])
            out = full.index_copy_(0, self.index, out)
        return out.view(self.num_rows, self.num_columns, num_heads, out.shape[1] // num_heads)


class _Layer(CacheLayerMixin):
    """What transformers sees of one layer; the state is the whole cache's."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: DistributedCache, index: int) -> None:
        super().__init__()
        self.cache = cache
        self.index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the pool is there from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[KVPair, KVPair]:
        return self.cache.hand_on(key_states, value_states, self.index)

    def get_seq_length(self, *args: Any) -> int:
        return self.cache.num_columns

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.cache.num_columns + new, 0

    def get_max_length(self) -> int:
        """Return -1: rows share one pool, so no row has a limit of its own."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return what releases before 5.17 ask for instead of `get_max_length`."""
        return -1


class DistributedCache(Cache):
    """Keys and values of a batch of rows for one model, each row spread over the kvp ranks of a mesh.

    Every rank runs the same program on the same inputs; only the pool differs. Give it to `generate` or to the model's
    forward like any cache of transformers. It stays filled afterwards: a second call continues it; `reset()` empties it
    and must come before an unrelated prompt.

    Args:
        model: loaded with `attn_implementation="distdec"`, on `mesh.device`: the whole model on every rank, or its
            part of the weights from `distdec.hf.parallel.shard` or `distdec.hf.weights.load_sharded` for this mesh.
        mesh: the ranks. With tp > 1 the weights must be sharded.
        max_tokens: tokens that the pool holds over all rows and ranks, pads not counted.
        merge: merge mode; one that scatters columns needs a model from `distdec.shard`.
        dtype: of the stored keys and values; default the model's.
        options: further arguments of `ShardedCache`, such as `num_frames` (instead of `max_tokens`), `min_chunk`,
            `weights`, `backend`. For beam search take a small `min_chunk`: each fork opens a new chunk.

    Raises:
        UnsupportedModel: the model needs attention that a sharded cache does not provide; all reasons are named.
        RuntimeError: the ranks made different caches.

    Notes:
        Collective: construction compares the geometry over the whole mesh; each layer's attention is one merge.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        mesh: Mesh,
        *,
        max_tokens: int | None = None,
        merge: str = "auto",
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        geometry = check_model(model, mesh)
        parameter = next(model.parameters())
        if parameter.device != torch.empty(0, device=mesh.device).device:
            raise ValueError(f"the model is on {parameter.device}, the mesh on {mesh.device}; move the model there")
        core = ShardedCache(
            mesh,
            num_layers=geometry.num_layers,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            group_size=geometry.group_size,
            max_tokens=max_tokens,
            dtype=dtype or parameter.dtype,
            windows=geometry.windows,
            **options,
        )
        mesh.check_same("distributed cache", repr((geometry, core.layout, core.pool.k.dtype, merge)).encode())
        chosen = merge_for(model, mesh, merge, deterministic=core.layout.deterministic)
        attention = DistributedAttention(mesh, core, merge=chosen)
        forward = inspect.signature(model.forward).parameters
        self._start(core, attention, geometry.num_layers, "cache" if "cache" in forward else "past_key_values")
        self._ids: Iterator[int] = itertools.count()

    def _start(self, core: ShardedCache, attention: DistributedAttention, num_layers: int, keyword: str) -> None:
        super().__init__(layers=[_Layer(self, i) for i in range(num_layers)])
        self.core = core
        self.attention = attention
        self.keyword = keyword
        self.num_columns = 0
        self.rows: list[int] = []
        self._forward: _Forward | None = None

    def hand_on(self, key: Tensor, value: Tensor, layer: int) -> tuple[KVPair, KVPair]:
        """Take this step's keys and values of a layer to the attention function that is called next.

        Shapes:
            key: [B, Hkv, S, D], value: [B, Hkv, S, Dv]

        Raises:
            RuntimeError: the forward before this one did not run all layers.
            ValueError: another number of rows than the cache holds.
        """
        now = self._forward
        if now is None or len(now.layers) == len(self.layers):
            now = self._open(key.shape[0], key.shape[2])
        elif layer in now.layers:
            raise RuntimeError(
                f"layer {layer} runs again, but the last forward stopped after {len(now.layers)} of "
                f"{len(self.layers)} layers; crop(-{now.num_columns}) takes its tokens back, reset() empties the cache"
            )
        if (key.shape[0], key.shape[2]) != (now.num_rows, now.num_columns):
            raise ValueError(f"layer {layer} brings keys {tuple(key.shape)}, earlier layers of this forward differ")
        now.layers.add(layer)
        pair = KVPair(self, layer, key, value)
        return pair, pair

    def attend(self, pair: KVPair, query: Tensor, mask: Tensor | None, call: LayerCall) -> Tensor:
        """Store a layer's new keys and values and attend over the whole sequences.

        Shapes:
            query: [B, Hq, S, D]; mask: [B, num_columns] bool or None; returns [B, S, Hq, Dv]

        Raises:
            CacheFull: the step does not fit; the cache is as it was before the forward.
            ValueError: a mask that is not pads on the left of tokens, or contradicts an earlier one.
        """
        now = self._forward
        if now is None or pair.cache is not self or pair.layer not in now.layers:
            raise RuntimeError("attention was called outside the forward that updated the cache")
        if now.batch is None:
            try:
                self._reserve(now, mask)
            except Exception:
                self.num_columns -= now.num_columns
                self._forward = None
                raise
        merged = self.attention(
            now.pack(query),
            now.pack(pair.key),
            now.pack(pair.value),
            now.batch,
            pair.layer,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        # a sharded output projection takes scattered columns as they are
        whole = merged.out.shape[1] == query.shape[1] * self.core.pool.v_head_dim
        return now.unpack(merged.out, query.shape[1] if whole else 1)

    def _open(self, num_rows: int, num_columns: int) -> _Forward:
        if self.num_columns == 0 and num_rows != len(self.rows):
            self.reset()
        elif num_rows != len(self.rows):
            raise ValueError(
                f"the cache holds {len(self.rows)} rows, this forward has {num_rows}; reset() it first, or make one "
                "cache for each batch"
            )
        if not self.rows:
            self.rows = [next(self._ids) for _ in range(num_rows)]
            for row in self.rows:
                self.core.kv.add(row)
        self._forward = _Forward(num_rows, num_columns)
        self.num_columns += num_columns
        return self._forward

    def _reserve(self, now: _Forward, mask: Tensor | None) -> None:
        cached = [self.core.kv.length(row) for row in self.rows]
        counts = new_tokens(mask, cached, self.num_columns - now.num_columns, now.num_columns)
        now.batch = self.core.begin_step(list(zip(self.rows, counts, strict=True)))
        if min(counts) < now.num_columns:
            width = now.num_columns
            flat = [i for row, n in enumerate(counts) for i in range((row + 1) * width - n, (row + 1) * width)]
            now.index = torch.tensor(flat, dtype=torch.int64).to(self.core.mesh.device)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns seen: tokens of the longest row, pads included."""
        return self.num_columns

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Drop the last columns of every row.

        Args:
            tokens_to_remove: 0 or less: minus the number of columns to drop. More than 0: the number of columns to
                keep, as in releases before 5.17.

        Notes:
            Host sync: where the number is a tensor, as assisted decoding hands it over in some releases.
        """
        tokens_to_remove = int(tokens_to_remove)
        keep = tokens_to_remove if tokens_to_remove > 0 else self.num_columns + tokens_to_remove
        drop = self.num_columns - max(0, min(keep, self.num_columns))
        for row in self.rows if drop else ():
            # what is left of a row's tokens; a row whose tokens all lie in the dropped columns keeps none
            self.core.kv.truncate(row, max(0, self.core.kv.length(row) - drop))
        self.num_columns -= drop
        self._forward = None

    def reset(self) -> None:
        """Free all rows."""
        self._replace_rows([])
        self.num_columns = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i the row `beam_idx[i]` was: beams share what they have in common, nothing is copied.

        Shapes:
            beam_idx: [B] integers
        """
        self._replace_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices`, in that order."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._replace_rows(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, the copies next to each other."""
        self._replace_rows([i for i in range(len(self.rows)) for _ in range(repeats)])

    def _replace_rows(self, sources: Sequence[int]) -> None:
        kv, old = self.core.kv, self.rows
        unused = set(range(len(old)))
        new = []
        for source in sources:
            if source in unused:
                # the first heir goes on writing where the row ended
                unused.discard(source)
                new.append(old[source])
            else:
                new.append(next(self._ids))
                kv.fork(old[source], new[-1])
        for source in sorted(unused):
            kv.free(old[source])
        self.rows = new
        self._forward = None

    def fork(self) -> DistributedCache:
        """Return a second cache with the same contents, in the same pool, that grows on its own; nothing is copied.

        `copy.deepcopy` does the same, so that a prompt can be computed once and continued several times. `reset()` a
        fork that is no longer wanted, on every rank: its tokens stay in the pool otherwise.
        """
        twin = type(self).__new__(type(self))
        twin._start(self.core, self.attention, len(self.layers), self.keyword)
        twin._ids = self._ids
        twin.rows = [next(self._ids) for _ in self.rows]
        for source, row in zip(self.rows, twin.rows, strict=True):
            self.core.kv.fork(source, row)
        twin.num_columns = self.num_columns
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedCache:
        twin = self.fork()
        memo[id(self)] = twin
        return twin

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: only static caches for export and compilation are laid out in advance."""
        raise UnsupportedModel("a DistributedCache cannot stand in for a static cache")

    @property
    def batch_size(self) -> int:
        """Rows in the cache, -1 if none yet."""
        return len(self.rows) or -1

    @property
    def max_batch_size(self) -> int:
        """What releases before 5.17 ask for instead of `batch_size`."""
        return self.batch_size

    @property
    def is_initialized(self) -> bool:
        """Whether the cache holds anything."""
        return self.num_columns > 0

    def __repr__(self) -> str:
        held = [self.core.kv.length(row) for row in self.rows]
        return (
            f"{type(self).__name__}(columns={self.num_columns}, tokens={held}, on this rank={self.core.local_tokens()})"
        )


def cache_argument(cache: DistributedCache) -> dict[str, DistributedCache]:
    """Return a cache as the keyword argument of `generate` and of the model's forward.

    It is called `cache` from transformers 5.24 on and `past_key_values` before; the forward's signature decides.
    """
    return {cache.keyword: cache}

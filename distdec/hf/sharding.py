"""What is known of a model whose weights were sharded: over which mesh, and which heads each rank has.

The mark that `parallel.shard` leaves on a model is read where a cache or an engine is put on it, so that a model and a
cache of different layouts never meet, and a merge that scatters columns only feeds an output projection cut to match.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from distdec.degrees import validate_layout
from distdec.merge import Merge, make_merge
from distdec.merge_choice import deterministic_mode
from distdec.mesh import Mesh
from distdec.rank_sum import RankSum

_MARK = "_distdec_sharding"
_SUM = "_distdec_sum"


class Sharding(NamedTuple):
    """How a model's weights are sharded: `queries` by `replicate` or `gather`, `experts` by `width` or `expert`.

    A model without experts has "" there.
    """

    kvp_size: int
    tp_size: int
    rank: int
    queries: str
    experts: str = ""


class RankHeads(NamedTuple):
    """The heads of one rank, as ranges of the model's."""

    rank: int
    kvp_rank: int
    tp_rank: int
    q_heads: range
    kv_heads: range


def mark(model: Any, sharding: Sharding, total: RankSum | None) -> None:
    """Note on a model how it was sharded, and what its layers call to sum over all ranks."""
    setattr(model, _MARK, sharding)
    setattr(model, _SUM, total)


def sharding_of(model: Any) -> Sharding | None:
    """Return how `parallel.shard` sharded a model, None if it did not."""
    return getattr(model, _MARK, None)


def rank_sum_of(model: Any) -> RankSum | None:
    """Return what the layers of a sharded model call to sum over ranks; None for one rank, or if it is not sharded."""
    return getattr(model, _SUM, None)


def rank_map(kvp: int, tp: int, num_q_heads: int, num_kv_heads: int) -> list[RankHeads]:
    """List the heads of every rank: the same along kvp, a stretch of whole groups along tp.

    Raises:
        ValueError: an illegal layout.

    Example: kvp 2, tp 2, 8 query and 2 KV heads: ranks 0 and 1 have queries 0-3 and KV head 0, ranks 2 and 3 the rest.
    """
    validate_layout(kvp * tp, kvp, tp, num_q_heads, num_kv_heads)
    q, kv = num_q_heads // tp, num_kv_heads // tp
    return [
        RankHeads(t * kvp + s, s, t, range(t * q, (t + 1) * q), range(t * kv, (t + 1) * kv))
        for t in range(tp)
        for s in range(kvp)
    ]


def check_mesh(model: Any, mesh: Mesh) -> None:
    """Refuse a model whose weights are not those of this rank of the mesh that it is about to run on.

    Raises:
        ValueError: it was sharded for another layout or rank, or holds more KV heads than a tp rank does.
    """
    done = sharding_of(model)
    num_q, heads = local_heads(model.config, mesh)
    held = _kv_heads_held(model, num_q // heads)
    if done is None and held is not None and held != heads:
        raise ValueError(
            f"the model's weights have {held} KV heads on this rank, a rank of kvp {mesh.kvp_size} x tp {mesh.tp_size} "
            f"has {heads}: distdec.shard(model, mesh) keeps this rank's part (load_sharded reads no more than that)"
        )
    if done is not None and done[:3] != (mesh.kvp_size, mesh.tp_size, mesh.rank):
        raise ValueError(
            f"the model's weights are those of rank {done.rank} of kvp {done.kvp_size} x tp {done.tp_size}, "
            f"the cache's mesh is rank {mesh.rank} of kvp {mesh.kvp_size} x tp {mesh.tp_size}"
        )


def local_heads(config: Any, mesh: Mesh) -> tuple[int, int]:
    """Return (query heads, KV heads) of this rank.

    Raises:
        ValueError: tp does not divide the KV heads.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    num_q = int(config.num_attention_heads)
    num_kv = int(getattr(config, "num_key_value_heads", None) or num_q)
    validate_layout(mesh.world_size, mesh.kvp_size, mesh.tp_size, num_q, num_kv)
    return num_q // mesh.tp_size, num_kv // mesh.tp_size


def _kv_heads_held(model: Any, group_size: int) -> int | None:
    """Count the KV heads of a model by the rows of its first key projection, whoever sharded it; None if not plain."""
    for module in model.modules():
        head_dim = getattr(module, "head_dim", None)
        for name, share in (("k_proj", 1), ("qkv_proj", group_size + 2)):
            linear = getattr(module, name, None)
            weight = getattr(linear, "weight", None)
            if weight is None or head_dim is None:
                continue
            # quantised weights have other shapes; of a tensor that torch distributes, the part here counts
            weight = weight.to_local() if hasattr(weight, "to_local") else weight
            plain = weight.dim() == 2 and weight.shape[1] == getattr(linear, "in_features", None)
            return int(weight.shape[0]) // (head_dim * share) if plain else None
    return None


def merge_for(model: Any, mesh: Mesh, mode: str, transport: str = "float32", *, deterministic: bool = False) -> Merge:
    """Build the merge that a model's output projection can take.

    A projection that `parallel.shard` cut takes scattered columns as well as whole rows, and `auto` then scatters,
    which moves less; the model's own projection needs all columns on every rank.

    Args:
        mode, transport: as in `make_merge`.
        deterministic: for a deterministic cache; see `deterministic_mode`.

    Raises:
        ValueError: the model was sharded for another mesh, or it was not and the mode scatters, or the mode is not
            deterministic.

    Notes:
        Collective: as `make_merge`.
    """
    check_mesh(model, mesh)
    whole = sharding_of(model) is None
    mode = deterministic_mode(mode, whole) if deterministic else mode
    config = model.config.get_text_config()
    heads = config.num_attention_heads // mesh.tp_size
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    merge = make_merge(mode, mesh, transport=transport, replicated=whole, num_heads=heads, head_dim=head_dim)
    if whole and not merge.replicated:
        raise ValueError(
            f"merge={mode!r} scatters the output; the model's own output projection needs all of it. "
            "distdec.shard(model, mesh) cuts it to match"
        )
    return merge

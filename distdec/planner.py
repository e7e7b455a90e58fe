"""A memory and roofline model of a decode step: does it fit, which kvp x tp, which merge, does sharding pay.

Every figure is bytes over bandwidth plus fixed latencies; nothing is measured here. The constants are those of one
H200 pair, measured (docs/benchmarks), with a fit in the number of ranks beyond two from published figures; give
another `Hardware` for other machines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from distdec.degrees import legal_layouts, validate_layout

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides its bytes.

    Args:
        mlp_weights: weights of one layer's MLP or of all its experts, in elements.
        active_mlp_weights: those that one token reads.
    """

    num_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    mlp_weights: int
    active_mlp_weights: int
    tied_embeddings: bool = False

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """Read the shape off a transformers config.

        Raises:
            ValueError: the config lacks one of the sizes.
        """
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        try:
            hidden = int(config.hidden_size)
            heads = int(config.num_attention_heads)
            experts = next((int(n) for a in ("num_local_experts", "num_experts") if (n := getattr(config, a, None))), 0)
            width = int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
            one = 3 * hidden * width
            return cls(
                num_layers=int(config.num_hidden_layers),
                hidden_size=hidden,
                num_q_heads=heads,
                num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
                head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
                vocab_size=int(config.vocab_size),
                mlp_weights=one * max(1, experts),
                active_mlp_weights=one * (int(config.num_experts_per_tok) if experts else 1),
                tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
            )
        except AttributeError as error:
            raise ValueError(f"the model config lacks a size that the plan needs: {error}") from None

    @property
    def q_weights(self) -> int:
        """Elements of one layer's query projection (the output projection has as many)."""
        return self.hidden_size * self.num_q_heads * self.head_dim

    @property
    def kv_weights(self) -> int:
        """Elements of one layer's key and value projections together."""
        return 2 * self.hidden_size * self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """KV bytes of one token over all layers, on all ranks together.

        Example: Llama-3-8B (32 layers, 8 KV heads of 128, bf16): 2 * 32 * 8 * 128 * 2 = 131072.
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU and its links. Times in microseconds, bandwidths in bytes a microsecond.

    `merge_us[mode]` is (fixed, per further rank): a collective of small messages on R ranks takes
    `fixed + per_rank * (R - 2)` plus its bytes over the link.
    """

    memory_bytes: int = 141_000_000_000
    read_bandwidth: float = 4.56e6
    link_bandwidth: float = 3.72e5
    attention_us: float = 6.0
    all_reduce_us: tuple[float, float] = (10.0, 1.8)
    all_gather_us: tuple[float, float] = (9.0, 1.2)
    merge_us: tuple[tuple[str, float, float], ...] = (
        ("one_shot", 3.5, 0.7),
        ("all_gather", 11.0, 1.5),
        ("all_to_all", 11.0, 1.5),
        ("reduce_scatter", 19.0, 2.5),
        ("all_reduce", 21.0, 2.5),
    )
    reserve_fraction: float = 0.08


@dataclass(frozen=True)
class Workload:
    """A batch of `batch` rows that each hold `context` tokens; element sizes in bytes."""

    context: int
    batch: int = 1
    weight_bytes: int = 2
    kv_bytes: int = 2


@dataclass(frozen=True)
class LayoutPlan:
    """What one (kvp, tp) costs a rank: bytes held and microseconds of a decode step."""

    kvp: int
    tp: int
    queries: str
    merge: str
    weight_bytes: int
    kv_bytes: int
    fits: bool
    step_us: float
    attention_us: float
    merge_us: float


def query_mode(shape: ModelShape, kvp: int, tp: int, *, dtype_bytes: int = 2, hardware: Hardware | None = None) -> str:
    """Choose how a tp group's queries come to its kvp ranks: `replicate` or `gather`.

    Replicating reads `q_weights / tp` a rank and layer; gathering reads a kvp-th of that and pays one all-gather.

    Example: Llama-3-8B on kvp 2: the saved half is 16.8 MB, 3.7 us at 4.56 TB/s, less than an all-gather: replicate.
    """
    hw = hardware or Hardware()
    saved = shape.q_weights / tp * (1 - 1 / kvp) * dtype_bytes / hw.read_bandwidth
    cost = hw.all_gather_us[0] + hw.all_gather_us[1] * max(0, kvp - 2)
    return "gather" if kvp > 1 and saved > cost else "replicate"


def expert_mode(num_experts: int, width: int, ranks: int) -> str:
    """Choose how experts are split over ranks: by `width` or by `expert`.

    Both hold and compute the same on average and end in the same all-reduce. By width every rank reads its part of
    whatever experts a step needs; by expert the busiest rank's, which a few tokens never spread evenly. So width it is,
    where each rank gets whole steps of 8 columns, or where the experts do not divide either.

    Example: 128 experts of 768 on 8 ranks: 96 columns each, width. 60 experts of 1408 on 5 ranks: expert, 12 each.
    """
    return "expert" if width % (8 * ranks) and num_experts % ranks == 0 else "width"


def merge_us(mode: str, ranks: int, payload_bytes: float, hardware: Hardware | None = None) -> float:
    """Time of a merge over `ranks` ranks that each contribute `payload_bytes` (out and LSE)."""
    hw = hardware or Hardware()
    if ranks == 1:
        return 0.0
    fixed = {name: (a, b) for name, a, b in hw.merge_us}
    if mode not in fixed:
        raise ValueError(f"unknown merge mode {mode!r}; legal: {sorted(fixed)}")
    base, per_rank = fixed[mode]
    scattered = mode in ("all_to_all", "reduce_scatter")
    received = payload_bytes * ((ranks - 1) / ranks if scattered else ranks - 1)
    return base + per_rank * (ranks - 2) + received / hw.link_bandwidth


def layout_plan(
    shape: ModelShape, load: Workload, kvp: int, tp: int, *, merge: str = "one_shot", hardware: Hardware | None = None
) -> LayoutPlan:
    """Model one layout: weights sharded over all ranks but q/k/v over tp, KV over both axes."""
    hw = hardware or Hardware()
    world = kvp * tp
    queries = query_mode(shape, kvp, tp, dtype_bytes=load.weight_bytes, hardware=hw)
    q = shape.q_weights / (world if queries == "gather" else tp)
    attention = q + shape.kv_weights / tp + shape.q_weights / world
    vocabulary = shape.vocab_size * shape.hidden_size / world
    held = shape.num_layers * (attention + shape.mlp_weights / world) + vocabulary * (1 if shape.tied_embeddings else 2)
    active = min(shape.mlp_weights, shape.active_mlp_weights * load.batch)
    read = shape.num_layers * (attention + active / world) + vocabulary
    kv = load.batch * load.context * shape.kv_bytes_per_token(load.kv_bytes) / world
    payload = load.batch * shape.num_q_heads / tp * (shape.head_dim + 1) * 4
    merge_time = merge_us(merge, kvp, payload, hw)
    reduces = 0.0
    if world > 1:
        reduces = 2 * (hw.all_reduce_us[0] + hw.all_reduce_us[1] * (world - 2))
        reduces += hw.all_gather_us[0] if queries == "gather" else 0.0
    attention_us = hw.attention_us + kv / shape.num_layers / hw.read_bandwidth
    step = shape.num_layers * (attention_us + merge_time + reduces) + read * load.weight_bytes / hw.read_bandwidth
    weight_bytes = int(held * load.weight_bytes)
    usable = hw.memory_bytes * (1 - hw.reserve_fraction)
    return LayoutPlan(
        kvp, tp, queries, merge if kvp > 1 else "none", weight_bytes, int(kv), weight_bytes + kv <= usable,
        step, attention_us, merge_time,
    )  # fmt: skip


def rank_layouts(
    shape: ModelShape, load: Workload, num_ranks: int, *, merge: str = "one_shot", hardware: Hardware | None = None
) -> list[LayoutPlan]:
    """Model every legal layout of `num_ranks` ranks, those that fit first, fastest first.

    Raises:
        ValueError: no legal layout: `num_ranks` < 1, or query heads that do not form whole groups.
    """
    validate_layout(num_ranks, num_ranks, 1, shape.num_q_heads, shape.num_kv_heads)
    plans = [
        layout_plan(shape, load, kvp, tp, merge=merge, hardware=hardware)
        for kvp, tp in legal_layouts(num_ranks, shape.num_q_heads, shape.num_kv_heads)
    ]
    return sorted(plans, key=lambda p: (not p.fits, p.step_us))


def break_even_tokens(
    kv_bytes_per_token_layer: int, ranks: int, *, merge: str = "one_shot", hardware: Hardware | None = None
) -> int:
    """Tokens (batch x context) from which attention over `ranks` ranks beats one: the saved read pays the merge.

    Example: 4096 bytes a token and layer (8 KV heads of 128, bf16) on two ranks with a merge of 3.5 us:
    3.5 * 4.56e6 * 2 / 4096 = 7792 tokens.
    """
    hw = hardware or Hardware()
    cost = merge_us(merge, ranks, 0, hw)
    return int(cost * hw.read_bandwidth * ranks / ((ranks - 1) * kv_bytes_per_token_layer)) if ranks > 1 else 0


def ranks_to_fit(shape: ModelShape, load: Workload, *, limit: int = 64, hardware: Hardware | None = None) -> int | None:
    """Return the fewest ranks on which the load fits in some legal layout, or None up to `limit`."""
    for ranks in range(1, limit + 1):
        if rank_layouts(shape, load, ranks, hardware=hardware)[0].fits:
            return ranks
    return None


def dtypes_that_fit(
    shape: ModelShape, load: Workload, num_ranks: int, *, hardware: Hardware | None = None
) -> list[str]:
    """Return the KV dtypes with which the load fits on `num_ranks` ranks, widest first."""
    return [
        name
        for name, size in sorted(DTYPE_BYTES.items(), key=lambda item: -item[1])
        if rank_layouts(shape, replace(load, kv_bytes=size), num_ranks, hardware=hardware)[0].fits
    ]

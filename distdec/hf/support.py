"""Which models the sequence-sharded cache can serve, and the reasons why others are refused.

A model is refused where its attention needs something that storing each token's key and value once, on one rank, and
attending causally (with a window, a softcap, sinks) cannot express. The refusal comes when the cache or the engine
binding is made; what a config does not show is caught at the first forward (`refuse_mask_pattern`, `layer_window`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from distdec.degrees import validate_layout
from distdec.hf.sharding import check_mesh
from distdec.mesh import Mesh

NAME = "distdec"
"""The attention implementation's name in transformers' registries."""

LAYER_TYPES = ("full_attention", "sliding_attention")

# leaves of the mask functions of transformers that the attention layer applies itself, from token positions
_MASK_LEAVES = ("causal_mask_function", "sliding_window_overlay.<locals>.inner_mask")


class UnsupportedModel(ValueError):
    """The model, or the way it is called, needs attention that a sequence-sharded cache does not provide."""


class Geometry(NamedTuple):
    """What the cache must hold for a model; KV heads counted on one tensor-parallel rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    group_size: int


def check_model(model: Any, mesh: Mesh | None = None, *, engine: bool = False) -> Geometry:
    """Refuse a model that cannot run on a sharded cache; return the cache's geometry otherwise.

    Args:
        model: a transformers causal language model, already loaded.
        mesh: the ranks it shall run on; None is one rank.
        engine: also require what packed rows need (see `engine_reasons`).

    Raises:
        UnsupportedModel: with every reason found.
        ValueError: the layout is illegal for the model's heads, or the model's weights are not those of this rank.
    """
    config = model.config.get_text_config()
    reasons = config_reasons(model.config) + _model_reasons(model)
    if engine:
        reasons += engine_reasons(config)
    if reasons:
        raise UnsupportedModel(f"{type(model).__name__} cannot run on a sharded cache: " + "; ".join(reasons))
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    tp_size = 1
    if mesh is not None:
        tp_size = mesh.tp_size
        validate_layout(mesh.world_size, mesh.kvp_size, tp_size, config.num_attention_heads, kv_heads)
        check_mesh(model, mesh)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    windows = {layer_window(config, i) for i in range(config.num_hidden_layers)}
    group = config.num_attention_heads // kv_heads
    return Geometry(config.num_hidden_layers, kv_heads // tp_size, head_dim, tuple(sorted(windows - {0})), group)


def config_reasons(config: Any) -> list[str]:
    """Say what in a model's config cannot be served; an empty list if nothing is known against it."""
    text = config.get_text_config()
    if getattr(text, "_heterogeneity_spec", None) is not None:
        # its attributes cannot even be read without naming a layer
        return ["its layers have different sizes (a heterogeneous config)"]
    get = lambda name, default=None: getattr(text, name, default)  # noqa: E731
    reasons = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("encoder-decoder models have cross attention over a second cache")
    parts = [name for name in ("vision_config", "audio_config") if getattr(config, name, None) is not None]
    if parts:
        reasons.append(f"it is multimodal ({', '.join(parts)}): only text models are supported, load the text model")
    if get("kv_lora_rank") is not None:
        reasons.append("multi-head latent attention (MLA) caches latents, not keys and values")
    layer_types = set(get("layer_types") or ()) - set(LAYER_TYPES)
    if layer_types:
        reasons.append(f"layers of type {sorted(layer_types)}: only {list(LAYER_TYPES)} are supported")
    elif get("attention_chunk_size") is not None:
        reasons.append(f"chunked attention (attention_chunk_size={get('attention_chunk_size')})")
    if get("num_kv_shared_layers"):
        reasons.append("layers that share keys and values with other layers")
    if get("is_causal", True) is False or get("use_bidirectional_attention"):
        reasons.append("bidirectional attention")
    if isinstance(get("num_key_value_heads"), (list, tuple)) or get("global_head_dim") is not None:
        reasons.append("KV heads or head sizes that differ between layers")
    if get("output_attentions"):
        reasons.append("output_attentions=True: the weights of a sharded softmax never exist in one place")
    return reasons


def engine_reasons(config: Any) -> list[str]:
    """Say what keeps a model, fine in `generate`, from running packed rows of different requests."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope_types = {p.get("rope_type") for p in [rope, *rope.values()] if isinstance(p, dict)}
    moving = sorted(rope_types & {"dynamic", "longrope"})
    if not moving:
        return []
    return [
        f"rope type {moving[0]!r} picks its frequencies by the longest position of the whole batch, so a row would "
        "depend on its batch mates (generate() with a DistributedCache runs it as transformers does)"
    ]


def layer_window(config: Any, layer: int) -> int:
    """Return the sliding window (tokens, 0 = none) that the masks of transformers would give a layer."""
    window = getattr(config, "sliding_window", None) or 0
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[layer] != "sliding_attention":
        return 0
    return window


def check_window(module: Any, window: int) -> None:
    """Refuse a layer whose attention call and whose mask disagree on the sliding window.

    In transformers the mask decides; here the call's argument does. A model that leaves the argument out would
    silently attend to everything.

    Raises:
        UnsupportedModel: the two differ.
    """
    expected = layer_window(module.config, module.layer_idx)
    if window != expected:
        raise UnsupportedModel(
            f"layer {module.layer_idx} of {type(module).__name__} called attention with sliding_window="
            f"{window or None}, its config says {expected or None}"
        )


def refuse_mask_pattern(mask_function: Callable[..., Any] | None) -> None:
    """Refuse a mask that is not causal attention, with or without a sliding window.

    Raises:
        UnsupportedModel: overlays (image blocks, prefix-LM), chunked, bidirectional or packed-sequence masks.
    """
    if mask_function is None:
        return
    foreign = [name for name in _leaves(mask_function) if name not in _MASK_LEAVES]
    if foreign:
        name = foreign[0].split(".", maxsplit=1)[0]
        raise UnsupportedModel(
            f"the model asks for a mask built from {name!r}; a sharded cache serves causal attention with or without "
            "a sliding window (packed sequences: only through bind_engine)"
        )


def _leaves(mask_function: Callable[..., Any]) -> Iterator[str]:
    """Names of the functions an intersection of masks is made of, however it is nested."""
    name = getattr(mask_function, "__qualname__", type(mask_function).__name__)
    parts: list[Any] = []
    if name == "and_masks.<locals>.and_mask":
        for cell in mask_function.__closure__ or ():
            content = cell.cell_contents
            parts += [p for p in content if callable(p)] if isinstance(content, (list, tuple)) else []
    if not parts:
        yield name
    for part in parts:
        yield from _leaves(part)


def _model_reasons(model: Any) -> list[str]:
    reasons = []
    if not getattr(type(model), "_supports_attention_backend", False):
        reasons.append("its code does not let attention be replaced (no _supports_attention_backend)")
    used = model.config.get_text_config()._attn_implementation
    if used != NAME:
        reasons.append(
            f'it runs attention {used!r}: load it with attn_implementation="{NAME}" or call '
            f'model.set_attn_implementation("{NAME}")'
        )
    return reasons

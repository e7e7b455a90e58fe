"""The attention implementation "distdec" for transformers, and the binding that runs packed rows for an engine.

transformers looks up two functions by the name in `attn_implementation`: one makes the mask, one attends. Both are
registered when this module is imported. They keep nothing between calls: what a call needs beyond its tensors comes
with the key (an opaque pair from `DistributedCache.update`) or from the attention module (an `EngineBinding`).

The mask function matters as much as the attention: without one transformers hands every layer `None`, and the pads of a
left-padded batch would be attended to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from distdec.attention import DistributedAttention
from distdec.batch import StepBatch
from distdec.hf import compiled, following
from distdec.hf.compiled import LayerCall
from distdec.hf.sharding import rank_sum_of
from distdec.hf.support import NAME, UnsupportedModel, check_model, check_window, refuse_mask_pattern
from distdec.merge import column_range

_BINDING = "_distdec_binding"


class KVPair:
    """This step's keys and values of one layer, on their way from the cache to the attention function.

    Opaque on purpose: whatever else touches it (another attention implementation, a model that works on keys after the
    cache update) fails at once instead of attending to a part of the sequence.

    Shapes:
        key: [B, Hkv, S, D], value: [B, Hkv, S, Dv], this step's tokens, pads included
    """

    __slots__ = ("cache", "key", "layer", "value")

    def __init__(self, cache: Any, layer: int, key: Tensor, value: Tensor) -> None:
        self.cache = cache
        self.layer = layer
        self.key = key
        self.value = value

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedModel(
            f"something reads '{name}' of the keys between the cache update and attention. A DistributedCache works "
            f'only with attn_implementation="{NAME}" and with models that hand keys and values on untouched'
        )

    def __getitem__(self, index: Any) -> Any:
        return self.__getattr__("[]")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedModel(
            f"{getattr(func, '__name__', func)} was called on the keys of a DistributedCache. It works only with "
            f'attn_implementation="{NAME}" and with models that hand keys and values on untouched'
        )


class _InferenceOnly(torch.autograd.Function):
    """Identity whose backward says why there is no gradient, instead of leaving it out silently."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, query: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        raise RuntimeError(f'attn_implementation="{NAME}" is for inference: there is no gradient through the cache')


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor | KVPair,
    value: Tensor | KVPair,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over the sharded cache; the function transformers calls in every attention layer.

    Args:
        module: the attention layer; its `layer_idx` and `config` are read, and its binding in an engine.
        key, value: what `DistributedCache.update` returned, or, in an engine, this step's tensors.
        attention_mask: what `attention_mask` made: [B, cached + S] bool, True for real tokens, or None.
        scaling: factor on q.k; None is `1 / sqrt(D)`.
        kwargs: of these `sliding_window`, `softcap`, `s_aux` (sinks [Hq]) are served.

    Shapes:
        query: [B, Hq, S, D]
        returns ([B, S, Hq, Dv] or, with a merge that scatters columns, [B, S, columns]; None)

    Raises:
        UnsupportedModel: arguments that cannot be served, or no cache.

    Notes:
        In-place: writes the pool. Collective: one merge over the kvp axis.
    """
    call = _layer_call(module, query, scaling, kwargs)
    binding = getattr(module, _BINDING, None)
    if binding is None:
        check_window(module, call.window)
    with torch.no_grad():
        if isinstance(key, KVPair):
            if value is not key:
                raise UnsupportedModel("keys and values come from different cache updates")
            out = key.cache.attend(key, query, attention_mask, call)
        elif binding is not None and torch.compiler.is_compiling():
            columns = binding.columns(query.shape[1] * value.shape[3])
            handle, factors = getattr(module, compiled.HANDLE), [call.scale, call.softcap]
            out = compiled.attend(query, key, value, handle, call.sinks, columns, call.window, factors)
        elif binding is not None:
            out = binding.attend(module.layer_idx, query, key, value, call)
        else:
            raise UnsupportedModel(
                f'attn_implementation="{NAME}" needs a DistributedCache: pass one as past_key_values= (cache= from '
                "transformers 5.24 on) and leave use_cache on"
            )
    if torch.is_grad_enabled() and query.requires_grad:
        out = _InferenceOnly.apply(out, query)
    return out, None


def attention_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int | None = None,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Hand the two-dimensional padding mask on to `attention_forward`; the mask function for transformers.

    Causality and windows are applied by the kernels from token positions, so no mask of queries by keys is ever built.

    Raises:
        UnsupportedModel: `mask_function` is anything but causal, with or without a sliding window.
    """
    refuse_mask_pattern(mask_function)
    return attention_mask


def register() -> None:
    """Make `attn_implementation="distdec"` known to transformers; done on import, harmless to repeat."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


class EngineBinding:
    """A model whose attention layers run the rows of an engine's step, packed in one line of tokens.

    transformers gets no cache. It must get a mask: given explicit positions and neither mask nor cache, it looks for
    packed sequences and reads the result on the host (a sync in every step, and an error in graph capture). A mask
    that has four dimensions already is handed to the layers as it is, so an empty one of shape [1, 1, 1, 1] is passed.

    Args:
        model: loaded with `attn_implementation="distdec"`.
        attention: the layer that all attention modules share.

    Example:
        >>> binding = bind_engine(model, DistributedAttention(mesh, cache))
        >>> binding.set_step(cache.begin_step([(0, 17), (1, 5)]))
        >>> logits = binding.forward(tokens, positions, logits_to_keep=last_tokens)     # [2, vocabulary]
    """

    def __init__(self, model: nn.Module, attention: DistributedAttention) -> None:
        self.geometry = check_model(model, attention.mesh, engine=True)
        self.model = model
        self.attention = attention
        self.batch: StepBatch | None = None
        self.mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=next(model.parameters()).device)
        self._modules = _attention_modules(model, self.geometry.num_layers)
        self._following: list[Tensor | None] = [None] * len(self._modules)
        for module in self._modules:
            if _BINDING in module.__dict__:
                raise ValueError("the model is already bound to an engine; close() that binding first")
        for module in self._modules:
            setattr(module, _BINDING, self)
        compiled.bind(self, self._modules)

    def set_step(self, batch: StepBatch) -> None:
        """Say which rows the next forward runs."""
        self.batch = batch

    def forward_kwargs(self) -> dict[str, Any]:
        """Return what every forward needs besides `input_ids` and `position_ids`; the same objects each time."""
        return {"attention_mask": self.mask, "use_cache": False}

    def forward(self, input_ids: Tensor, position_ids: Tensor, *, logits_to_keep: Tensor | int = 0) -> Tensor:
        """Run the model over the packed tokens of the step set last.

        Shapes:
            input_ids, position_ids: [T] int64, tokens in the order of the step's rows
            logits_to_keep: [n] int64, indices of the tokens whose logits are wanted; 0 = all
            returns [n, vocabulary]

        Notes:
            In-place: writes the pool. Collective: one merge a layer. Host sync: none.
        """
        out = self.model(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            logits_to_keep=logits_to_keep,
            return_dict=True,
            **self.forward_kwargs(),
        )
        return out.logits[0]

    def compile(self, **how: Any) -> None:
        """Run the model's layers through torch.compile from now on; `how`: overrides of its arguments."""
        compiled.compile_layers(compiled.layers_of(self.model, self._modules), **how)

    def fetch_following(self) -> None:
        """Fetch weights into the device's cache while layers wait for other ranks, from now on.

        Before `compile` and before steps are captured.
        """
        self._following = following.after_attention(self._modules)
        total, layers = rank_sum_of(self.model), compiled.layers_of(self.model, self._modules)
        if total is not None:
            following.link_sums(total, layers, self._modules, self.model.get_output_embeddings())

    def columns(self, width: int) -> int:
        """Return how many of an attention output's `width` columns this rank gets."""
        if self.attention.merge.replicated:
            return width
        start, stop = column_range(width, self.attention.mesh.kvp_size, self.attention.mesh.kvp_rank)
        return stop - start

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: LayerCall) -> Tensor:
        """Attend for one layer of the bound model.

        Shapes:
            query: [1, Hq, T, D], key: [1, Hkv, T, D], value: [1, Hkv, T, Dv]; returns [1, T, columns]
        """
        if self.batch is None:
            raise RuntimeError("set_step() was not called before the forward")
        check_window(self._modules[layer], call.window)
        merged = self.attention(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            self.batch,
            layer,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
            following=self._following[layer],
        )
        return merged.out[None]

    def close(self) -> None:
        """Take the binding off the model, and what was compiled with it."""
        layers, total = compiled.layers_of(self.model, self._modules), rank_sum_of(self.model)
        compiled.uncompile_layers(layers)
        if total is not None:
            following.unlink_sums(total, layers)
        for module in self._modules:
            module.__dict__.pop(_BINDING, None)
            module.__dict__.pop(compiled.HANDLE, None)
        self._modules = []


def bind_engine(model: nn.Module, attention: DistributedAttention) -> EngineBinding:
    """Bind every attention layer of a model to an engine's attention, once, at load.

    Raises:
        UnsupportedModel: the model cannot run on a sharded cache, or not with packed rows.
        ValueError: the model is already bound, or was sharded for another mesh.
    """
    return EngineBinding(model, attention)


def _attention_modules(model: nn.Module, num_layers: int) -> list[nn.Module]:
    found = [
        m
        for m in model.modules()
        if isinstance(getattr(m, "layer_idx", None), int) and type(m).__name__.endswith("Attention")
    ]
    layers = sorted(m.layer_idx for m in found)
    if layers != list(range(num_layers)):
        raise UnsupportedModel(f"expected one attention module in each of {num_layers} layers, found layers {layers}")
    return found


def _layer_call(module: nn.Module, query: Tensor, scaling: float | None, kwargs: dict[str, Any]) -> LayerCall:
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModel("position_bias is not served")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{type(module).__name__} asks for attention that is not causal")
    if kwargs.get("output_attentions"):
        raise UnsupportedModel("output_attentions: the weights of a sharded softmax never exist in one place")
    if module.training or kwargs.get("dropout"):
        raise UnsupportedModel("the model is in training mode; call model.eval()")
    window = kwargs.get("sliding_window") or 0
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return LayerCall(float(scale), int(window), float(kwargs.get("softcap") or 0.0), kwargs.get("s_aux"))


register()

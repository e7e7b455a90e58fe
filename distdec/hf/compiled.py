"""A bound model's layers through torch.compile: pointwise work in few kernels, and a matrix-vector product at one row.

Attention stays what it is. To the compiler it is one opaque operator, `distdec::attend`, which finds its layer by a
small tensor that the attention module carries; a number would make every layer a program of its own. So all layers of
a kind share two programs: one for a single token and one for any other number of tokens.

With `coordinate_descent_tuning` Inductor turns a product with one row into a tuned reduction, which reads the weights
near the memory's ceiling where a matrix library's kernels for large tiles do not.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

HANDLE = "_distdec_handle"
"""Name of the attention module's tensor that says who attends for it: [2] int64 on the CPU, (binding, layer)."""

OPTIONS = {"coordinate_descent_tuning": True}
"""What Inductor is asked for, besides its defaults."""


class LayerCall(NamedTuple):
    """The arguments of one layer's attention, apart from its tensors."""

    scale: float
    window: int
    softcap: float
    sinks: Tensor | None


class Binding(Protocol):
    """Who attends for the operator."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: LayerCall) -> Tensor:
        """Attend for one layer; see `EngineBinding.attend`."""
        ...


# bindings by the number in their handles; weak, so that a dropped engine takes its cache along
_bindings: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def bind(binding: Binding, modules: list[nn.Module]) -> None:
    """Let the operator find `binding` from its attention modules, which come in the order of their layers."""
    number = max(_bindings, default=-1) + 1
    _bindings[number] = binding
    for layer, module in enumerate(modules):
        setattr(module, HANDLE, torch.tensor([number, layer]))


@torch.library.custom_op("distdec::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    handle: Tensor,
    sinks: Tensor | None,
    columns: int,
    window: int,
    factors: list[float],
) -> Tensor:
    """Attend over the sharded cache as one operator.

    Args:
        columns: this rank's columns of the output.
        factors: scale and softcap.

    Shapes:
        query: [1, Hq, T, D], key: [1, Hkv, T, D], value: [1, Hkv, T, Dv]; handle: [2] int64 on the CPU
        returns [1, T, columns], never a view of an argument

    Notes:
        In-place: writes the pool, which the compiler does not see: only the binding reads it. Collective: one merge.
    """
    number, layer = handle.tolist()
    scale, softcap = factors
    return _bindings[number].attend(layer, query, key, value, LayerCall(scale, window, softcap, sinks))


@attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    handle: Tensor,
    sinks: Tensor | None,
    columns: int,
    window: int,
    factors: list[float],
) -> Tensor:
    return query.new_empty(1, query.shape[2], columns)


def layers_of(model: nn.Module, modules: list[nn.Module]) -> list[nn.Module]:
    """Return the decoder layers that hold these attention modules."""
    names = {module: name for name, module in model.named_modules()}
    return [model.get_submodule(names[module].rpartition(".")[0]) for module in modules]


def compile_layers(layers: list[nn.Module], **how: Any) -> None:
    """Compile decoder layers, each at its first call; those that are alike share the result.

    Args:
        how: overrides for `torch.compile`, such as another backend.
    """
    for layer in layers:
        layer.compile(**{"dynamic": True, "options": OPTIONS} | how)


def uncompile_layers(layers: list[nn.Module]) -> None:
    """Let layers run as transformers wrote them again."""
    for layer in layers:
        layer._compiled_call_impl = None

"""Which weight a decode step reads next at the places where a layer waits for other ranks, so that it can be fetched.

A layer waits three times: for the merge of attention, before its output projection; for the sum that ends this one,
before the MLP's first product; for the sum that ends the MLP, before the next layer's queries, or the head. Where it
is not plain which weight that is, as with experts, nothing is fetched.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from distdec.hf.linears import RowLinear
from distdec.rank_sum import RankSum, SumBefore

_ATTENTION = ("qkv_proj", "q_proj")
_MLP = ("gate_up_proj", "gate_proj", "up_proj")


def after_attention(modules: list[nn.Module]) -> list[Tensor | None]:
    """Return the weight that is read behind each attention module's merge."""
    return [_first_weight(module, ("o_proj",)) for module in modules]


def link_sums(total: RankSum, layers: list[nn.Module], modules: list[nn.Module], head: nn.Module | None) -> None:
    """Tell every sum that ends a product of parts what is read behind it; `unlink_sums` takes it back.

    Args:
        layers, modules: decoder layers and their attention modules, in order.
        head: what reads the last layer's output.
    """
    for i, (layer, attention) in enumerate(zip(layers, modules, strict=True)):
        behind = _first_weight(modules[i + 1], _ATTENTION) if i + 1 < len(modules) else getattr(head, "weight", None)
        blocks = [block for block in layer.modules() if isinstance(getattr(block, "down_proj", None), RowLinear)]
        # beside experts, or among several, it is not said what runs first
        mlp = _first_weight(blocks[0], _MLP) if len(blocks) == 1 else None
        for block, name, following in ((attention, "o_proj", mlp), *((block, "down_proj", behind) for block in blocks)):
            linear: Any = getattr(block, name, None)
            if isinstance(linear, RowLinear) and linear.reduce is total and following is not None:
                linear.reduce = total.before(following)


def unlink_sums(total: RankSum, layers: list[nn.Module]) -> None:
    """Let the sums of these layers fetch nothing again."""
    for layer in layers:
        for linear in layer.modules():
            if isinstance(linear, RowLinear) and isinstance(linear.reduce, SumBefore):
                linear.reduce = total


def _first_weight(block: Any, names: tuple[str, ...]) -> Tensor | None:
    for name in names:
        weight = getattr(getattr(block, name, None), "weight", None)
        if isinstance(weight, Tensor):
            return weight
    return None

"""Mixtures of experts in parts: each rank holds a stretch of every expert's width, or a stretch of the experts.

By width every rank computes its columns of every token's experts; by expert it computes whole experts for the tokens
that were sent to them. Either way a rank ends with a part of each token's sum, and one all-reduce over the ranks makes
the sum whole. Routers are replicated, so every rank knows where every token goes and no token travels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# grouped products on a GPU want rows of a multiple of 16 bytes, which eight elements of two bytes are
WIDTH_UNITS = (8, 4, 2, 1)


def split_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return rank's range of `size` items over `ranks` ranks; sizes differ by at most one.

    Example: 1536 over 5 ranks: 307, 307, 307, 307, 308.
    """
    return size * rank // ranks, size * (rank + 1) // ranks


def width_range(width: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return rank's columns of an expert, in steps of 8 where that leaves every rank some.

    Example: 768 over 5 ranks: 152, 152, 152, 152, 160.
    """
    unit = next(u for u in WIDTH_UNITS if width % u == 0 and (width // u >= ranks or u == 1))
    start, stop = split_range(width // unit, ranks, rank)
    return start * unit, stop * unit


class ExpertShapes(NamedTuple):
    """What the fused parameters of a module of experts say.

    `interleaved`: [E, H, 2I] and [E, I, H] with gate and up in turn; else [E, 2I, H] and [E, H, I], gate above up.
    """

    num_experts: int
    width: int
    interleaved: bool

    @classmethod
    def of(cls, name: str, module: nn.Module) -> ExpertShapes:
        """Read them off a module with `gate_up_proj` and `down_proj` parameters.

        Raises:
            ValueError: a layout or a step between the products that parts of experts cannot follow.
        """
        gate_up, down = module.gate_up_proj, module.down_proj
        interleaved = gate_up.shape[2] == 2 * down.shape[1] and gate_up.shape[1] == down.shape[2]
        if interleaved and getattr(module, "is_concatenated", False):
            raise ValueError(f"cannot shard {name}: transposed experts with gate beside up are not known")
        if getattr(module, "has_post_expert_norm", False):
            raise ValueError(f"cannot shard {name}: a norm of each expert's output needs all of its parts")
        return cls(gate_up.shape[0], down.shape[1] if interleaved else down.shape[2], interleaved)


def own_experts(module: nn.Module, first: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Sum the outputs of this rank's experts over the tokens that were sent to them; other experts count as zero.

    The eager equivalent, for experts e = first, first + 1, ... and each (token, slot) with index == e:
    `out[token] += weights[token, slot] * expert_e(hidden[token])`.

    Args:
        module: transformers' experts, with the parameters of this rank's experts only.
        first: number of the first of them.

    Shapes:
        hidden: [T, H]; index: [T, K] int64, experts of each token; weights: [T, K]; returns [T, H]

    Notes:
        Graph-safe: in bfloat16; shapes do not depend on the routing. Host sync: none in bfloat16 (in float32 torch's
        grouped product waits for the device).
    """
    num_own, num_slots = module.gate_up_proj.shape[0], index.shape[1]
    local = index.flatten() - first
    # pairs of other ranks sort behind all of this one's, where the grouped products do not reach
    local = torch.where((local >= 0) & (local < num_own), local, num_own)
    local, order = local.sort(stable=True)
    ends = torch.searchsorted(local, torch.arange(1, num_own + 1, device=local.device)).to(torch.int32)
    mine = (local < num_own)[:, None]
    bias_of = local.clamp(max=num_own - 1)
    x = _product(module, "gate_up_proj", hidden[order // num_slots], ends, bias_of)
    x = _product(module, "down_proj", module._apply_gate(x), ends, bias_of)
    # rows that no product reached hold anything, NaN too
    x = torch.where(mine, x * weights.flatten()[order, None], 0)
    out = torch.empty_like(x).index_copy_(0, order, x)
    return out.view(*index.shape, -1).sum(1).to(hidden.dtype)


def _product(module: nn.Module, name: str, x: Tensor, ends: Tensor, bias_of: Tensor) -> Tensor:
    weight = getattr(module, name)
    if not module.is_transposed:
        weight = weight.transpose(1, 2)
    x = F.grouped_mm(x.to(weight.dtype).contiguous(), weight, offs=ends)
    bias = getattr(module, f"{name}_bias", None)
    return x if bias is None else x + bias[bias_of]

"""Other people's merges of partial attention over ranks, written with torch's collectives.

Each starts from the same unmerged splits as ours and joins them with the same kernel; its pointwise parts are compiled
(`torch.compile`) where a GPU is. Scattered forms scatter rows of the flattened [tokens * heads, D], which spares them
the permutation that scattering heads would cost.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bench_merge_inputs import Splits
from torch import Tensor

from distdec.mesh import Mesh


class Peer(NamedTuple):
    """A merge: from the joined local partial (out [N, D], lse [N]) to merged rows; `scattered` gives 1 / R of them."""

    name: str
    merge: Callable[[Tensor, Tensor], Tensor]
    scattered: bool


def weigh(out: Tensor, lse: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Return numerator [N, D] and denominator [N, 1] relative to the common maximum."""
    weight = torch.exp(lse - top)[:, None]
    return torch.where(weight == 0, 0.0, out * weight), weight


def weigh_packed(out: Tensor, lse: Tensor, top: Tensor) -> Tensor:
    return torch.cat(weigh(out, lse, top), 1)


def share(out: Tensor, lse: Tensor, lses: Tensor) -> Tensor:
    """Scale this rank's rows by its share of the softmax, from all ranks' LSEs [R, N]."""
    weight = torch.exp(lse - torch.logsumexp(lses, 0))[:, None]
    return torch.where(weight == 0, 0.0, out * weight)


def pack(out: Tensor, lse: Tensor) -> Tensor:
    return torch.cat([out, lse[:, None]], 1)


def unpack(rows: Tensor) -> Tensor:
    """Merge packed rows [R, n, D + 1]."""
    weight = torch.softmax(rows[..., -1], 0)[..., None]
    return torch.where(weight == 0, 0.0, weight * rows[..., :-1]).sum(0)


def divide(total: Tensor) -> Tensor:
    return total[:, :-1] / total[:, -1:]


def peers(mesh: Mesh, splits: Splits, compiled: dict[str, Callable[..., Any]]) -> list[Peer]:
    """Return the peers for this size; `compiled` maps the names of the pointwise parts to what runs them."""
    group, size = mesh.kvp_group, mesh.kvp_size
    rows, dim = splits.rows * splits.num_q_heads, splits.dim
    device = splits.out.device
    lses = torch.empty(size, rows, device=device)
    mine = torch.empty(rows // size, dim, device=device)
    arrived = torch.empty(size, rows // size, dim + 1, device=device)

    def two_all_reduces(out: Tensor, lse: Tensor) -> Tensor:
        top = lse.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        total = compiled["weigh_packed"](out, lse, top)
        dist.all_reduce(total, group=group)
        return compiled["divide"](total)

    def three_all_reduces(out: Tensor, lse: Tensor) -> Tensor:
        top = lse.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        numerator, denominator = compiled["weigh"](out, lse, top)
        dist.all_reduce(numerator, group=group)
        dist.all_reduce(denominator, group=group)
        return numerator / denominator

    def gather_and_reduce_scatter(out: Tensor, lse: Tensor) -> Tensor:
        dist.all_gather_into_tensor(lses.view(-1), lse.contiguous(), group=group)
        shared = compiled["share"](out, lse, lses)
        dist.reduce_scatter_tensor(mine.view(-1), shared.view(-1), group=group)
        return mine

    def packed_all_to_all(out: Tensor, lse: Tensor) -> Tensor:
        packed = compiled["pack"](out, lse)
        dist.all_to_all_single(arrived.view(-1), packed.view(-1), group=group)
        return compiled["unpack"](arrived)

    found = [
        Peer("two all-reduces", two_all_reduces, False),
        Peer("three all-reduces (tree attention)", three_all_reduces, False),
        Peer("all-gather LSE + reduce-scatter", gather_and_reduce_scatter, True),
        Peer("packed all-to-all", packed_all_to_all, True),
    ]
    if device.type == "cuda":
        found.append(symmetric_one_shot(mesh, rows, dim, compiled))
    return found


def symmetric_one_shot(mesh: Mesh, rows: int, dim: int, compiled: dict[str, Callable[..., Any]]) -> Peer:
    """Return MAX by NCCL, then the packed sum by PyTorch's one-shot all-reduce over symmetric memory."""
    import torch.distributed._symmetric_memory as symmetric

    # one-shot takes whole 16-byte words a rank; the row of D + 1 floats is padded up
    width = -(-rows * (dim + 1) // (4 * mesh.kvp_size)) * 4 * mesh.kvp_size
    buffer = symmetric.empty(width, dtype=torch.float32, device=mesh.device)
    symmetric.rendezvous(buffer, mesh.kvp_group)
    buffer.zero_()
    name, used = mesh.kvp_group.group_name, rows * (dim + 1)

    def merge(out: Tensor, lse: Tensor) -> Tensor:
        top = lse.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=mesh.kvp_group)
        buffer[:used].view(rows, dim + 1).copy_(compiled["weigh_packed"](out, lse, top))
        total = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", name)
        return compiled["divide"](total[:used].view(rows, dim + 1))

    return Peer("max + symmetric one-shot sum", merge, False)


def pointwise(compile_them: bool) -> dict[str, Callable[..., Any]]:
    """Return the pointwise parts by name, compiled or as written."""
    parts = {part.__name__: part for part in (weigh, weigh_packed, share, pack, unpack, divide)}
    if not compile_them:
        return parts
    return {name: torch.compile(part, dynamic=True) for name, part in parts.items()}

"""Run a merge mode's program with the collectives of `torch.distributed`."""

from __future__ import annotations

import importlib.util
from functools import partial as bind

import torch
import torch.distributed as dist
from torch import Tensor

from distdec.merge_modes import MODES, Merge, Merged, Program, alone, check_partial
from distdec.merge_place import REFERENCE, Ops, Place
from distdec.mesh import Mesh, all_gather, reduce_scatter
from distdec.ops.partial import Partial


def advance(steps: Program, answer: Tensor | None) -> tuple[tuple[str, Tensor] | None, Merged | None]:
    """Send a program its answer; return the next collective it asks for, or its result."""
    try:
        return steps.send(answer), None
    except StopIteration as done:
        return None, done.value


def kernel_ops() -> Ops:
    """Return the ops that run in a launch each."""
    # imported here: the reference runs where Triton is not installed
    from distdec.ops.combine_triton import fold_ranks
    from distdec.ops.launch_triton import Plans
    from distdec.ops.packed_triton import pack

    plans = Plans()
    return Ops(bind(pack, plans=plans), bind(fold_ranks, plans=plans), True)


class CollectiveMerge(Merge):
    """Run a mode's program with `torch.distributed` over the mesh's kvp group.

    Args:
        ops: of the modes that send packed partials; None takes kernels on a GPU, the reference elsewhere.
    """

    def __init__(self, mode: str, mesh: Mesh, wire: torch.dtype, reason: str, ops: Ops | None = None) -> None:
        if ops is None:
            on_gpu = mesh.device.type == "cuda" and importlib.util.find_spec("triton") is not None
            ops = kernel_ops() if on_gpu else REFERENCE
        self.mode = mode
        self.reason = reason
        self.replicated = MODES[mode].replicated
        self.calls = 0
        self.mesh = mesh
        self._place = Place(mesh.kvp_rank, mesh.kvp_size, wire, ops)
        self._program = MODES[mode].program if mesh.kvp_size > 1 else alone

    def __call__(
        self, partial: Partial, *, sinks: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Merged:
        check_partial(partial, sinks)
        steps = self._program(partial, self._place, sinks, out_dtype)
        asked, merged = advance(steps, None)
        while asked is not None:
            asked, merged = advance(steps, self._collective(*asked))
        assert merged is not None
        return merged

    def _collective(self, kind: str, mine: Tensor) -> Tensor:
        """Enter one collective. The result lies in a reused buffer, in `mine` for the all-reduces."""
        self.calls += 1
        group = self.mesh.kvp_group
        if kind in ("max", "sum"):
            dist.all_reduce(mine, op=dist.ReduceOp.MAX if kind == "max" else dist.ReduceOp.SUM, group=group)
            return mine
        shape = {"gather": (self._place.size, *mine.shape), "reduce_scatter": mine.shape[1:], "all_to_all": mine.shape}
        result = self._place.buffer(f"{kind}_result", shape[kind], mine.dtype, mine.device)
        # flat views: gloo wants rows concatenated, not stacked
        if kind == "gather":
            all_gather(result.view(-1), mine.view(-1), group)
        elif kind == "reduce_scatter":
            reduce_scatter(result.view(-1), mine.view(-1), group)
        else:
            dist.all_to_all_single(result.view(-1), mine.view(-1), group=group)
        return result

"""The sum over all ranks of a mesh that ends a product of parts: by the collective library, small ones in one kernel.

A sharded model has one `RankSum`, which its layers call. It begins with the library's all-reduce; `choose` moves the
tensors of decode steps, a few KiB each, to a kernel over symmetric memory (`ops/one_shot_sum_triton.py`).
"""

from __future__ import annotations

import weakref
from functools import partial as bind

import torch
import torch.distributed as dist
from torch import Tensor

from distdec.config import REDUCE_MODES
from distdec.mesh import Mesh
from distdec.slabs import TIMEOUT_S, MapSlabs, NotPossible, Peers, SharedSlabs, find_mapping, spin_limit

CAPACITY_BYTES = 1 << 20
"""Default room for one rank's tensor: 128 decode rows of 4,096 bfloat16 numbers."""

# sums by the number in their handles; weak, so that a dropped model takes its slabs along
_sums: weakref.WeakValueDictionary[int, RankSum] = weakref.WeakValueDictionary()


class RankSum:
    """Sum tensors over a group of ranks; every rank gets the same bits.

    Args:
        group: the ranks.

    Attributes:
        handle: [2] int64 on the CPU, by which a compiled program finds this object, and what follows the sum; numbers
            would make every model a program of its own.
        reason: what sums, and why.
    """

    def __init__(self, group: object) -> None:
        self.group = group
        self.reason = "all-reduce: nothing else was chosen"
        self._kernel: OneShotSum | None = None
        self._following: list[Tensor] = []
        self._number = max(_sums, default=-1) + 1
        _sums[self._number] = self
        # the CPU by name: models are built where tensors go to the meta device
        self.handle = torch.tensor([self._number, -1], device="cpu")

    def __call__(self, y: Tensor) -> Tensor:
        """Return the sum of every rank's `y`; whether that is `y` itself, changed, is left open.

        Shapes:
            y: any, the same on every rank, of a floating dtype; the sum has its shape and dtype

        Raises:
            RuntimeError: an earlier sum lost a rank.

        Notes:
            Collective: the group. Graph-safe. Host sync: none.
        """
        return self.add(y, self.handle)

    def add(self, y: Tensor, handle: Tensor) -> Tensor:
        """Sum, by this object's handle or that of a `SumBefore`."""
        if self._kernel is None:
            dist.all_reduce(y, group=self.group)
            return y
        return sum_over_ranks(y, handle) if torch.compiler.is_compiling() else self.launch(y, handle)

    def launch(self, y: Tensor, handle: Tensor) -> Tensor:
        """Sum in the kernel."""
        assert self._kernel is not None, "a sum without its kernel"
        place = int(handle[1])
        return self._kernel(y) if place < 0 else self._kernel(y, self._following[place])

    def before(self, following: Tensor) -> SumBefore:
        """Return this sum for a place where a weight is read next, which the kernel fetches into the cache meanwhile.

        Both see `choose` and `close` alike.
        """
        self._following.append(following)
        return SumBefore(self, torch.tensor([self._number, len(self._following) - 1], device="cpu"))

    def choose(self, mode: str, mesh: Mesh, timeout_s: float = TIMEOUT_S) -> None:
        """Decide what sums from now on.

        Args:
            mode: "nccl": the library (gloo on CPUs). "one_shot": the kernel where it takes the size. "auto": that where
                it is possible.
            mesh: the one the model was sharded for.
            timeout_s: how long the kernel waits for a late rank, about.

        Raises:
            ValueError: an unknown mode.
            RuntimeError: the ranks ask for different modes, or for `one_shot` where it is not possible, and why.

        Notes:
            Collective: the whole mesh. Graphs that were captured before must be gone.
        """
        if mode not in REDUCE_MODES:
            raise ValueError(f"the sum over ranks must be one of {', '.join(REDUCE_MODES)}, got {mode!r}")
        self.close()
        mesh.check_same("reduce", mode.encode())
        self.reason = "all-reduce: asked for"
        if mode == "nccl":
            return
        try:
            self.use(OneShotSum(mesh, timeout_s=timeout_s))
        except NotPossible as error:
            if mode == "one_shot":
                raise
            self.reason = f"all-reduce: {error}"

    def use(self, kernel: OneShotSum) -> None:
        """Let this kernel sum, until `close`, which closes it too."""
        self._kernel = kernel
        self.reason = "one_shot: one kernel over symmetric memory"

    def check(self) -> None:
        """Raise if a sum that has run lost a rank; reads host memory, without waiting for the device."""
        if self._kernel is not None:
            self._kernel.check()

    def close(self) -> None:
        """Give back the kernel's slab and go back to the library; safe to call twice.

        Notes:
            Collective: the whole mesh, where there is a kernel. Graphs that hold it must be gone.
        """
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            kernel.close()
            self.reason = "all-reduce: the kernel was closed"


class SumBefore:
    """A `RankSum` at one place of a model, by a handle that says what follows."""

    def __init__(self, total: RankSum, handle: Tensor) -> None:
        self.total = total
        self.handle = handle

    def __call__(self, y: Tensor) -> Tensor:
        """Return the sum, as `RankSum`."""
        return self.total.add(y, self.handle)


class OneShotSum:
    """Sum small tensors over all ranks of a mesh with one kernel; larger ones through its group's all-reduce.

    A number that is not finite spoils its own place in the sum, on every rank, and no other.

    Args:
        mesh: at least two ranks, on one host, with peer access between their GPUs.
        capacity_bytes: size of the largest tensor that the kernel takes, about; the slab has 2 x ranks x this.
        timeout_s: how long a launch waits for a late rank, about.
        first_epoch: where the flags begin to count; any int32.
        map_slabs: instead of symmetric memory.

    Raises:
        RuntimeError: this mesh cannot do it; the reason is the same on every rank.

    Notes:
        Collective: the whole mesh, when made and when closed. One object serves one stream at a time, eager calls and
        graph replays alike; a graph that was captured with it must be gone before it is closed.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        capacity_bytes: int = CAPACITY_BYTES,
        timeout_s: float = TIMEOUT_S,
        first_epoch: int = 0,
        map_slabs: MapSlabs | None = None,
    ) -> None:
        what, peers = "one_shot sum", Peers.all(mesh)
        map_slabs = map_slabs or find_mapping(what, peers)
        # imported here: without Triton the line above has refused, and said so
        from distdec.ops.one_shot_sum_triton import BLOCK_BYTES, Plans, fits, one_shot_sum

        self.mesh = mesh
        self._slabs = SharedSlabs(what, peers, map_slabs, capacity_bytes, first_epoch, unit=BLOCK_BYTES)
        self._alarm = self._slabs.alarm
        self.fits = bind(fits, self._slabs.slab)
        self._launch = bind(one_shot_sum, self._slabs.slab, spin_limit=spin_limit(timeout_s), plans=Plans())

    def __call__(self, y: Tensor, following: Tensor | None = None) -> Tensor:
        """Return the sum as a new contiguous tensor; as `RankSum`. `following`: a weight that is read next."""
        if self._alarm[0]:
            self.check()
        if self.fits(y.numel(), y.dtype):
            out = y.new_empty(y.shape)
            self._launch(y.contiguous(), out, following=following)
            return out
        out = y.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=self.mesh.group)
        return out

    def check(self) -> None:
        """Raise if a launch that has run lost a rank; see `SharedSlabs.check`."""
        self._slabs.check()

    def close(self) -> None:
        """Free the slab; see `SharedSlabs.close`."""
        self._slabs.close()


@torch.library.custom_op("distdec::sum_over_ranks", mutates_args=())
def sum_over_ranks(y: Tensor, handle: Tensor) -> Tensor:
    """Sum over ranks as one operator, for programs that a compiler traces.

    Shapes:
        y: any; handle: [2] int64 on the CPU, as `RankSum.handle`; returns as y, contiguous, never a view of it
    """
    return _sums[int(handle[0])].launch(y, handle)


@sum_over_ranks.register_fake
def _(y: Tensor, handle: Tensor) -> Tensor:
    return y.new_empty(y.shape)

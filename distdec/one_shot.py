"""The `one_shot` merge: partials pushed into the peers' memory and merged in the kernel that joins the local splits.

This module owns what talks to the other ranks: the checks that the link allows it, the slab of symmetric memory, its
rendezvous over the kvp group, and the merge object. The protocol and the kernel are in `ops/one_shot_triton.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import socket
from collections.abc import Callable, Sequence
from functools import partial as bind
from pathlib import Path

import torch
from torch import Tensor

from distdec.merge_collective import CollectiveMerge
from distdec.merge_modes import TRANSPORTS, Merge, Merged, check_partial, check_transport, column_range, padded_columns
from distdec.mesh import Mesh, all_gather
from distdec.ops.partial import Partial
from distdec.ops.splits import Splits

CAPACITY_BYTES = 8 << 20
"""Default room for one rank's rows of one launch: 256 tokens of 64 heads of 128 floats."""
TIMEOUT_S = 20.0
"""Default wait for a late rank: longer than a peer needs to load or compile a kernel, shorter than an operator's."""
POLLS_PER_S = 4_600_000
"""How often a program polls a flag that stays down: measured on one H200 (2026-11-29)."""

_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class OneShotMerge(Merge):
    """Merge the partials of a kvp group with one kernel and no call of a collective library.

    A value that is not finite in a row with keys makes that row NaN, one query head of one token, on every rank.

    Args:
        mesh: at least two kvp ranks, on one host, with peer access between their GPUs.
        scatter: True gives every rank its share of the columns, as `reduce_scatter` does; False gives all columns to
            every rank, bit-identical.
        transport: "float32", or "bfloat16" or "float8_e4m3" to round every rank's output row once (off by at most 2^-8
            or 2^-4 of the largest |out| that any rank sends; LSEs stay float32).
        capacity_bytes: room for the rows of one rank in one call; a call with more goes through `all_gather` or
            `all_to_all` instead. The slab takes 2 x kvp x this.
        timeout_s: how long a launch waits for a late rank, about.
        first_epoch: where the flags begin to count; any int32.
        map_slabs: gives this rank's view of every kvp rank's slab; tests put them in shared host memory.

    Raises:
        ValueError: an unknown transport.
        RuntimeError: this mesh cannot do it; the reason is the same on every rank.

    Notes:
        Collective: the whole mesh, when made and when closed. One object serves one stream at a time, eager calls and
        graph replays alike; a graph that was captured with it must be gone before it is closed.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        scatter: bool = False,
        transport: str = "float32",
        capacity_bytes: int = CAPACITY_BYTES,
        timeout_s: float = TIMEOUT_S,
        first_epoch: int = 0,
        map_slabs: Callable[[Mesh, int], list[Tensor]] | None = None,
    ) -> None:
        check_transport("one_shot", transport)
        if map_slabs is None:
            reason = why_not(mesh)
            if reason is not None:
                raise RuntimeError(f"merge mode one_shot is not possible here: {reason}")
            map_slabs = symmetric_slabs
        self.mode = "one_shot_scatter" if scatter else "one_shot"
        self.replicated = not scatter
        self.reason = f"{self.mode}: one kernel over symmetric memory"
        self.calls = 0
        self.mesh = mesh
        self._payload = TRANSPORTS[transport]
        self._spin_limit = min(int(timeout_s * POLLS_PER_S), 2**31 - 1)
        self._large = CollectiveMerge("all_to_all" if scatter else "all_gather", mesh, self._payload, self.reason)
        self._open(map_slabs, capacity_bytes, first_epoch)

    def _open(self, map_slabs: Callable[[Mesh, int], list[Tensor]], capacity_bytes: int, first_epoch: int) -> None:
        """Map the slabs, and start with all flags and epochs at `first_epoch`."""
        # imported here: without Triton the refusal above says so
        from distdec.ops.one_shot_triton import MAX_PROGRAMS_PER_SM, Plans, Slab, one_shot

        mesh, on_gpu = self.mesh, self.mesh.device.type == "cuda"
        sms = torch.cuda.get_device_properties(mesh.device).multi_processor_count if on_gpu else 1
        # a channel is a program, so every rank must run as many: the fewest that any device holds at once
        channels = MAX_PROGRAMS_PER_SM * min(row[0] for row in _tell(mesh, [sms]))
        # the kernel tells the host of a lost rank here, so that the host need not wait for the device to know
        self._alarm = torch.zeros(1, dtype=torch.int32, pin_memory=on_gpu)
        self._alarmed = self._alarm.numpy()
        state = torch.full((channels + 1,), first_epoch, dtype=torch.int32, device=mesh.device)
        state[channels] = 0
        # whole 128-byte lines, so that no two programs share one
        capacity = max(1, capacity_bytes // (128 * channels)) * 128
        slab = Slab(state, state, mesh.kvp_rank, mesh.kvp_size, channels, capacity)
        self._slabs = map_slabs(mesh, slab.num_bytes)
        addresses = [memory.data_ptr() for memory in self._slabs] + [self._alarm.data_ptr()]
        self._slab = slab._replace(peers=torch.tensor(addresses, dtype=torch.int64, device=mesh.device))
        self._kernel = bind(one_shot, plans=Plans())
        self._slabs[mesh.kvp_rank][slab.flags_offset :].view(torch.int32).fill_(first_epoch)
        # a peer may push as soon as it leaves here, so every rank's flags must have been written before
        if on_gpu:
            torch.cuda.synchronize(mesh.device)
        mesh.barrier()

    def fits(self, num_tokens: int, num_q_heads: int, dim: int) -> bool:
        """Tell whether a call of this size runs in the kernel; the same answer on every rank."""
        return num_tokens * num_q_heads <= self._slab.max_items(dim, self._payload.itemsize)

    def __call__(
        self, partial: Partial, *, sinks: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Merged:
        """Merge partials whose local splits are joined already: prefill rows, the reference ops, foreign ops.

        Shapes:
            partial: out [T, Hq, Dv] float32, lse [T, Hq] float32, natural log
            sinks: [Hq], one extra logit a head, counted once
            returns `Merged`: out [T, columns] in `out_dtype` (None: float32), lse [T, Hq], columns (start, stop)

        Raises:
            ValueError: the shapes do not fit each other.
            RuntimeError: an earlier call lost a rank.

        Notes:
            Collective: the kvp axis. Graph-safe. Host sync: none.
        """
        check_partial(partial)
        num_tokens, num_q_heads, dim = partial.out.shape
        if not self.fits(num_tokens, num_q_heads, dim):
            merged = self._large(partial, sinks=sinks, out_dtype=out_dtype)
            self.calls += 1
            return merged
        return self.merge_splits(Splits.of(partial), sinks=sinks, out_dtype=out_dtype)

    def merge_splits(
        self, splits: Splits, *, sinks: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Merged:
        """Join the splits that `decode` left in its workspace and merge them across ranks, in one kernel.

        Shapes:
            sinks and returns: as `__call__`; `fits` must hold

        Raises:
            ValueError: more rows than the slab takes.
            RuntimeError: an earlier call lost a rank.

        Notes:
            Collective: the kvp axis. Graph-safe. Host sync: none.
        """
        if self._alarmed[0]:
            self.check()
        num_heads, slab = splits.num_q_heads, self._slab
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(f"expected sinks [{num_heads}], one a query head, got {tuple(sinks.shape)}")
        total = num_heads * splits.head_dim
        width, columns = 0, (0, total)
        if not self.replicated:
            width, columns = padded_columns(total, slab.num_ranks), column_range(total, slab.num_ranks, slab.rank)
        out = splits.out.new_empty((splits.num_tokens, columns[1] - columns[0]), dtype=out_dtype or torch.float32)
        lse = splits.lse.new_empty((splits.num_tokens, num_heads))
        self._kernel(
            slab,
            splits,
            out,
            lse,
            payload=self._payload,
            spin_limit=self._spin_limit,
            columns=width,
            sinks=sinks,
        )
        self.calls += 1
        return Merged(out, lse, columns)

    def check(self) -> None:
        """Raise if a launch that has run lost a rank. Cheap: reads host memory, without waiting for the device.

        Raises:
            RuntimeError: names the kvp ranks that did not come in time, or says that the ranks are out of step.
        """
        word = int(self._alarmed[0])
        if not word:
            return
        late = [rank for rank in range(self._slab.num_ranks) if word >> rank & 1]
        told = f"kvp ranks {late} did not come in time" if late else "the ranks are out of step"
        raise RuntimeError(
            f"one_shot merge on kvp rank {self._slab.rank}: {told}; its rows are NaN since, and the merge object is "
            "of no more use on any rank"
        )

    def close(self) -> None:
        """Free the slab once no rank can write to it any more; safe to call twice.

        Notes:
            Collective: the whole mesh. Host sync: waits for this device.
        """
        if not self._slabs:
            return
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)
        # a peer that was lost may be gone: its closed connection then ends the wait
        with contextlib.suppress(RuntimeError) if self._alarmed[0] else contextlib.nullcontext():
            self.mesh.barrier()
        self._slabs = []


def symmetric_slabs(mesh: Mesh, num_bytes: int) -> list[Tensor]:
    """Allocate this rank's slab in symmetric memory and map those of its kvp group, in rank order.

    Raises:
        RuntimeError: on every rank of the mesh, if any could not.

    Notes:
        Collective: the whole mesh. Host sync: yes, so not while a graph is captured.
    """
    import torch.distributed._symmetric_memory as symmetric

    fault, slabs = None, []
    try:
        mine = symmetric.empty(num_bytes, dtype=torch.uint8, device=mesh.device)
        handle = symmetric.rendezvous(mine, mesh.kvp_group)
        slabs = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(mesh.kvp_size)]
        if slabs[mesh.kvp_rank].data_ptr() != mine.data_ptr():
            raise RuntimeError("the slab does not begin where its mapping does")
        # the allocation itself, which the view of it does not keep alive
        slabs[mesh.kvp_rank] = mine
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    failed = [rank for rank, row in enumerate(_tell(mesh, [fault is not None])) if row[0]]
    if failed:
        raise RuntimeError(
            f"merge mode one_shot is not possible here: ranks {failed} could not set up symmetric memory"
            + (f" ({fault})" if fault else "")
        )
    return slabs


def why_not(mesh: Mesh) -> str | None:
    """Say why `one_shot` cannot work on this mesh, or None where it can; the same answer on every rank.

    Notes:
        Collective: the whole mesh, over gloo. Allocates nothing on the device.
    """
    if mesh.kvp_size == 1:
        return "there is one kvp rank, so nothing to merge"
    code = _REASONS.index(_local_reason(mesh))
    gpu = _gpu(mesh.device.index) if code == 0 else 0
    rows = _tell(mesh, [code, _host(), gpu])
    for rank, row in enumerate(rows):
        if row[0]:
            return f"{_REASONS[row[0]]} (rank {rank})"
    for start in range(0, mesh.world_size, mesh.kvp_size):
        members = rows[start : start + mesh.kvp_size]
        who = f"ranks {start} to {start + mesh.kvp_size - 1}"
        if len({row[1] for row in members}) > 1:
            return f"a kvp group lies on several hosts ({who})"
        if len({row[2] for row in members}) < mesh.kvp_size:
            return f"two ranks of a kvp group share one GPU ({who})"
    first = mesh.rank - mesh.kvp_rank
    linked = _can_push(mesh.device.index, {row[2] for row in rows[first : first + mesh.kvp_size]})
    cut_off = [rank for rank, row in enumerate(_tell(mesh, [not linked])) if row[0]]
    if cut_off:
        return f"no peer access with atomics between the GPUs of a kvp group (ranks {cut_off})"
    return None


_REASONS = (None, "no CUDA device", "no Triton", "this PyTorch has no symmetric memory for CUDA")


def _local_reason(mesh: Mesh) -> str | None:
    if mesh.device.type != "cuda":
        return _REASONS[1]
    if importlib.util.find_spec("triton") is None:
        return _REASONS[2]
    try:
        import torch.distributed._symmetric_memory as symmetric
    except ImportError:
        return _REASONS[3]
    return None if hasattr(symmetric, "empty") and hasattr(symmetric, "rendezvous") else _REASONS[3]


def _tell(mesh: Mesh, words: Sequence[int]) -> list[list[int]]:
    """Return every mesh rank's words, in rank order."""
    mine = torch.tensor([int(word) for word in words], dtype=torch.int64)
    rows = torch.empty(mesh.world_size * len(words), dtype=torch.int64)
    all_gather(rows, mine, mesh.control_group)
    return rows.view(mesh.world_size, -1).tolist()


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def _host() -> int:
    """Number of this host: containers on one host have names of their own but share its boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return _number(boot.read_text() if boot.exists() else socket.gethostname())


def _gpu(index: int) -> int:
    return _number(str(torch.cuda.get_device_properties(index).uuid))


def _can_push(index: int, gpus: set[int]) -> bool:
    """Tell whether this GPU can store to, and swap a word of, those of its peers that this process sees.

    A peer that is hidden from this process is left to the rendezvous, which fails where it cannot be mapped.
    """
    for other in range(torch.cuda.device_count()):
        if other == index or _gpu(other) not in gpus:
            continue
        if not torch.cuda.can_device_access_peer(index, other) or not _has_native_atomics(index, other):
            return False
    return True


def _has_native_atomics(source: int, target: int) -> bool:
    """Tell whether atomics of one GPU work on another's memory: over NVLink, not over plain PCIe.

    PyTorch does not say, so the driver is asked; where it does not answer the question, access is taken as enough.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    value = ctypes.c_int(0)
    status = driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, source, target)
    return status != 0 or value.value == 1

"""Slabs of symmetric memory: where the ranks of a group can reach each other's GPUs, and how their slabs are set up.

This module owns what the one-kernel exchanges need of other ranks: the checks that the link allows it, the rendezvous,
and what the kernels tell of lost ranks. The protocol is in `ops/slab_triton.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distdec.mesh import Mesh, all_gather

TIMEOUT_S = 20.0
"""Default wait for a late rank: longer than a peer needs to load or compile a kernel, shorter than an operator's."""
POLLS_PER_S = 4_600_000
"""How often a program polls a flag that stays down: measured on one H200 (2026-11-29)."""

_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class NotPossible(RuntimeError):
    """These GPUs cannot do it, all ranks know, and all for the same reason: they may agree on something else.

    Any other error may be one rank's own, such as a lack of memory; going on without it would part the ranks.
    """


class Peers(NamedTuple):
    """A run of consecutive ranks of a mesh that push into each other's memory: all, or a kvp group.

    Attributes:
        group: their process group, whose ranks are in this order.
        first: mesh rank of the first of them.
        size: how many they are; the mesh falls into runs of this size.
        group_name, rank_name: what messages call the run, and a member.
    """

    mesh: Mesh
    group: object
    first: int
    size: int
    group_name: str
    rank_name: str

    @classmethod
    def kvp(cls, mesh: Mesh) -> Peers:
        """This rank's kvp group."""
        return cls(mesh, mesh.kvp_group, mesh.rank - mesh.kvp_rank, mesh.kvp_size, "a kvp group", "kvp rank")

    @classmethod
    def all(cls, mesh: Mesh) -> Peers:
        """All ranks of the mesh."""
        return cls(mesh, mesh.group, 0, mesh.world_size, "the mesh", "rank")

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.mesh.rank - self.first


MapSlabs = Callable[[Peers, int], list[Tensor]]
"""Gives this rank's view of every peer's slab of so many bytes; tests put them in shared host memory."""


class SharedSlabs:
    """This rank's slab and its view of the peers', for one kind of launch.

    Args:
        what: what messages call the user of the slabs.
        map_slabs: from `find_mapping`.
        capacity_bytes: room for the data of one rank in one launch, about; a slab takes 2 x ranks x this.
        first_epoch: where flags and epochs begin to count; any int32.
        unit: a channel's capacity is a multiple of so many bytes, itself one of 128: whole lines of memory, so that no
            two programs share one.
        words: bytes of a channel's words for one source, where the protocol of words is used; a multiple of 128 too.

    Attributes:
        slab: the `Slab` that a launch takes; all flags and epochs are at `first_epoch` on every rank.
        alarm: [1] int32 array in host memory, 0 until a launch has lost a rank.

    Raises:
        RuntimeError: the slabs could not be mapped; on every rank alike.

    Notes:
        Collective: the whole mesh, when made and when closed.
    """

    def __init__(
        self,
        what: str,
        peers: Peers,
        map_slabs: MapSlabs,
        capacity_bytes: int,
        first_epoch: int = 0,
        *,
        unit: int = 128,
        words: int = 0,
    ) -> None:
        # imported here: `find_mapping` refuses where there is no Triton
        from distdec.ops.slab_triton import MAX_PROGRAMS_PER_SM, Slab

        self.what, self.peers = what, peers
        mesh = peers.mesh
        on_gpu = mesh.device.type == "cuda"
        sms = torch.cuda.get_device_properties(mesh.device).multi_processor_count if on_gpu else 1
        # a channel is a program, so every rank must run as many: the fewest that any device holds at once
        channels = MAX_PROGRAMS_PER_SM * min(row[0] for row in _tell(mesh, [sms]))
        # the kernel tells the host of a lost rank here, so that the host need not wait for the device to know
        self._alarm = torch.zeros(1, dtype=torch.int32, pin_memory=on_gpu)
        self.alarm = self._alarm.numpy()
        state = torch.full((channels + 1,), first_epoch, dtype=torch.int32, device=mesh.device)
        state[channels] = 0
        capacity = max(1, capacity_bytes // (unit * channels)) * unit
        slab = Slab(state, state, peers.rank, peers.size, channels, capacity, words)
        self._memory = map_slabs(peers, slab.num_bytes)
        addresses = [memory.data_ptr() for memory in self._memory] + [self._alarm.data_ptr()]
        self.slab: Any = slab._replace(peers=torch.tensor(addresses, dtype=torch.int64, device=mesh.device))
        # flags and words alike: a word of this epoch is older than the first use
        self._memory[peers.rank][slab.flags_offset :].view(torch.int32).fill_(first_epoch)
        # a peer may push as soon as it leaves here, so every rank's flags must have been written before
        if on_gpu:
            torch.cuda.synchronize(mesh.device)
        mesh.barrier()

    def check(self) -> None:
        """Raise if a launch that has run lost a rank. Cheap: reads host memory, without waiting for the device.

        Raises:
            RuntimeError: names the ranks that did not come in time, or says that the ranks are out of step.
        """
        word = int(self.alarm[0])
        if not word:
            return
        member = self.peers.rank_name
        late = [rank for rank in range(self.peers.size) if word >> rank & 1]
        told = f"{member}s {late} did not come in time" if late else "the ranks are out of step"
        raise RuntimeError(
            f"{self.what} on {member} {self.peers.rank}: {told}; its results are NaN since, and it is of no more use "
            "on any rank"
        )

    def close(self) -> None:
        """Free the slab once no rank can write to it any more; safe to call twice.

        Notes:
            Collective: the whole mesh. Host sync: waits for this device.
        """
        if not self._memory:
            return
        mesh = self.peers.mesh
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        # a peer that was lost may be gone: its closed connection then ends the wait
        with contextlib.suppress(RuntimeError) if self.alarm[0] else contextlib.nullcontext():
            mesh.barrier()
        self._memory = []


def find_mapping(what: str, peers: Peers) -> MapSlabs:
    """Return what maps the slabs of these ranks.

    Raises:
        NotPossible: `what` is not possible here; the reason is the same on every rank.

    Notes:
        Collective: the whole mesh.
    """
    reason = why_not(peers)
    if reason is not None:
        raise NotPossible(f"{what} is not possible here: {reason}")
    return symmetric_slabs


def spin_limit(timeout_s: float) -> int:
    """Return how many polls take about this long."""
    return min(int(timeout_s * POLLS_PER_S), 2**31 - 1)


def symmetric_slabs(peers: Peers, num_bytes: int) -> list[Tensor]:
    """Allocate this rank's slab in symmetric memory and map those of its peers, in their order.

    Raises:
        RuntimeError: on every rank of the mesh, if any could not.

    Notes:
        Collective: the whole mesh. Host sync: yes, so not while a graph is captured.
    """
    import torch.distributed._symmetric_memory as symmetric

    mesh, fault, slabs = peers.mesh, None, []
    try:
        mine = symmetric.empty(num_bytes, dtype=torch.uint8, device=mesh.device)
        handle = symmetric.rendezvous(mine, peers.group)
        slabs = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(peers.size)]
        if slabs[peers.rank].data_ptr() != mine.data_ptr():
            raise RuntimeError("the slab does not begin where its mapping does")
        # the allocation itself, which the view of it does not keep alive
        slabs[peers.rank] = mine
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    failed = [rank for rank, row in enumerate(_tell(mesh, [fault is not None])) if row[0]]
    if failed:
        told = f" ({fault})" if fault else ""
        raise NotPossible(f"one kernel for all ranks is not possible here: no symmetric memory on ranks {failed}{told}")
    return slabs


def why_not(peers: Peers) -> str | None:
    """Say why these ranks cannot push into each other's memory, or None where they can; the same on every rank.

    Notes:
        Collective: the whole mesh, over gloo. Allocates nothing on the device.
    """
    mesh, size, name = peers.mesh, peers.size, peers.group_name
    if size == 1:
        return f"there is one {peers.rank_name}, so nothing to merge"
    code = _REASONS.index(_local_reason(mesh))
    gpu = _gpu(mesh.device.index) if code == 0 else 0
    rows = _tell(mesh, [code, _host(), gpu])
    for rank, row in enumerate(rows):
        if row[0]:
            return f"{_REASONS[row[0]]} (rank {rank})"
    for start in range(0, mesh.world_size, size):
        members = rows[start : start + size]
        who = f"ranks {start} to {start + size - 1}"
        if len({row[1] for row in members}) > 1:
            return f"{name} lies on several hosts ({who})"
        if len({row[2] for row in members}) < size:
            return f"two ranks of {name} share one GPU ({who})"
    linked = _can_push(mesh.device.index, {row[2] for row in rows[peers.first : peers.first + size]})
    cut_off = [rank for rank, row in enumerate(_tell(mesh, [not linked])) if row[0]]
    if cut_off:
        return f"no peer access with atomics between the GPUs of {name} (ranks {cut_off})"
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

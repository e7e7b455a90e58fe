"""Who is who among the ranks: `world = kvp x tp`, the process groups of both axes, and agreement on plain integers.

Along `kvp` the ranks hold different tokens of the same heads; along `tp` they hold different heads. The kvp index runs
fastest, so a kvp group is a run of consecutive ranks: with kvp = 2 and tp = 3, rank = tp_rank * 2 + kvp_rank and the
kvp groups are (0, 1), (2, 3), (4, 5), the tp groups (0, 2, 4), (1, 3, 5).

This is the one place of the package that starts process groups and reads the environment.
"""

import array
import contextlib
import datetime
import hashlib
import operator
import os
import warnings
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from distdec.config import MAX_TIMEOUT_S, MIN_TIMEOUT_S
from distdec.degrees import across_hosts, check_degrees
from distdec.request import _check_float

# integers of a plan that travel in the first broadcast, behind the header; longer plans take a second one
_FIRST_WORDS = 509
_HEADER_WORDS = 3  # how many agreements came before, number of integers, checksum
_REFUSED = -1
# 8 MiB: far above any step plan, small enough that a corrupt length cannot exhaust memory
MAX_AGREED = 1 << 20

# torch 2.13 renames both and warns at each call of the older name
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class Mesh:
    """The ranks that decode together. Build one with `Mesh.create` or `Mesh.single`; frozen afterwards.

    Attributes:
        rank: index in this mesh, 0 to `world_size` - 1; `rank = tp_rank * kvp_size + kvp_rank`.
        world_size: number of ranks in this mesh, `kvp_size * tp_size`.
        ranks: world rank of each mesh rank, ascending.
        kvp_rank, kvp_size, tp_rank, tp_size: place on the two axes.
        device: where this rank's tensors live.
        group: all mesh ranks, NCCL on CUDA and gloo on CPU.
        kvp_group, tp_group: this rank's group on each axis, same backend; the group rank is the rank on the axis.
        control_group: all mesh ranks, always gloo, for host integers. `agree` and the checks use nothing else, so they
            never wait for the device.

    A mesh of one process has no groups: its group attributes are `dist.GroupMember.NON_GROUP_MEMBER`, on which a
    collective does nothing but warn (None would mean the whole world). Look at the sizes first.
    """

    def __init__(self, ranks: Sequence[int], rank: int, kvp_size: int, device: torch.device) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.world_size = len(self.ranks)
        self.kvp_size = kvp_size
        self.tp_size = self.world_size // kvp_size
        self.tp_rank, self.kvp_rank = divmod(rank, kvp_size)
        self.device = device
        alone = dist.GroupMember.NON_GROUP_MEMBER
        self.group = self.kvp_group = self.tp_group = self.control_group = alone
        self._made_groups: list[ProcessGroup] = []
        self._made_world = False
        self.timeout_s = float("inf")
        self._num_agreed = 0
        self._wire = torch.zeros(_HEADER_WORDS + _FIRST_WORDS, dtype=torch.int64)

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> "Mesh":
        """Build a mesh of this process alone, without any process group; every method works."""
        return cls([0], 0, 1, torch.device(device))

    @classmethod
    def create(
        cls,
        kvp: int | None = None,
        tp: int = 1,
        *,
        ranks: Sequence[int] | None = None,
        device: str | torch.device | None = None,
        timeout_s: float = 120.0,
    ) -> "Mesh | None":
        """Join the process group (starting it as torchrun prescribes, if nobody has yet) and lay the mesh over it.

        Every rank of the world must call this with the same arguments, the ranks outside `ranks` too: groups are made
        in one order everywhere. Without torchrun's variables and without a process group it is `Mesh.single`.

        Args:
            kvp: ranks along the sequence; default: as many as `tp` leaves.
            tp: ranks along the heads.
            ranks: world ranks of the mesh, ascending; default: all.
            device: default: this host's GPU number LOCAL_RANK if there is one, else the CPU.
            timeout_s: limit of one wait inside a collective, in seconds. (The defaults of the backends are 10 and 30
                minutes; a rank that died is noticed by those that wait for it no earlier than this.)

        Returns:
            The mesh, or None on a rank of the world that is not in `ranks`. (If this call started the world, such a
            rank ends it itself, with `torch.distributed.destroy_process_group()`.)

        Raises:
            ValueError: kvp x tp is not the number of ranks, `ranks` is not an ascending subset of the world, the device
                does not exist, or a limit below a second; raised on every rank before any group is made.

        Notes:
            Collective: the whole world.
        """
        _check_float("timeout_s", timeout_s, MIN_TIMEOUT_S, MAX_TIMEOUT_S)
        timeout = datetime.timedelta(seconds=timeout_s)
        made_world = not dist.is_initialized()
        launched = not made_world or "RANK" in os.environ
        world_size = _world_size()
        members = list(range(world_size)) if ranks is None else [operator.index(r) for r in ranks]
        kvp = check_degrees(members, world_size, kvp, tp)
        device = _pick_device(device)
        if not launched:
            return cls.single(device)
        if made_world:
            _start_world(device, timeout)
        world_rank = dist.get_rank()
        if world_rank not in members:
            outside = cls([world_rank], 0, 1, device)
            outside._make_groups(members, kvp, timeout)
            return None
        mesh = cls(members, members.index(world_rank), kvp, device)
        mesh._made_world = made_world
        mesh.timeout_s = timeout_s
        mesh._make_groups(members, kvp, timeout)
        if mesh.is_leader:
            _warn_across_hosts(members, kvp)
        return mesh

    def _make_groups(self, members: list[int], kvp: int, timeout: datetime.timedelta) -> None:
        """Make every group of the mesh, in an order that is the same on all ranks of the world.

        An axis that spans the whole mesh shares the mesh's group: a NCCL communicator holds device memory.
        """
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        inside = dist.get_rank() in members

        def make(of_ranks: list[int], backend: str, name: str) -> ProcessGroup | None:
            group = dist.new_group(of_ranks, timeout=timeout, backend=backend, group_desc=f"distdec_{name}")
            if not inside or dist.get_rank() not in of_ranks:
                return None
            self._made_groups.append(group)
            return group

        whole = make(members, backend, "mesh")
        control = make(members, "gloo", "control")
        kvp_groups = [members[start : start + kvp] for start in range(0, len(members), kvp)]
        tp_groups = [members[start::kvp] for start in range(kvp)]
        on_axis = []
        for name, groups in (("kvp", kvp_groups), ("tp", tp_groups)):
            made = [whole] if len(groups) == 1 else [make(group, backend, name) for group in groups]
            on_axis.append(next((group for group in made if group is not None), None))
        if inside:
            self.group, self.control_group = whole, control
            self.kvp_group, self.tp_group = on_axis

    @property
    def is_leader(self) -> bool:
        """True on mesh rank 0, whose scheduler decides."""
        return self.rank == 0

    def agree(self, values: Sequence[int] | None = None) -> list[int]:
        """Return mesh rank 0's integers on every rank; the other ranks' `values` are ignored.

        Plain int64 words behind a header of (number of agreements so far, length, CRC-32): nothing is unpickled.

        Raises:
            ValueError: on every rank, if rank 0's values are not at most `MAX_AGREED` integers of 64 bits.
            RuntimeError: this rank agreed more or less often than rank 0, or the words arrived damaged.

        Notes:
            Collective: the whole mesh, over gloo; one broadcast up to 509 integers, two above.
        """
        words, fault = array.array("q"), None
        if self.is_leader:
            try:
                words = array.array("q", () if values is None else values)
                if values is None or len(words) > MAX_AGREED:
                    fault = f"got {'None' if values is None else len(words)}"
            except (TypeError, OverflowError) as error:
                fault = str(error)
        # a refusal is sent too: the others already wait for this broadcast
        length = len(words) if fault is None else _REFUSED
        header = [self._num_agreed, length, zlib.crc32(words.tobytes())]
        if self.world_size > 1:
            words, header = self._exchange(words, header)
        self._num_agreed += 1
        if header[1] == _REFUSED:
            raise ValueError(f"rank 0 must agree on 0 to {MAX_AGREED} integers of 64 bits: {fault or 'see rank 0'}")
        if zlib.crc32(words.tobytes()) != header[2]:
            raise RuntimeError(f"rank {self.rank}: agreement {header[0]} arrived damaged ({header[1]} integers)")
        return words.tolist()

    def _exchange(self, words: array.array, header: list[int]) -> tuple[array.array, list[int]]:
        """Broadcast header and words from mesh rank 0; return rank 0's."""
        source = self.ranks[0]
        first = self._wire
        if self.is_leader and header[1] != _REFUSED:
            begin = words[:_FIRST_WORDS]
            first[_HEADER_WORDS : _HEADER_WORDS + len(begin)] = torch.tensor(begin, dtype=torch.int64)
        if self.is_leader:
            first[:_HEADER_WORDS] = torch.tensor(header)
        dist.broadcast(first, src=source, group=self.control_group)
        header = first[:_HEADER_WORDS].tolist()
        if header[0] != self._num_agreed or not _REFUSED <= header[1] <= MAX_AGREED:
            raise RuntimeError(
                f"rank {self.rank} enters agreement {self._num_agreed}, rank 0 sent agreement {header[0]} of "
                f"{header[1]} integers: the ranks do not take the same steps"
            )
        received = array.array("q", first[_HEADER_WORDS : _HEADER_WORDS + max(header[1], 0)].tolist())
        rest = header[1] - _FIRST_WORDS
        if rest > 0:
            tail = torch.tensor(words[_FIRST_WORDS:]) if self.is_leader else torch.empty(rest, dtype=torch.int64)
            dist.broadcast(tail, src=source, group=self.control_group)
            received.extend(tail.tolist())
        return received, header

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's integers on every rank; all bring the same number. Collective over the mesh, by gloo."""
        mine = torch.tensor([int(value) for value in values], dtype=torch.int64)
        of_all = mine.repeat(self.world_size)
        if self.world_size > 1:
            all_gather(of_all, mine, self.control_group)
        return of_all.view(self.world_size, -1).tolist()

    def check_same(self, name: str, digest: bytes, axis: str | None = None) -> None:
        """Make sure that all ranks hold the same bytes under the same name; only hashes of fixed size travel.

        Args:
            name: what is compared; the ranks must arrive here with the same name.
            digest: any bytes: a digest, or what is to be digested.
            axis: None compares the whole mesh, "kvp" the ranks of each kvp group among themselves.

        Raises:
            RuntimeError: on every rank of the mesh, naming `name` and the ranks that differ from the first one.

        Notes:
            Collective: the whole mesh, over gloo.
        """
        if self.world_size == 1:
            return
        mine = hashlib.sha256(name.encode()).digest() + hashlib.sha256(digest).digest()
        all_bytes = torch.empty(self.world_size * len(mine), dtype=torch.uint8)
        all_gather(all_bytes, torch.frombuffer(bytearray(mine), dtype=torch.uint8), self.control_group)
        rows = [bytes(row.tolist()) for row in all_bytes.view(self.world_size, -1)]
        lost = [rank for rank, row in enumerate(rows) if row[:32] != mine[:32]]
        if lost:
            raise RuntimeError(f"rank {self.rank} checks {name!r} while ranks {lost} check something else")
        span = self.kvp_size if axis == "kvp" else self.world_size
        differ = {}
        for start in range(0, self.world_size, span):
            differ[start] = [rank for rank in range(start, start + span) if rows[rank] != rows[start]]
        told = "; ".join(f"ranks {others} differ from rank {start}" for start, others in differ.items() if others)
        if told:
            raise RuntimeError(f"{name!r} is not the same on all ranks: {told}")

    def barrier(self) -> None:
        """Wait until every rank of the mesh is here. Host only: says nothing about work queued on the device."""
        if self.world_size > 1:
            dist.barrier(group=self.control_group)

    def close(self) -> None:
        """Destroy the groups that this mesh made, and the world if this mesh started it; safe to call twice.

        A process that ends without this may end in SIGABRT. Close the mesh that started the world last.
        """
        made, self._made_groups = self._made_groups, []
        if not dist.is_initialized():
            return
        if self._made_world:
            self._made_world = False
            dist.destroy_process_group()
            return
        for group in reversed(made):
            # the world, and all groups with it, may have been destroyed and started anew since
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Mesh(rank {self.rank} of {self.world_size}: kvp {self.kvp_rank} of {self.kvp_size}, "
            f"tp {self.tp_rank} of {self.tp_size}, {self.device})"
        )


def all_gather(output: torch.Tensor, mine: torch.Tensor, group: ProcessGroup) -> None:
    """Concatenate every rank's tensor along the first dimension into `output`, in group rank order."""
    _all_gather(output, mine, group=group)


def reduce_scatter(output: torch.Tensor, addends: torch.Tensor, group: ProcessGroup) -> None:
    """Sum over ranks and keep this rank's stretch of the first dimension."""
    _reduce_scatter(output, addends, group=group)


def _warn_across_hosts(members: list[int], kvp: int) -> None:
    """Say when a kvp group does not lie inside one host, as far as torchrun tells."""
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    groups = across_hosts(members, kvp, per_host) if per_host else []
    if groups:
        warnings.warn(
            f"kvp={kvp}: {len(groups)} of {len(members) // kvp} kvp groups span hosts of {per_host} ranks, the first "
            f"is {groups[0]}: every layer's merge then goes over the network. A kvp that divides {per_host} stays "
            "inside a host; the other ranks can go to tp, as far as it divides the KV heads",
            RuntimeWarning,
            stacklevel=3,
        )


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1


def _pick_device(device: str | torch.device | None) -> torch.device:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device is None:
        device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        index = local_rank if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ValueError(f"local rank {local_rank} wants GPU {index}, this host has {torch.cuda.device_count()}")
        device = torch.device("cuda", index)
    return device


def _start_world(device: torch.device, timeout: datetime.timedelta) -> None:
    """Start the default process group from torchrun's variables."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # multicast objects fail to bind on hosts whose fabric manager gives this job no multicast memory, and the
        # merge does not need them; both are only set where the user has said nothing
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    # torchrun keeps its store across restarts of the workers: a new attempt would read the dead one's addresses. The
    # count is local to a host, so it can only name the attempt where there is one host
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if attempt is not None and os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        store = dist.PrefixStore(f"attempt_{attempt}", store)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )

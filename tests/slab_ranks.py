"""Slabs without symmetric memory: those of R ranks in one process, and those of processes in shared host memory."""

import mmap
import os

import torch

from distdec.ops.slab_triton import Slab


class SimulatedSlabs:
    """The slabs of R ranks in one process; a test launches every rank's push before any rank's merge."""

    def __init__(self, num_ranks, *, channels=3, capacity=2048, words=640, first_epoch=0, spin_limit=3):
        self.spin_limit = spin_limit
        self.alarms = [torch.zeros(1, dtype=torch.int32) for _ in range(num_ranks)]
        plan = Slab(torch.empty(0), torch.empty(0), 0, num_ranks, channels, capacity, words)
        # bytes 0xFF are NaN in every format: whatever is read without having been sent shows
        self.memory = [torch.full((plan.num_bytes,), 0xFF, dtype=torch.uint8) for _ in range(num_ranks)]
        self.slabs = []
        for rank, memory in enumerate(self.memory):
            memory[plan.flags_offset :].view(torch.int32).fill_(first_epoch)
            state = torch.full((channels + 1,), first_epoch, dtype=torch.int32)
            state[channels] = 0
            addresses = [m.data_ptr() for m in self.memory] + [self.alarms[rank].data_ptr()]
            self.slabs.append(plan._replace(peers=torch.tensor(addresses), state=state, rank=rank))

    def step(self, inputs, **how):
        """All ranks' launches, pushes first; returns every rank's result."""
        for rank, mine in enumerate(inputs):
            self.launch(rank, mine, merge=False, **how)
        return [self.launch(rank, mine, push=False, **how) for rank, mine in enumerate(inputs)]


def shared_slabs(path):
    """Slabs of all ranks in files of shared memory, instead of symmetric memory."""

    def map_slabs(peers, num_bytes):
        length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        slabs = []
        for rank in range(peers.size):
            descriptor = os.open(f"{path}.{peers.first}.{rank}", os.O_RDWR | os.O_CREAT)
            os.ftruncate(descriptor, length)
            slabs.append(torch.frombuffer(mmap.mmap(descriptor, length), dtype=torch.uint8)[:num_bytes])
            os.close(descriptor)
        return slabs

    return map_slabs

"""Host memory for the keys and values of sequences that have left the cache, and the copies there and back.

A rank keeps its own tokens only. `Parking` says, in integers that are the same on all ranks, who is there; this module
holds the bytes. Copies are queued on the stream of the steps: behind the step that wrote the tokens, before the one
that writes their slots again. That order is all the protection they need, so nobody waits for them.
"""

import time

import torch
from torch import Tensor

from distdec.cache.kv_cache import KVCache
from distdec.cache.parking import MoveKind, Parking
from distdec.cache.pool import KVPool


class HostPool:
    """Hold what is parked on this rank's host, in frames of `min_chunk` tokens.

    Args:
        cache: the integer cache.
        pool: this rank's keys and values.
        kvp_rank: this rank on the kvp axis.
        num_bytes: host memory to take, all of it at once: pinning a frame takes longer than to fill it.

    Attributes:
        frame_bytes: memory of a frame; a power of two, since pinned memory is handed out in those.
        parking: the books.

    Raises:
        ValueError: `num_bytes` does not hold a frame.

    Notes:
        Host sync: in the constructor, which times some copies.
    """

    def __init__(self, cache: KVCache, pool: KVPool, kvp_rank: int, num_bytes: int) -> None:
        self._pool = pool
        self._frame_tokens = cache.layout.min_chunk
        layers, _, heads, _ = pool.k.shape
        self._token_items = layers * heads * (pool.head_dim + pool.v_head_dim)
        exact = self._frame_tokens * self._token_items * pool.k.itemsize
        self.frame_bytes = 1 << (exact - 1).bit_length()
        if num_bytes < self.frame_bytes:
            raise ValueError(
                f"cache.host_gb gives {num_bytes} bytes, and one frame of cache.min_chunk={self._frame_tokens} tokens "
                f"takes {self.frame_bytes}"
            )
        self.parking = Parking(cache, kvp_rank, num_bytes // self.frame_bytes)
        self._free = [self._new_frame() for _ in range(self.parking.num_frames)]
        self._held: dict[int, list[Tensor]] = {}
        self.parking.ms_per_token = self._measure()

    @property
    def frames_held(self) -> int:
        """Frames with the tokens of parked sequences."""
        return sum(map(len, self._held.values()))

    def carry(self) -> None:
        """Make the copies noted in the books, in their order.

        Notes:
            In-place: writes the pool's slots of sequences that come back. Collective: none. Host sync: one a move, for
            the slots.
        """
        for kind, seq_id, slots in self.parking.take_moves():
            index = torch.from_numpy(slots).to(self._pool.k.device)
            parts = index.split(self._frame_tokens) if len(slots) else ()
            if kind is MoveKind.OUT:
                self._held[seq_id] = [self._out(part) for part in parts]
                continue
            frames = self._held.pop(seq_id)
            if kind is MoveKind.BACK:
                for part, frame in zip(parts, frames, strict=True):
                    self._back(part, frame)
            # a later copy into them is queued behind those that read them now
            self._free += frames

    def _out(self, slots: Tensor) -> Tensor:
        """Copy up to a frame of tokens to the host. Gathered on the device first: one long copy each of K and V."""
        frame = self._free.pop()
        for part, tensor in zip(self._parts(frame, len(slots)), (self._pool.k, self._pool.v), strict=True):
            part.copy_(tensor.index_select(1, slots), non_blocking=True)
        return frame

    def _back(self, slots: Tensor, frame: Tensor) -> None:
        for part, tensor in zip(self._parts(frame, len(slots)), (self._pool.k, self._pool.v), strict=True):
            tensor.index_copy_(1, slots, part.to(tensor.device, non_blocking=True))

    def _parts(self, frame: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return a frame's memory as keys [L, count, Hkv, D] and values [L, count, Hkv, Dv], one behind the other."""
        layers, _, heads, head_dim = self._pool.k.shape
        cut = layers * count * heads * head_dim
        keys, values = frame[:cut], frame[cut : count * self._token_items]
        return keys.view(layers, count, heads, head_dim), values.view(layers, count, heads, self._pool.v_head_dim)

    def _new_frame(self) -> Tensor:
        pool = self._pool.k
        return torch.empty(self._frame_tokens * self._token_items, dtype=pool.dtype, pin_memory=pool.is_cuda)

    def _measure(self) -> float:
        """Return the milliseconds of a token to the host and back, the best of some frames; the pool stays as it is."""
        pool = self._pool.k
        slots = torch.arange(min(self._frame_tokens, pool.shape[1]), device=pool.device)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            frame = self._out(slots)
            self._back(slots, frame)
            if pool.is_cuda:
                torch.cuda.synchronize(pool.device)
            times.append(time.perf_counter() - began)
            self._free.append(frame)
        return 1e3 * min(times) / max(1, len(slots))

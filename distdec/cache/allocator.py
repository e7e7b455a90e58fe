"""Hand out chunks of frames: one binary buddy allocator for each rank, in deterministic integer arithmetic."""

from dataclasses import dataclass

from distdec.cache.layout import CacheLayout, Chunk


class CacheCorrupt(RuntimeError):
    """The books do not add up: a fault of the cache or of its caller, never of the load."""


def require(condition: bool, message: str) -> None:
    """Raise CacheCorrupt unless `condition` holds; unlike `assert` it survives `python -O`."""
    if not condition:
        raise CacheCorrupt(message)


@dataclass(frozen=True)
class Fragmentation:
    """How the free frames of one rank lie.

    Attributes:
        free_frames: frames in no chunk.
        free_blocks: number of free blocks of 1, 2, 4, ... frames.
        external: share of the free frames that could lie in blocks of the largest size but do not; 0.0 is perfect.
            Such frames are still usable, in smaller chunks.
    """

    free_frames: int
    free_blocks: tuple[int, ...]
    external: float


class ChunkAllocator:
    """Allocate, share and free chunks of 1, 2, 4, ... frames on every rank.

    Free blocks are powers of two of frames, aligned to their own size; freeing a block joins it with its buddy. Where
    no block of the wanted size is left, the largest smaller one is given: an allocation fails only when no frame is
    free. The next block is a function of the calls so far, so ranks that make the same calls agree without talking.
    """

    def __init__(self, layout: CacheLayout) -> None:
        """Start with all frames free."""
        self._layout = layout
        self._num_orders = layout.max_frames.bit_length()
        # dicts as ordered sets: what popitem() returns is defined by the language, unlike set.pop()
        self._free: list[list[dict[int, None]]] = [
            [{} for _ in range(self._num_orders)] for _ in range(layout.num_ranks)
        ]
        self._free_frames = [0] * layout.num_ranks
        # first frame -> [number of frames, references]
        self._held: list[dict[int, list[int]]] = [{} for _ in range(layout.num_ranks)]
        for rank, count in enumerate(layout.num_frames):
            self._give(rank, 0, count)
            for blocks in self._free[rank]:
                # low addresses first out
                for frame in sorted(blocks, reverse=True):
                    blocks[frame] = blocks.pop(frame)

    def allocate(self, kvp_rank: int, num_frames: int) -> Chunk:
        """Take a chunk of `num_frames` frames, or the largest there is below that; it has one reference.

        Raises:
            ValueError: `num_frames` is not a power of two up to the largest chunk.
            MemoryError: the rank has no free frame.
        """
        if num_frames < 1 or num_frames & (num_frames - 1) or num_frames > self._layout.max_frames:
            legal = [1 << order for order in range(self._num_orders)]
            raise ValueError(f"num_frames must be one of {legal}, got {num_frames}")
        free = self._free[kvp_rank]
        order = num_frames.bit_length() - 1
        found = order
        while found < self._num_orders and not free[found]:
            found += 1
        if found == self._num_orders:
            found = order - 1
            while found >= 0 and not free[found]:
                found -= 1
            if found < 0:
                raise MemoryError(f"kvp rank {kvp_rank} has no free frame, {num_frames} wanted")
            order = found
        frame, _ = free[found].popitem()
        while found > order:
            found -= 1
            free[found][frame + (1 << found)] = None
        self._free_frames[kvp_rank] -= 1 << order
        self._held[kvp_rank][frame] = [1 << order, 1]
        return Chunk(kvp_rank, frame, 1 << order)

    def retain(self, chunk: Chunk) -> None:
        """Add a reference to a held chunk."""
        self._entry(chunk)[1] += 1

    def release(self, chunk: Chunk) -> bool:
        """Drop a reference; with the last one the frames are free again. Returns True in that case."""
        entry = self._entry(chunk)
        entry[1] -= 1
        if entry[1]:
            return False
        del self._held[chunk.kvp_rank][chunk.frame]
        self._give(chunk.kvp_rank, chunk.frame, chunk.num_frames)
        return True

    def trim(self, chunk: Chunk, num_frames: int) -> Chunk:
        """Give back the tail of a held chunk beyond its first `num_frames` frames.

        Any number of frames from 1 may stay: a chunk is a power of two when it is handed out, and a run of frames
        once trimmed. Example: frames [8, 16) trimmed to 3 give back [11, 12) and [12, 16).
        """
        entry = self._entry(chunk)
        if not 1 <= num_frames <= chunk.num_frames:
            raise ValueError(f"num_frames must be from 1 to {chunk.num_frames}, got {num_frames}")
        entry[0] = num_frames
        self._give(chunk.kvp_rank, chunk.frame + num_frames, chunk.num_frames - num_frames)
        return Chunk(chunk.kvp_rank, chunk.frame, num_frames)

    def free_frames(self, kvp_rank: int) -> int:
        """Return the number of free frames of one rank."""
        return self._free_frames[kvp_rank]

    def references(self, chunk: Chunk) -> int:
        """Return the number of references to a held chunk."""
        return self._entry(chunk)[1]

    def fragmentation(self, kvp_rank: int) -> Fragmentation:
        """Say how the free frames of one rank lie."""
        blocks = tuple(len(blocks) for blocks in self._free[kvp_rank])
        count = self._free_frames[kvp_rank]
        largest = self._layout.max_frames
        possible = count // largest
        return Fragmentation(count, blocks, 1.0 - blocks[-1] / possible if possible else 0.0)

    def check_integrity(self) -> None:
        """Check that free and held frames tile every pool exactly, and that no two free buddies are apart.

        Raises:
            CacheCorrupt: naming the rank and the frame.
        """
        for rank, total in enumerate(self._layout.num_frames):
            runs = [(frame, size) for frame, (size, _) in self._held[rank].items()]
            for frame, (size, references) in self._held[rank].items():
                require(size >= 1 and references >= 1, f"rank {rank}: frame {frame} is held by {references} references")
            free = 0
            for order, blocks in enumerate(self._free[rank]):
                size = 1 << order
                free += size * len(blocks)
                for frame in blocks:
                    require(frame % size == 0, f"rank {rank}: free block of {size} at frame {frame} is not aligned")
                    apart = order + 1 < self._num_orders and frame ^ size in blocks
                    require(not apart, f"rank {rank}: free buddies of {size} at frame {frame} did not join")
                    runs.append((frame, size))
            require(free == self._free_frames[rank], f"rank {rank}: {free} frames free, {self._free_frames[rank]} said")
            end = 0
            for frame, size in sorted(runs):
                require(frame == end, f"rank {rank}: frames up to {end} known, next run starts at {frame}")
                end = frame + size
            require(end == total, f"rank {rank}: free + held = {end} frames, pool has {total}")

    def _entry(self, chunk: Chunk) -> list[int]:
        """Return the books of a held chunk."""
        entry = self._held[chunk.kvp_rank].get(chunk.frame)
        if entry is None or entry[0] != chunk.num_frames:
            raise ValueError(f"{chunk} is not held")
        return entry

    def _give(self, rank: int, frame: int, count: int) -> None:
        """Free a run of frames as aligned blocks, each joined with its buddy as far as that goes."""
        free = self._free[rank]
        self._free_frames[rank] += count
        end = frame + count
        while frame < end:
            order = min((end - frame).bit_length(), self._num_orders) - 1
            if frame:
                # the largest power of two that divides the address bounds the block
                order = min(order, (frame & -frame).bit_length() - 1)
            block = frame
            frame += 1 << order
            while order + 1 < self._num_orders and block ^ (1 << order) in free[order]:
                del free[order][block ^ (1 << order)]
                block &= ~(1 << order)
                order += 1
            free[order][block] = None

"""What a sharded cache looks like: pools of frames, chunks, views, and the plan of a batch whose lengths are known.

Units: a frame is `min_chunk` tokens, a chunk is a power of two of frames (up to `max_chunk` tokens), a slot is the
position of one token in a rank's pool: `slot = frame * min_chunk + offset`.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import NamedTuple, SupportsIndex

# view tables and kernels carry slots and token positions as int32; strides are applied in int64
MAX_INDEX = 2**31 - 1


class Chunk(NamedTuple):
    """Frames `[frame, frame + num_frames)` of the pool of `kvp_rank`."""

    kvp_rank: int
    frame: int
    num_frames: int


class View(NamedTuple):
    """A sequence's stretch of a chunk: `length` tokens from position `token_start` on.

    `chunk` is the first frame of the chunk. The slot of the view's i-th token is `chunk * min_chunk + offset + i`:
    with frames of 128 tokens, view `(kvp_rank=1, chunk=3, offset=16, length=5, token_start=900)` puts token 902 into
    slot 3 * 128 + 16 + 2 = 402 of rank 1.
    """

    kvp_rank: int
    chunk: int
    offset: int
    length: int
    token_start: int


class PlannedChunk(NamedTuple):
    """Tokens `[start, end)` of sequence number `sequence`, given to `rank`."""

    rank: int
    sequence: int
    start: int
    end: int


def _integer(name: str, value: object, minimum: int) -> int:
    """Return `value` as an int, or raise ValueError with the received and the legal values."""
    try:
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise TypeError
        # an array of several numbers has the method, and refuses
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}") from None
    if number < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {number}")
    return number


def _chunk_sizes(min_chunk: int, max_chunk: int) -> tuple[int, int]:
    """Check the two chunk sizes: `max_chunk` is `min_chunk` times a power of two, 1 included."""
    min_chunk = _integer("min_chunk", min_chunk, 1)
    max_chunk = _integer("max_chunk", max_chunk, 1)
    ratio, rest = divmod(max_chunk, min_chunk)
    if rest or ratio < 1 or ratio & (ratio - 1):
        raise ValueError(
            f"max_chunk must be min_chunk times 1, 2, 4, 8 or another power of two, "
            f"got max_chunk={max_chunk}, min_chunk={min_chunk}"
        )
    return min_chunk, max_chunk


def _rank_weights(weights: Sequence[int] | None, num_ranks: int) -> tuple[int, ...]:
    """Check one integer weight >= 1 for each rank (None: all equal) and divide out what they share."""
    if weights is None:
        return (1,) * num_ranks
    checked = [_integer(f"weights[{rank}]", weight, 1) for rank, weight in enumerate(weights)]
    if len(checked) != num_ranks:
        raise ValueError(f"weights must have one integer for each of the {num_ranks} ranks, got {len(checked)}")
    shared = math.gcd(*checked)
    return tuple(weight // shared for weight in checked)


@dataclass(frozen=True)
class CacheLayout:
    """The frozen shape of a sharded cache; the same on every rank.

    Attributes:
        num_frames: frames in the pool of each kvp rank; its length is the number of ranks.
        min_chunk: tokens in a frame, the smallest chunk.
        max_chunk: tokens in the largest chunk: `min_chunk` times a power of two.
        page_size: tokens in a page, the unit of prefix hits.
        weights: one integer for each rank, its share of every long sequence (memory or bandwidth); None: equal.
        shard_min_tokens: sequences up to this length stay on one rank. Rounded up to whole frames.
        deterministic: while no rank's pool is full, the rank of a token follows from its position and the weights
            alone, and every view begins at a multiple of `min_chunk` tokens of its sequence: a page is then a frame,
            whatever `page_size` says. (But for forks, and sequences cut back into shared chunks.) Every sequence begins
            on the same rank, so many short ones fill that rank first.

    Raises:
        ValueError: on a value out of range, with the received and the legal values.
    """

    num_frames: tuple[int, ...]
    min_chunk: int = 128
    max_chunk: int = 1024
    page_size: int = 16
    weights: tuple[int, ...] | None = None
    shard_min_tokens: int = 0
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Check and normalise every field."""
        min_chunk, max_chunk = _chunk_sizes(self.min_chunk, self.max_chunk)
        frames = tuple(_integer(f"num_frames[{rank}]", count, 0) for rank, count in enumerate(self.num_frames))
        if not frames:
            raise ValueError("num_frames must have an entry for at least 1 rank, got none")
        for rank, count in enumerate(frames):
            if count * min_chunk > MAX_INDEX:
                raise ValueError(
                    f"num_frames[{rank}] must be at most {MAX_INDEX // min_chunk} frames of {min_chunk} tokens "
                    f"(slots fit 31 bits), got {count}"
                )
        weights = _rank_weights(self.weights, len(frames))
        checked = {
            "num_frames": frames,
            "min_chunk": min_chunk,
            "max_chunk": max_chunk,
            "page_size": min_chunk if self.deterministic else _integer("page_size", self.page_size, 1),
            "weights": None if self.weights is None else weights,
            "shard_min_tokens": _integer("shard_min_tokens", self.shard_min_tokens, 0),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def num_ranks(self) -> int:
        """Number of kvp ranks."""
        return len(self.num_frames)

    @property
    def max_frames(self) -> int:
        """Frames in the largest chunk."""
        return self.max_chunk // self.min_chunk

    @property
    def rank_weights(self) -> tuple[int, ...]:
        """One weight for each rank, without common factor."""
        return self.weights or (1,) * self.num_ranks

    @property
    def home_tokens(self) -> int:
        """`shard_min_tokens` in whole frames."""
        return -(-self.shard_min_tokens // self.min_chunk) * self.min_chunk

    def num_slots(self, kvp_rank: int) -> int:
        """Return the number of token slots in the pool of one rank."""
        return self.num_frames[kvp_rank] * self.min_chunk

    def frames_at(self, position: int) -> int:
        """Return the wanted frames of a chunk whose first token is at `position` of its sequence.

        They are those of its run, or in a deterministic layout what is left of it: runs are dealt to ranks whole, also
        where the pool has only shorter chunks.
        """
        frames = self.run_frames(position)
        within = position // self.min_chunk % frames if self.deterministic else 0
        return 1 << ((frames - within).bit_length() - 1)

    def run_frames(self, position: int) -> int:
        """Return the frames that are dealt to one rank together where the sequence has reached `position`.

        Chunks lengthen with the sequence: the largest legal chunk that is at most a quarter of the tokens before it.
        So what a sequence reserves but does not use is below `max(min_chunk, length / 4)`, and below `max_chunk`.
        With frames of 128 tokens: 1 frame below position 1024, 2 from 1024 on, 4 from 2048 on, 8 from 4096 on.
        """
        frames = min(self.max_frames, position // (4 * self.min_chunk))
        if position < self.home_tokens:
            # a sequence leaves its home rank exactly at `home_tokens`, whatever the chunk sizes
            frames = min(frames, (self.home_tokens - position) // self.min_chunk)
        return 1 << (frames.bit_length() - 1) if frames > 1 else 1


def plan_chunks(
    cache_lens: Sequence[int],
    num_ranks: int,
    min_chunk: int = 128,
    max_chunk: int = 1024,
    weights: Sequence[int] | None = None,
) -> list[PlannedChunk]:
    """Cut a batch of known lengths into chunks and deal them to the ranks.

    Every chunk goes to the rank with the least weighted load so far (ties: the lower rank). That rank holds at most its
    share of what is dealt, so the load of rank r never exceeds `w_r / sum(w) * total + max_chunk`, for any lengths.
    A sequence is cut into pieces of one power of two of `min_chunk`, small enough to reach every rank where it can be,
    and a tail of at least 1 token.

    Example: `plan_chunks([300, 40], 2)` gives (0, 0, 0, 128), (1, 0, 128, 256), (0, 0, 256, 300), (1, 1, 0, 40).

    Args:
        cache_lens: tokens of each sequence, 0 allowed.
        num_ranks: number of ranks, at least 1.
        min_chunk: smallest chunk in tokens (but for tails).
        max_chunk: largest chunk in tokens: `min_chunk` times a power of two.
        weights: one integer >= 1 for each rank; None: equal.

    Returns:
        The chunks in the order of sequences and tokens; each token of each sequence is in exactly one.

    Raises:
        ValueError: on bad input, with the received and the legal values.
    """
    num_ranks = _integer("num_ranks", num_ranks, 1)
    min_chunk, max_chunk = _chunk_sizes(min_chunk, max_chunk)
    shares = _rank_weights(weights, num_ranks)
    lengths = [_integer(f"cache_lens[{i}]", length, 0) for i, length in enumerate(cache_lens)]
    # loads are compared as load / weight, exactly: over the common multiple of the weights they are integers
    common = math.lcm(*shares)
    scale = [common // share for share in shares]
    heap = [(0, rank) for rank in range(num_ranks)]
    planned = []
    for sequence, length in enumerate(lengths):
        pieces = min(max_chunk // min_chunk, max(1, length // (num_ranks * min_chunk)))
        step = min_chunk << (pieces.bit_length() - 1)
        for start in range(0, length, step):
            end = min(start + step, length)
            load, rank = heap[0]
            heapreplace(heap, (load + (end - start) * scale[rank], rank))
            planned.append(PlannedChunk(rank, sequence, start, end))
    return planned

"""How many tokens the cache shall hold, and what to say to a request that is larger. Arithmetic only, no torch."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from distdec.config import CacheConfig
from distdec.request import Request

GIB = 2**30


class Room(NamedTuple):
    """Memory of one rank's device, in bytes.

    Attributes:
        free: with weights and communication buffers in place, before there is a cache.
        step: what the largest step takes of it: activations, workspaces, loaded kernels.
        graphs: what captured steps take of it, or what is set aside for them.
    """

    free: int
    step: int = 0
    graphs: int = 0


def tokens_needed(requests: Iterable[Request], max_rows: int, min_chunk: int) -> int:
    """Return the tokens of cache with which the `max_rows` largest requests run together, in whole frames."""
    sizes = sorted((-(-request.max_tokens // min_chunk) * min_chunk for request in requests), reverse=True)
    return sum(sizes[:max_rows])


def choose_max_tokens(cache: CacheConfig, wanted: int, bytes_per_token: int, rooms: Sequence[Room], kvp: int) -> int:
    """Return how many tokens the cache shall hold over all kvp ranks, so that every rank's share fits.

    Args:
        cache: an explicit `max_tokens` is taken if it fits; `memory_gb` alone is used up.
        wanted: tokens of an automatic cache, if memory allows.
        bytes_per_token: on the rank that holds the token.
        rooms: of all ranks, in their order; ranks along kvp come first.

    Raises:
        ValueError: `max_tokens` or `memory_gb` does not fit the memory, or the memory holds not even one chunk a rank.

    Example: two ranks with room for 3 and 5 GiB of pool hold twice what 3 GiB hold, but with weights (3, 5) all of it.
    """
    weights = cache.weights or (1,) * kvp
    limits = []
    for rank, room in enumerate(rooms):
        memory = _for_pool(cache, room)
        # in whole frames, of which a pool has one chunk more than its share, for what even placement may need
        held = max(0, memory // (bytes_per_token * cache.min_chunk) * cache.min_chunk - cache.max_chunk)
        limits.append((held * sum(weights) // weights[rank % kvp], held, memory, rank))
    most, held, memory, rank = min(limits)
    if cache.max_tokens:
        if cache.max_tokens > most:
            ranks = f"{-(-cache.max_tokens // held)} ranks" if held else "no number of ranks"
            raise ValueError(
                f"cache.max_tokens={cache.max_tokens} does not fit: {memory / GIB:.3g} GiB a rank hold {most} tokens "
                f"of {bytes_per_token} bytes over {kvp} kvp ranks{_beside(rooms[rank])}; {ranks} would do"
            )
        return cache.max_tokens
    if held < cache.max_chunk:
        raise ValueError(
            f"{memory / GIB:.3g} GiB a rank is not enough for a KV cache{_beside(rooms[rank])}: {2 * cache.max_chunk} "
            f"tokens of {bytes_per_token} bytes, twice cache.max_chunk, are the least"
        )
    return most if cache.memory_gb else min(wanted, most)


def _for_pool(cache: CacheConfig, room: Room) -> int:
    """Return the bytes that a rank's pool may have."""
    taken = room.step + room.graphs
    if not cache.memory_gb:
        return max(0, int(cache.memory_fraction * room.free) - taken)
    memory = int(cache.memory_gb * GIB)
    if memory > room.free - taken:
        raise ValueError(
            f"cache.memory_gb={cache.memory_gb:g} does not fit: a rank has {room.free / GIB:.3g} GiB "
            f"free{_beside(room)}"
        )
    return memory


def _beside(room: Room) -> str:
    if not room.step + room.graphs:
        return ""
    return (
        f" ({room.free / GIB:.3g} GiB are free; the largest step takes {room.step / GIB:.3g} GiB, captured steps "
        f"{room.graphs / GIB:.3g}: smaller scheduler.token_budget and scheduler.max_rows need less)"
    )


def no_room(request: Request, max_tokens: int, kvp: int, dtype: str) -> str:
    """Say that a request is larger than the cache, and what would hold it.

    Example: 9,000 tokens, a cache of 4,096 over 2 ranks: 5 ranks of the same size would do.
    """
    if not max_tokens:
        return (
            f"request {request.request_id} needs {request.max_tokens} tokens of KV cache, and the cache holds none: "
            "cache.max_tokens, cache.memory_gb or Runner.load(wanted_tokens=...) say how large it shall be"
        )
    per_rank = max(1, max_tokens // kvp)
    ranks = -(-request.max_tokens // per_rank)
    text = (
        f"request {request.request_id}: prompt ({len(request.prompt_ids)}) + max_new_tokens "
        f"({request.sampling.max_new_tokens}) needs {request.max_tokens} tokens of KV cache, and the cache holds "
        f"{max_tokens} over {kvp} rank{'s' if kvp > 1 else ''}. It would fit on {ranks} ranks of this size, or with "
        f"cache.max_tokens={request.max_tokens}"
    )
    if dtype == "float32" and request.max_tokens <= 2 * max_tokens:
        text += ", which takes the same memory with model.dtype=bfloat16"
    return text

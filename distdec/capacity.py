"""How many tokens the cache shall hold, and what to say to a request that is larger. Arithmetic only, no torch."""

from collections.abc import Iterable

from distdec.config import CacheConfig
from distdec.request import Request

GIB = 2**30


def tokens_needed(requests: Iterable[Request], max_rows: int, min_chunk: int) -> int:
    """Return the tokens of cache with which the `max_rows` largest requests run together, in whole frames."""
    sizes = sorted((-(-request.max_tokens // min_chunk) * min_chunk for request in requests), reverse=True)
    return sum(sizes[:max_rows])


def choose_max_tokens(cache: CacheConfig, wanted: int, bytes_per_token: int, free_bytes: int, kvp: int) -> int:
    """Return how many tokens the cache shall hold over all kvp ranks.

    Args:
        cache: an explicit `max_tokens` is taken if it fits; `memory_gb` alone is used up.
        wanted: tokens of an automatic cache, if memory allows.
        bytes_per_token: on the rank that holds the token.
        free_bytes: free memory of one rank.

    Raises:
        ValueError: `max_tokens` or `memory_gb` does not fit the memory, or the memory holds not even one chunk a rank.
    """
    memory = int(cache.memory_gb * GIB if cache.memory_gb else cache.memory_fraction * free_bytes)
    if memory > free_bytes:
        raise ValueError(
            f"cache.memory_gb={cache.memory_gb:g} does not fit: a rank has {free_bytes / GIB:.3g} GiB free"
        )
    # the pool is rounded up by at most one chunk a rank
    per_rank = memory // bytes_per_token - cache.max_chunk
    if cache.max_tokens:
        if cache.max_tokens > max(0, per_rank) * kvp:
            ranks = f"{-(-cache.max_tokens // per_rank)} ranks" if per_rank > 0 else "no number of ranks"
            raise ValueError(
                f"cache.max_tokens={cache.max_tokens} does not fit: {memory / GIB:.3g} GiB a rank hold "
                f"{max(0, per_rank) * kvp} tokens of {bytes_per_token} bytes over {kvp} kvp ranks; {ranks} would do"
            )
        return cache.max_tokens
    if per_rank < cache.max_chunk:
        raise ValueError(
            f"{memory / GIB:.3g} GiB a rank is not enough for a KV cache: {2 * cache.max_chunk} tokens of "
            f"{bytes_per_token} bytes, twice cache.max_chunk, are the least"
        )
    return per_rank * kvp if cache.memory_gb else min(wanted, per_rank * kvp)


def no_room(request: Request, max_tokens: int, kvp: int, dtype: str) -> str:
    """Say that a request is larger than the cache, and what would hold it.

    Example: 9,000 tokens, a cache of 4,096 over 2 ranks: 5 ranks of the same size would do.
    """
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

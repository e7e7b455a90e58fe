"""What a cache says about itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheStats:
    """Where the frames are; tuples have one entry for each kvp rank.

    Attributes:
        free_frames: in no chunk.
        cached_frames: only kept for prefix hits; evicted when needed, so they count as free.
        spare_frames: reserved ahead by growing sequences; taken back when needed, so they count as free.
        used_frames: hold tokens of live sequences. Free, cached, spare and used add up to the pool.
        tokens: tokens of live sequences, shared ones once for each sequence: what attention reads.
        stored_tokens: the same, shared ones once: what memory holds.
        internal_waste: share of the slots in used frames that hold no token.
        external_fragmentation: share of the free frames that lie outside blocks of `max_chunk` but need not.
        num_sequences: live sequences.
        prefix_queries, prefix_hits: tokens looked up and found by `add`.
        published_pages: pages that can be found now.
        evicted_chunks: chunks evicted so far.
    """

    free_frames: tuple[int, ...]
    cached_frames: tuple[int, ...]
    spare_frames: tuple[int, ...]
    used_frames: tuple[int, ...]
    tokens: tuple[int, ...]
    stored_tokens: tuple[int, ...]
    internal_waste: float
    external_fragmentation: float
    num_sequences: int
    prefix_queries: int
    prefix_hits: int
    published_pages: int
    evicted_chunks: int

"""The integer side of the KV cache (chunks, views, placement) and the device pool it describes.

`pool.py` needs torch and is imported on its own; everything else is integers and numpy.
"""

from distdec.cache.allocator import CacheCorrupt, ChunkAllocator
from distdec.cache.kv_cache import CacheFull, KVCache
from distdec.cache.layout import CacheLayout, Chunk, PlannedChunk, View, plan_chunks
from distdec.cache.stats import CacheStats

__all__ = [
    "CacheCorrupt",
    "CacheFull",
    "CacheLayout",
    "CacheStats",
    "Chunk",
    "ChunkAllocator",
    "KVCache",
    "PlannedChunk",
    "View",
    "plan_chunks",
]

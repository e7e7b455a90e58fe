"""The integer side of the KV cache (chunks, views, placement) and the device pool it describes.

`pool.py` needs torch and is imported on its own; everything else is integers and numpy.
"""

from distdec.cache.allocator import CacheCorrupt, ChunkAllocator
from distdec.cache.kv_cache import CacheFull, CacheStats, KVCache
from distdec.cache.layout import CacheLayout, Chunk, PlannedChunk, View, plan_chunks

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

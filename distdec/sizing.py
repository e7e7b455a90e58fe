"""What memory a rank has for its cache: the largest step is run before there is one, and its peak left free.

Free memory is the driver's figure, not the caching allocator's: workspaces of libraries, loaded kernels, buffers of
collectives and slabs that peers write to are in no other. A step of padding needs no keys, so the cache it runs on has
one chunk a rank.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from distdec.capacity import GIB, Room
from distdec.config import Config, SchedulerConfig
from distdec.hf.attention import EngineBinding
from distdec.hf.support import Geometry
from distdec.mesh import Mesh
from distdec.model_graphs import paddings
from distdec.request import SamplingParams
from distdec.row_tables import Padding
from distdec.sampling import SamplingRow, sample
from distdec.sharded_cache import ShardedCache

GRAPH_BYTES = 16 << 20
"""Set aside for each captured step beside its tensors: its nodes on the device. A guess, checked after the capture."""

MANY_VIEWS = 4096
"""Views that the largest step is given room for: more tiles than any device has programs, as in a large cache."""


class Memory(Protocol):
    """A reader of this rank's free memory."""

    measures: bool
    """Whether the difference of two readings is what was allocated in between."""

    def free(self, *, trim: bool = True) -> int:
        """Return free bytes; `trim`: give back first what the caching allocator keeps for later."""
        ...


class GpuMemory:
    """Free memory of a GPU."""

    measures = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def free(self, *, trim: bool = True) -> int:
        """Return free bytes. Host sync: waits for the device."""
        torch.cuda.synchronize(self.device)
        if trim:
            # a cache that was dropped may be part of a cycle
            gc.collect()
            torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])


class HostMemory:
    """A rank's share of the host's free memory, where the device is a CPU. Other programs move it."""

    measures = False

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def free(self, *, trim: bool = True) -> int:
        """Return free bytes."""
        words: list[Any] = Path("/proc/meminfo").read_text().split()
        return int(words[words.index("MemAvailable:") + 1]) * 1024 // self.num_ranks


def memory_of(mesh: Mesh) -> Memory:
    """Return the reader of a mesh's device."""
    return GpuMemory(mesh.device) if mesh.device.type == "cuda" else HostMemory(mesh.world_size)


def make_cache(mesh: Mesh, geometry: Geometry, config: Config, size: int, dtype: torch.dtype) -> ShardedCache:
    """Return a cache of `size` tokens over all ranks as the options say.

    Raises:
        ValueError: weights for another number of ranks.
    """
    options = config.cache
    if options.weights is not None and len(options.weights) != mesh.kvp_size:
        raise ValueError(
            f"cache.weights has {len(options.weights)} entries {list(options.weights)} for {mesh.kvp_size} kvp ranks"
        )
    return ShardedCache(
        mesh,
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        group_size=geometry.group_size,
        max_tokens=size,
        dtype=dtype,
        min_chunk=options.min_chunk,
        max_chunk=options.max_chunk,
        page_size=options.page_size,
        weights=options.weights,
        shard_min_tokens=options.shard_min_tokens,
        windows=geometry.windows,
        prefix_caching=options.prefix_caching,
        host_bytes=int(options.host_gb * GIB),
        backend=config.backend.name,
        own_apart=config.parallel.overlap in ("store", "both"),
        deterministic=config.backend.deterministic,
    )


def make_smallest_cache(mesh: Mesh, geometry: Geometry, config: Config, dtype: torch.dtype) -> ShardedCache:
    """Return a cache of one chunk a rank, to run padding on."""
    return make_cache(mesh, geometry, replace(config, cache=replace(config.cache, host_gb=0.0)), 0, dtype)


def bytes_per_token(geometry: Geometry, dtype: torch.dtype) -> int:
    """Return the bytes that a token takes in the pool of the rank that holds it."""
    return 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * dtype.itemsize


def warm_up(binding: EngineBinding, steps: SchedulerConfig, memory: Memory, captures: bool) -> tuple[int, int]:
    """Run the largest step and return the bytes that it takes, and those to set aside for captured steps.

    The largest is `max_rows` decode rows, drafts included, beside `token_budget` tokens of prompts: what a padded step
    may have, and a little more than an eager one. Layers are compiled on the way, for steps of few rows first, which
    the compiler then tunes them for.

    Args:
        binding: a model on the smallest cache.
        captures: whether steps will be captured.

    Notes:
        Collective: the model's forwards. Host sync: yes.
    """
    prefills, q_len = steps.max_pending_prefills, 1 + steps.num_draft_tokens
    largest = Padding(steps.max_rows, prefills, steps.token_budget, q_len)
    tokens = steps.max_rows * q_len + steps.token_budget
    binding.attention.cache.buffers.reserve(tokens=tokens, rows=steps.max_rows + prefills, views=MANY_VIEWS)
    before = memory.free()
    for pad in (Padding(1), Padding(min(2, steps.max_rows)), largest):
        _run(binding, pad)
    # what compiling and tuning took for themselves is no part of a step
    settled = memory.free()
    logits = _run(binding, largest)
    after = memory.free(trim=False)
    if not captures:
        return before - after, 0
    # all captured steps share the memory of the largest, but each keeps its logits
    captured = paddings(steps.max_rows, steps.token_budget, prefills, steps.num_draft_tokens)
    rows = sum(pad.decode_rows * pad.q_len + pad.prefill_rows for pad in captured)
    graphs = settled - after + rows * (logits.nbytes // len(logits)) + len(captured) * GRAPH_BYTES
    return before - after, graphs


def _run(binding: EngineBinding, pad: Padding) -> Tensor:
    """Run a step of nothing but padding, and choose a token for each row by the way that takes most memory."""
    cache = binding.attention.cache
    decode = pad.decode_rows * pad.q_len
    tokens, rows = decode + pad.prefill_tokens, decode + pad.prefill_rows
    # a section is padded to all its rows, however few tokens it has
    zeros = torch.zeros(max(tokens, rows), dtype=torch.int64, device=binding.mask.device)
    with torch.no_grad():
        binding.set_step(cache.buffers.fill([], q_len=pad.q_len, pad=pad))
        logits = binding.forward(zeros[:tokens], zeros[:tokens], logits_to_keep=zeros[:rows])
        params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, seed=0)
        sample(logits, [SamplingRow(params, 0, 0, (0,))] * rows)
    return logits


def describe_start(seconds: dict[str, float], room: Room, pool_bytes: int) -> str:
    """Say how long the parts of a start took, and what became of the memory.

    Example, of made up numbers: "start: load 3.2 s, warm-up 24.1 s (compiled 4, from the cache 0), capture 12.9 s; GiB
    a rank: free 124.3, step 1.2, graphs 0.9, cache 64.0".
    """
    parts = {name: f"{name} {spent:.1f} s" for name, spent in seconds.items()}
    # looked up rather than imported: the compiler takes a second, and a run without it has nothing to say
    compiler = sys.modules.get("torch._dynamo.utils")
    counts = compiler.counters["inductor"] if compiler is not None else {}
    hits, misses = counts.get("fxgraph_cache_hit", 0), counts.get("fxgraph_cache_miss", 0)
    if hits + misses:
        # by the first step that is run, which is the warm-up's where there is one
        parts["warm-up"] += f" (compiled {misses}, from the cache {hits})"
    sizes = {"free": room.free, "step": room.step, "graphs": room.graphs, "cache": pool_bytes}
    memory = ", ".join(f"{name} {size / GIB:.1f}" for name, size in sizes.items())
    return f"start: {', '.join(parts.values())}; GiB a rank: {memory}"

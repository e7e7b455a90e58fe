"""Inputs of the attention benchmarks: a sharded cache after random traffic, filled with known keys and values."""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import benchlib
import torch
from bench_timing import Call, Timer, Timing, reference_row, rotations_for, time_calls
from torch import Tensor

from distdec.batch import StepBatch
from distdec.cache.kv_cache import KVCache
from distdec.mesh import Mesh
from distdec.ops.backends import OpsBackend
from distdec.ops.tables import KVTables
from distdec.sharded_cache import ShardedCache

FILLER = 1 << 20
RAGGED16 = (131072, 300, 65000, 4096, 1000, 32768, 700, 16384, 2048, 9000, 512, 128, 50000, 3000, 8000, 20000)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """One attention problem; `lengths` count the step's own query tokens in."""

    lengths: tuple[int, ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    q_len: int = 1
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def kv_bytes(self) -> int:
        return self.tokens * self.num_kv_heads * self.head_dim * 2 * DTYPES[self.dtype].itemsize

    def config(self) -> dict[str, Any]:
        """Return the shape as a record's config."""
        uniform = len(set(self.lengths)) == 1
        return {
            "batch": len(self.lengths),
            "context": self.lengths[0] if uniform else "ragged",
            "num_q_heads": self.num_q_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "q_len": self.q_len,
            "dtype": self.dtype,
            "kv_mb": round(self.kv_bytes / 2**20, 1),
            **({} if uniform else {"lengths": list(self.lengths)}),
        }


@dataclass(frozen=True)
class Chunking:
    """How the pool is cut: frame and chunk size in tokens, and the seed of the random traffic (None: no traffic)."""

    min_chunk: int = 128
    max_chunk: int = 1024
    seed: int | None = 1


def churn(kv: KVCache, lengths: dict[int, int], rng: random.Random) -> None:
    """Grow the sequences to their lengths in random turns, among others that come, grow and go.

    Leaves only the wanted sequences, in chunks whose sizes and order the traffic has scattered over the pool.
    """
    spread = kv.layout.max_chunk
    missing = dict(lengths)
    for seq in missing:
        kv.add(seq)
    fillers: list[int] = []
    next_filler = FILLER
    while missing:
        seq = rng.choice(list(missing))
        # long sequences grow in longer strides: the number of turns stays small
        count = min(missing[seq], rng.randint(1, max(4 * spread, lengths[seq] // 64)))
        if not kv.can_extend([(seq, count)]):
            while fillers:
                kv.free(fillers.pop())
        kv.extend(seq, count)
        missing[seq] -= count
        if not missing[seq]:
            del missing[seq]
        dice = rng.random()
        if dice < 0.3 and fillers:
            kv.free(fillers.pop(rng.randrange(len(fillers))))
        elif dice < 0.7:
            size = rng.randint(1, 2 * spread)
            kv.add(next_filler)
            if kv.can_extend([(next_filler, size)]):
                kv.extend(next_filler, size)
                fillers.append(next_filler)
            else:
                kv.free(next_filler)
            next_filler += 1
    for filler in fillers:
        kv.free(filler)


class Inputs:
    """A filled cache, one decode or prefill step over it, and the same keys and values as contiguous rows.

    Every copy (a layer of the pool) holds the same values. Pool slots that no token owns hold NaN. The rows are made
    from the seed alone, so that they are equal on all ranks.

    Shapes:
        q: [T, Hq, D], k_new, v_new: [T, Hkv, D], T = B * q_len
        rows[b]: (k, v), each [Hkv, length, D], keys and values of row b in token order
    """

    def __init__(
        self,
        mesh: Mesh,
        shape: Shape,
        chunking: Chunking | None = None,
        *,
        backend: str = "auto",
        copies: int | None = None,
        prefill: bool = False,
        own_apart: bool = False,
        seed: int = 11,
    ) -> None:
        self.mesh, self.shape, self.device = mesh, shape, torch.device(mesh.device)
        self.chunking = chunking = chunking or Chunking()
        self.copies = copies or rotations_for(shape.kv_bytes // mesh.kvp_size)
        self._truth: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        dtype = DTYPES[shape.dtype]
        self.rows = make_rows(shape, self.device, seed)
        self.cache = ShardedCache(
            mesh,
            num_layers=self.copies,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            group_size=shape.num_q_heads // shape.num_kv_heads,
            max_tokens=shape.tokens * 5 // 4 + (len(shape.lengths) + 8) * chunking.max_chunk * mesh.kvp_size,
            dtype=dtype,
            min_chunk=chunking.min_chunk,
            max_chunk=chunking.max_chunk,
            page_size=min(16, chunking.min_chunk),
            backend=backend,
            own_apart=own_apart,
        )
        past = {seq: length - shape.q_len for seq, length in enumerate(shape.lengths)}
        if chunking.seed is None:
            for seq, length in past.items():
                self.cache.kv.add(seq)
                self.cache.kv.extend(seq, length)
        else:
            churn(self.cache.kv, past, random.Random(chunking.seed))
        self._fill_pool(past)
        count = shape.q_len
        # more query tokens than a decode row may have: the step's rows run in the prefill kernel
        self.batch: StepBatch = self.cache.begin_step(
            [(seq, count) for seq in past], q_len=(1 if count > 1 else 2) if prefill else count
        )
        tokens = torch.randn(len(past), count, shape.num_q_heads, shape.head_dim, device=self.device)
        self.q = tokens.flatten(0, 1).to(dtype)
        self.k_new = torch.cat([k[:, -count:].transpose(0, 1) for k, _ in self.rows])
        self.v_new = torch.cat([v[:, -count:].transpose(0, 1) for _, v in self.rows])
        for layer in range(self.copies):
            k_pool, v_pool = self.cache.pool.layer(layer)
            self.cache.backend.store_kv(self.k_new, self.v_new, self.batch.slot_mapping, k_pool, v_pool)

    def _fill_pool(self, past: dict[int, int]) -> None:
        pool, store = self.cache.pool, self.cache.backend.store_kv
        pool.k.fill_(float("nan"))
        pool.v.fill_(float("nan"))
        for seq, length in past.items():
            k, v = self.rows[seq]
            for start in range(0, length, 1 << 17):
                stop = min(length, start + (1 << 17))
                slots = self.cache.kv.slots(seq, start, stop, self.mesh.kvp_rank)
                slots = torch.as_tensor(slots, dtype=torch.int64).to(self.device)
                part = [x[:, start:stop].transpose(0, 1).contiguous() for x in (k, v)]
                for layer in range(self.copies):
                    store(*part, slots, *pool.layer(layer))

    @property
    def ops(self) -> OpsBackend:
        return self.cache.backend

    @property
    def tables(self) -> KVTables:
        return self.batch.tables("decode", 0)

    @property
    def q_positions(self) -> Tensor:
        return self.batch.q_positions[: self.batch.num_tokens]

    def reference(self, q: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return out [T, Hq, D] and lse [T, Hq] of the whole sequences in float32."""
        q = self.q if q is None else q
        if self._truth is not None and self._truth[0] is q:
            return self._truth[1]
        count, scale = self.shape.q_len, self.shape.head_dim**-0.5
        parts = []
        for seq, (k, v) in enumerate(self.rows):
            span = slice(seq * count, (seq + 1) * count)
            parts.append(reference_row(q[span], k, v, self.q_positions[span], scale))
        self._truth = q, (torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts]))
        return self._truth[1]

    def chunk_histogram(self) -> dict[str, int]:
        """Count this rank's views by length in tokens."""
        sizes: Counter[int] = Counter()
        for seq in range(len(self.shape.lengths)):
            sizes.update(self.cache.kv.local_view_table(seq, self.mesh.kvp_rank)[:, 1].tolist())
        frames = Counter({size: n for size, n in sizes.items() if size % self.chunking.min_chunk == 0})
        other = sum(sizes.values()) - sum(frames.values())
        return {**{str(size): n for size, n in sorted(frames.items())}, **({"other": other} if other else {})}

    def describe(self) -> dict[str, Any]:
        """Return the record fields that say how the tables came about."""
        return {
            "tables": "allocator after random traffic" if self.chunking.seed is not None else "allocator, in order",
            "min_chunk": self.chunking.min_chunk,
            "max_chunk": self.chunking.max_chunk,
            "chunks": self.chunk_histogram(),
            "copies": self.copies,
        }

    def stacked(self) -> list[tuple[Tensor, Tensor]]:
        """Return contiguous keys and values [B, Hkv, length, D] of every copy; rows of one length only."""
        first = tuple(
            torch.as_strided(x, (len(self.rows), *x.shape), (x.numel(), *x.stride()), x.storage_offset())
            for x in self.rows[0]
        )
        return [first, *(tuple(x.clone() for x in first) for _ in range(self.copies - 1))]

    def row_copies(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return the contiguous rows of every copy."""
        more = range(self.copies - 1)
        return [self.rows, *([tuple(x.clone() for x in row) for row in self.rows] for _ in more)]

    def pools(self) -> list[tuple[Tensor, Tensor]]:
        return [self.cache.pool.layer(layer) for layer in range(self.copies)]


def make_rows(shape: Shape, device: torch.device, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Make random keys and values [Hkv, length, D] of every row, equal on all ranks; sets torch's seed.

    Rows of one length are slices of one [B, Hkv, length, D] tensor. The numbers are made in the wanted type: a float32
    copy of 32 GiB would not fit beside the rest.
    """
    torch.manual_seed(seed)
    dtype, heads, dim = DTYPES[shape.dtype], shape.num_kv_heads, shape.head_dim
    if len(set(shape.lengths)) == 1:
        size = (len(shape.lengths), heads, shape.lengths[0], dim)
        k, v = (torch.randn(size, device=device, dtype=dtype) for _ in range(2))
        return list(zip(k.unbind(0), v.unbind(0), strict=True))
    sizes = [(heads, length, dim) for length in shape.lengths]
    return [tuple(torch.randn(size, device=device, dtype=dtype) for _ in range(2)) for size in sizes]


class CeilingMeter:
    """Finds the fastest read of as many bytes as a call must read, once per size, for the ceiling of a record."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._best: dict[int, tuple[int, int, int]] = {}

    def call(self, pools: list[tuple[Tensor, Tensor]], num_bytes: int) -> tuple[Call, int]:
        """Return the read of `num_bytes` of the pools, to be timed beside the variants, and its bytes."""
        num_bytes -= num_bytes % 128
        if self.device.type == "cpu":
            half = num_bytes // 2
            return lambda copy: [x.view(-1)[: half // x.itemsize].float().sum() for x in pools[copy]], num_bytes
        from ceiling_triton import CONFIGS, Ceiling

        ceiling = Ceiling(pools, num_bytes)
        if num_bytes not in self._best:
            timer = Timer(self.device, rotations=len(pools), rounds=5, sample_us=300)
            found = time_calls({str(config): ceiling.call(config) for config in CONFIGS}, timer)
            times = {c: found[str(c)].median_us for c in CONFIGS if isinstance(found[str(c)], Timing)}
            if not times:
                raise RuntimeError(f"no read kernel ran: {found}")
            self._best[num_bytes] = min(times, key=times.__getitem__)
        config = self._best[num_bytes]
        try:
            ceiling.check(config)
        except AssertionError as failure:
            raise benchlib.CheckFailed(str(failure)) from failure
        return ceiling.call(config), num_bytes

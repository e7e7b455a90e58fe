"""Measure the integer cache: planning a million tokens, appends against length, allocate / extend / free, prefix hits.

Usage: python scripts/bench_allocator.py [--out outputs/bench_allocator.jsonl] [--ranks 8] [--repeat 5]

One JSON record for each measurement: what, its parameters, median, p10 and p90 over the repeats, unit. Host time of one
process; no device is used.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from distdec.cache import CacheLayout, ChunkAllocator, KVCache, plan_chunks

Record = dict[str, object]


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def plan_million(ranks: int) -> list[tuple[str, Record, float, str]]:
    """Reserve and plan one sequence of a million tokens."""
    cache = KVCache(CacheLayout((1_100_000 // 128 // ranks + 16,) * ranks))
    cache.add(0)
    extend = timed(lambda: cache.extend(0, 1_000_000))
    table = timed(lambda: cache.local_view_table(0, 0))
    cache.check_integrity()
    planned = timed(lambda: plan_chunks([1_000_000], ranks))
    fields: Record = {"tokens": 1_000_000, "views": len(cache.views(0))}
    return [
        ("extend", fields, extend * 1e3, "ms"),
        ("first_view_table", fields, table * 1e3, "ms"),
        ("plan_chunks", {"tokens": 1_000_000}, planned * 1e3, "ms"),
    ]


def appends(ranks: int, length: int, steps: int = 4000) -> list[tuple[str, Record, float, str]]:
    """Decode `steps` tokens behind `length`: reserve one, read one rank's table and slot."""
    cache = KVCache(CacheLayout(((length + steps) // 128 // ranks + 16,) * ranks))
    cache.add(0)
    cache.extend(0, length)
    cache.local_view_table(0, 0)

    def reserve() -> None:
        for _ in range(steps):
            cache.extend(0, 1)

    def read() -> None:
        for _ in range(steps):
            cache.local_view_table(0, 0)
            cache.slots(0, length, length + 1, 0)

    return [
        ("append", {"length": length}, timed(reserve) / steps * 1e6, "us"),
        ("read_table_and_slot", {"length": length}, timed(read) / steps * 1e6, "us"),
    ]


def allocator(operations: int = 40_000) -> list[tuple[str, Record, float, str]]:
    """Allocate and release random chunks around 95 % load."""
    rng = random.Random(0)
    books = ChunkAllocator(CacheLayout((4096,)))
    held = []

    def work() -> None:
        for _ in range(operations):
            if books.free_frames(0) > 205:
                held.append(books.allocate(0, rng.choice((1, 2, 4, 8))))
            else:
                index = rng.randrange(len(held))
                held[index], held[-1] = held[-1], held[index]
                books.release(held.pop())

    seconds = timed(work)
    books.check_integrity()
    fields: Record = {"operations": operations, "external_fragmentation": books.fragmentation(0).external}
    return [("allocate_release", fields, seconds / operations * 1e6, "us")]


def churn(ranks: int, operations: int = 10_000) -> list[tuple[str, Record, float, str]]:
    """Add, extend and free sequences of 1 to 4096 tokens around 95 % load."""
    rng = random.Random(0)
    cache = KVCache(CacheLayout((1024,) * ranks))
    live: list[int] = []
    total = 1024 * ranks

    def work() -> None:
        for number in range(operations):
            if sum(cache.stats().used_frames) > 0.95 * total:
                index = rng.randrange(len(live))
                live[index], live[-1] = live[-1], live[index]
                cache.free(live.pop())
            else:
                cache.add(number)
                live.append(number)
                cache.extend(number, rng.randint(1, 4096))

    seconds = timed(work)
    cache.check_integrity()
    stats = cache.stats()
    fields: Record = {
        "operations": operations,
        "internal_waste": round(stats.internal_waste, 4),
        "external_fragmentation": round(stats.external_fragmentation, 4),
    }
    return [("add_extend_free", fields, seconds / operations * 1e6, "us")]


def prefix(ranks: int, length: int = 131_072) -> list[tuple[str, Record, float, str]]:
    """Publish and then find a prompt of `length` tokens."""
    cache = KVCache(CacheLayout((4 * length // 128 // ranks + 16,) * ranks))
    tokens = np.random.default_rng(0).integers(0, 100_000, length)
    cache.add(0)
    cache.extend(0, length)
    commit = timed(lambda: cache.commit_pages(0, tokens))
    find = timed(lambda: cache.add(1, tokens))
    if cache.length(1) != length - cache.layout.page_size:
        raise RuntimeError(f"{cache.length(1)} of {length} tokens hit")
    return [
        ("commit_pages", {"length": length}, commit * 1e3, "ms"),
        ("prefix_hit", {"length": length}, find * 1e3, "ms"),
    ]


def main() -> None:
    """Run all measurements, print them and write them as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench_allocator.jsonl"))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    works: list[Callable[[], list[tuple[str, Record, float, str]]]] = [
        lambda: plan_million(args.ranks),
        *[lambda length=length: appends(args.ranks, length) for length in (1_000, 30_000, 1_000_000)],
        allocator,
        lambda: churn(args.ranks),
        lambda: prefix(args.ranks),
    ]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    dirty = bool(subprocess.run(["git", "status", "--porcelain"], capture_output=True, check=False).stdout)
    host = {"python": platform.python_version(), "numpy": np.__version__, "commit": commit, "dirty": dirty}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w") as out:
        for work in works:
            runs = [work() for _ in range(args.repeat)]
            for results in zip(*runs, strict=True):
                what, fields, _, unit = results[-1]
                values = sorted(value for _, _, value, _ in results)
                low, high = np.percentile(values, [10, 90]).tolist()
                figures = {"median": statistics.median(values), "p10": low, "p90": high, "unit": unit}
                record = {"bench": "allocator", "what": what, "ranks": args.ranks, **fields, **figures, **host}
                out.write(json.dumps(record) + "\n")
                text = " ".join(f"{name}={value}" for name, value in fields.items())
                sys.stdout.write(
                    f"{what:20} {figures['median']:10.2f} {unit}  (p10 {low:.2f}, p90 {high:.2f})  {text}\n"
                )


if __name__ == "__main__":
    main()

"""Measure merges on the machine at hand, once, and choose among them: the same choice on every rank.

A step is replayed as a CUDA graph where speed matters, so merges are timed inside graphs, by the device's clock. Every
rank times the same calls in the same order; what counts is the slowest rank's median, which all ranks know, so that all
find the same winner from the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from distdec.merge_choice import Choice
from distdec.merge_modes import Merge
from distdec.mesh import Mesh
from distdec.ops.partial import Partial

FURTHER_TOKENS = (1, 64, 256)
"""Sizes that are measured beside the typical one, so that the start-up line shows where another mode would win."""
CALLS, SAMPLES = 20, 5
"""Calls in a captured graph, and replays of it: 0.3 ms each at 15 us a merge."""

Timer = Callable[[Callable[[], object]], Callable[[], float]]
"""Makes a call ready to be timed and returns what times it, in us; each runs the call equally often on every rank."""


def graph_timer(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Warm a call up and capture it; the returned function replays it and returns the median us.

    Notes:
        Collective: as the call, `SAMPLES + 1` replays of `CALLS` calls, after two warm ones. Host sync: yes.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread queries events meanwhile: only this thread's calls may break the capture
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()

    def sample() -> float:
        times = []
        for _ in range(SAMPLES + 1):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / CALLS)
        # the first replay uploads the graph
        return sorted(times[1:])[SAMPLES // 2]

    return sample


def measure(
    merges: Mapping[str, Merge], sizes: Sequence[int], num_heads: int, head_dim: int, mesh: Mesh, timer: Timer
) -> dict[str, list[float] | str]:
    """Time merges of `sizes` tokens; returns us per size, the slowest rank's, or why a mode cannot be timed.

    Notes:
        Collective: the whole mesh, and the merges' kvp groups; the result is the same on all ranks. Host sync: yes.
    """
    table: dict[str, list[float] | str] = {}
    for mode in sorted(merges):
        times: list[float] = []
        for tokens in sizes:
            told = _slowest_us(merges[mode], tokens, num_heads, head_dim, mesh, timer)
            if isinstance(told, str):
                table[mode] = told
                break
            times.append(told)
        else:
            table[mode] = times
        merges[mode].calls = 0
    return table


def _slowest_us(merge: Merge, tokens: int, num_heads: int, head_dim: int, mesh: Mesh, timer: Timer) -> float | str:
    """Return the largest median of all ranks, in us, or which ranks failed."""
    out = torch.ones((tokens, num_heads, head_dim), device=mesh.device)
    partial = Partial(out, torch.zeros((tokens, num_heads), device=mesh.device))
    fault, sample = "", None
    try:
        sample = timer(lambda: merge(partial))
    except Exception as error:
        fault = f" ({type(error).__name__}: {error})"
    # nobody may replay while another rank has nothing to replay: its peers would wait for it
    failed = [rank for rank, row in enumerate(mesh.gather([sample is None])) if row[0]]
    if failed or sample is None:
        return f"not measured on ranks {failed}{fault if mesh.is_leader else ''}"
    return max(row[0] for row in mesh.gather([round(sample() * 1e3)])) / 1e3


def choose(table: Mapping[str, Sequence[float] | str], sizes: Sequence[int], typical: int, told: str) -> Choice | None:
    """Return the mode that is fastest at the typical size, with the table as its reason; None if none was measured.

    Args:
        typical: one of `sizes`.
        told: what was merged, for the reason.

    Example: `{"a": [5.0, 9.0], "b": [7.0, 8.0]}` at sizes (1, 8): "b" where 8 tokens are typical.
    """
    times = {mode: row for mode, row in table.items() if not isinstance(row, str)}
    if not times:
        return None
    at = list(sizes).index(typical)
    best = min(times, key=lambda mode: (times[mode][at], mode))
    rows = []
    for mode in sorted(table):
        row = table[mode]
        rows.append(f"{mode} {row if isinstance(row, str) else ' / '.join(f'{us:.1f}' for us in row)}")
    counts = " / ".join(str(size) for size in sizes)
    reason = f"{best}: measured us at {counts} tokens ({typical} typical) {told}: {', '.join(rows)}"
    return Choice(best, reason)

"""CUDA graphs of a step, or of its attention path: captured once per shape bucket, replayed with growing lengths.

A graph freezes kernels, grids and addresses. What changes from step to step, lengths and tables, must therefore come
from tensors that stay where they are (`StepBuffers` keeps its tensors in place), and what a graph may not do, such as
loading a kernel or growing a buffer, must have happened before: every callable runs eagerly, all of them, before the
first one is captured. A rank that loads a kernel lazily while its peer already waits in a replayed collective is a hang
that only long prompts show.

Example, one decode row a sequence, rows padded to the bucket:

    graphs = StepGraphs(mesh.device, barrier=mesh.barrier, moved=lambda: buffers.generation, keep=[attention.merge])
    graphs.capture({GraphKey(rows): (attend, (q[:rows], k[:rows], v[:rows])) for rows in row_buckets(32)})
    ...
    merged = graphs.replay(graphs.pick(num_rows), q_now, k_now, v_now)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

WARM_UP_CALLS = 2
"""Eager calls of every callable before the first capture: one loads kernels, the next runs as later ones will."""

MOST_PREFILL_TOKENS = 2048
"""Prefill tokens beyond which a step is not captured: its kernels take longer than launching them, some 30 ms for 32
layers (on an H200, 2,048 tokens of an 8B model are 50 ms of products), and padding would only add to that."""


class GraphKey(NamedTuple):
    """What of a step is frozen in a graph.

    Attributes:
        rows: decode rows, padding included; 0 for none.
        q_len: query tokens a row.
        schedule: how the work is cut: "spans", or "fixed" for the deterministic schedule.
        splits: bucket of the split count, a constant of the capture; 0 where one count serves all lengths.
        prefill_tokens: tokens of all prefill rows together, padding included; 0 where there are only decode rows.
    """

    rows: int
    q_len: int = 1
    schedule: str = "spans"
    splits: int = 0
    prefill_tokens: int = 0


class _Captured(NamedTuple):
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    graph: torch.cuda.CUDAGraph | None
    output: Any


def row_buckets(max_rows: int) -> list[int]:
    """Padded row counts to capture: powers of two, from 16 on with one between, and `max_rows` itself.

    Padding then adds at most half of the rows above 16 rows, and 256 rows need 13 graphs. Example: 40 rows ->
    [1, 2, 4, 8, 16, 24, 32, 40].
    """
    if max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, got {max_rows}")
    buckets, power = [], 1
    while power < max_rows:
        buckets.append(power)
        if power >= 16 and power * 3 // 2 < max_rows:
            buckets.append(power * 3 // 2)
        power *= 2
    return [*buckets, max_rows]


def mixed_buckets(max_rows: int, max_tokens: int) -> list[tuple[int, int]]:
    """Padded (decode rows, prefill tokens) of steps with prefill rows to capture.

    Few, as each costs a warm-up and memory: no decode rows, or powers of four from 16 on, or `max_rows`; tokens in
    powers of two from 128 on, up to `MOST_PREFILL_TOKENS`. Example: 40 rows and 300 tokens give 0, 16 and 40 rows,
    each with 128, 256 and 300 tokens.
    """
    rows = [0, *(16 * 4**i for i in range(max_rows.bit_length()) if 16 * 4**i < max_rows), max_rows]
    most = min(max_tokens, MOST_PREFILL_TOKENS)
    tokens = [*(128 << i for i in range(most.bit_length()) if 128 << i < most), most]
    return [(r, t) for r in rows for t in tokens]


class StepGraphs:
    """Captured callables by key. On a device without graphs they are called instead, so that callers have one path.

    Args:
        device: where the callables run.
        barrier: waits for the other ranks; called between warming up and capturing, so that no rank replays a
            collective while another one still loads kernels.
        moved: a number that changes when static tensors move, such as `StepBuffers.generation`.
        checks: called before every replay, to raise what an earlier one has left: `OneShotMerge.check`.
        keep: what must live as long as the graphs: merges with their communication buffers, caches, modules.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        barrier: Callable[[], None] | None = None,
        moved: Callable[[], int] | None = None,
        checks: Sequence[Callable[[], None]] = (),
        keep: Sequence[Any] = (),
    ) -> None:
        self.device = torch.device(device)
        self._barrier = barrier or (lambda: None)
        self._moved = moved or (lambda: 0)
        self._checks = tuple(checks)
        self._keep = tuple(keep)
        self._captured: dict[GraphKey, _Captured] = {}
        self._pool: Any = None
        self._generation: int | None = None
        self._closed = False

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._captured

    @property
    def keys(self) -> list[GraphKey]:
        """Captured keys, fewest rows first."""
        return sorted(self._captured)

    def capture(
        self,
        steps: Mapping[GraphKey, tuple[Callable[..., Any], Sequence[Tensor]]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Warm up every callable, then capture each of them.

        Args:
            steps: key -> (callable, example inputs). The graph reads the example tensors' memory from now on; `replay`
                copies new values into it. Whatever else the callable reads must stay where it is. The callable runs
                `WARM_UP_CALLS` times, with all its effects: point its slot mapping at -1 first.
            progress: called with the number of steps captured so far, and of all.

        Raises:
            ValueError: a key that is captured already.
            RuntimeError: static tensors have moved since an earlier capture, or the graphs were closed.

        Notes:
            Collective, if the callables are: all ranks with the same keys in the same order. Host sync: yes.
        """
        self._check_usable()
        again = [key for key in steps if key in self._captured]
        if again:
            raise ValueError(f"captured already: {again}; legal: keys other than {self.keys}")
        for function, inputs in steps.values():
            self._warm_up(function, inputs)
        # a callable may have grown a buffer while warming up: what a graph saw before that would be stale
        self._check_usable()
        self._generation = self._moved()
        self._barrier()
        # largest first: the smaller ones then find room in the memory pool that all share
        for count, key in enumerate(sorted(steps, reverse=True), 1):
            function, inputs = steps[key]
            graph, output = self._record(function, inputs)
            self._captured[key] = _Captured(function, tuple(inputs), graph, output)
            if progress is not None:
                progress(count, len(steps))
        self._barrier()

    def pick(
        self, rows: int, q_len: int = 1, schedule: str = "spans", splits: int = 0, prefill_tokens: int = 0
    ) -> GraphKey | None:
        """Return the captured key with the least padding that takes this step, or None: run it eagerly.

        A step without prefill rows never runs as one with them, nor the other way round. Fewest prefill tokens count
        first, then rows, then splits.
        """
        fitting = [
            key
            for key in self._captured
            if key.rows >= rows
            and (key.q_len, key.schedule) == (q_len, schedule)
            and key.splits >= splits
            and key.prefill_tokens >= prefill_tokens
            and (key.prefill_tokens > 0) == (prefill_tokens > 0)
        ]
        return min(fitting, key=lambda key: (key.prefill_tokens, key), default=None)

    def replay(self, key: GraphKey, *inputs: Tensor) -> Any:
        """Run a captured step on new inputs and return its output.

        Shapes:
            inputs: as captured, or with fewer leading rows; the rest of the static tensor then keeps what it held.
            returns: the captured call's own tensors, valid until the next replay of any key

        Raises:
            KeyError: the key was not captured.
            ValueError: inputs that do not fit the captured ones.
            RuntimeError: static tensors have moved since the capture, a check failed, or the graphs were closed.

        Notes:
            In-place: the static inputs and outputs. Collective, if the callable is. Host sync: none.
        """
        self._check_usable()
        if key not in self._captured:
            raise KeyError(f"no graph for {key}; captured: {self.keys}")
        for check in self._checks:
            check()
        captured = self._captured[key]
        self._copy_in(key, captured.inputs, inputs)
        if captured.graph is None:
            return captured.function(*captured.inputs)
        captured.graph.replay()
        return captured.output

    def close(self) -> None:
        """Drop the graphs; before the process group and the merges go, since NCCL waits for graphs that use it.

        Notes:
            Host sync: waits for the device.
        """
        if self._closed:
            return
        self._closed = True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for captured in self._captured.values():
            if captured.graph is not None:
                captured.graph.reset()
        self._captured.clear()
        self._pool, self._keep, self._checks = None, (), ()

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("these graphs were closed")
        if self._generation is not None and self._moved() != self._generation:
            raise RuntimeError(
                f"static tensors have moved since the graphs were captured (generation {self._generation}, now "
                f"{self._moved()}): make new graphs, with buffers large enough for the whole run"
            )

    def _warm_up(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        if self.device.type != "cuda":
            function(*inputs)
            return
        # on a side stream, as captured work will be: libraries keep workspaces per stream
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                function(*inputs)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)

    def _record(
        self, function: Callable[..., Any], inputs: Sequence[Tensor]
    ) -> tuple[torch.cuda.CUDAGraph | None, Any]:
        if self.device.type != "cuda":
            return None, None
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, NCCL's watchdog among them, may go on calling CUDA meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = function(*inputs)
        return graph, output

    def _copy_in(self, key: GraphKey, static: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        if len(inputs) != len(static):
            raise ValueError(f"{key} takes {len(static)} inputs, got {len(inputs)}")
        for kept, new in zip(static, inputs, strict=True):
            if new.dim() != kept.dim() or new.dtype != kept.dtype or new.shape[1:] != kept.shape[1:]:
                raise ValueError(f"{key} takes {list(kept.shape)} {kept.dtype}, got {list(new.shape)} {new.dtype}")
            if new.dim() and new.shape[0] > kept.shape[0]:
                raise ValueError(f"{key} takes at most {kept.shape[0]} leading rows, got {new.shape[0]}")
            if new.data_ptr() != kept.data_ptr():
                (kept[: new.shape[0]] if new.dim() else kept).copy_(new)

"""How the benchmark scripts time a call and check its result; the rules are in benchlib.py."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from benchlib import CheckFailed
from torch import Tensor

MIN_ROTATED_BYTES = 1280 << 20


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over the samples of one variant."""

    median_us: float
    p10_us: float
    p90_us: float
    iterations: int
    calls_per_sample: int
    timer: str


def summarize(samples: list[float], calls_per_sample: int, timer: str) -> Timing:
    """Return median, p10 and p90 of samples in us (nearest rank)."""
    ordered = sorted(samples)
    pick = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.1, 0.9)]
    return Timing(*(round(x, 3) for x in pick), len(ordered) * calls_per_sample, calls_per_sample, timer)


def bandwidth_fields(timing: Timing, num_bytes: int | None, ceiling: tuple[float, int] | None) -> dict[str, Any]:
    """Fields of a measurement; where it must read `num_bytes`: TB/s and its share of the ceiling.

    Args:
        ceiling: (us, bytes) of a plain read in the same run.
    """
    fields: dict[str, Any] = asdict(timing)
    if num_bytes is not None:
        fields.update(bytes=num_bytes, tb_s=round(num_bytes / timing.median_us / 1e6, 4))
        if ceiling is not None:
            read_us, read_bytes = ceiling
            fields.update(
                ceiling_us=read_us, ceiling_bytes=read_bytes, ceiling_tb_s=round(read_bytes / read_us / 1e6, 4)
            )
            fields["share_of_ceiling"] = round(num_bytes / timing.median_us * read_us / read_bytes, 4)
    return fields


Call = Callable[[int], Any]


@dataclass(frozen=True)
class Timer:
    """How variants are timed.

    Args:
        device: where they run; on the CPU a sample is one call by the host's clock.
        rotations: number of copies of the inputs; call i uses copy i % rotations.
        rounds: samples per variant.
        sample_us: least length of a sample (a graph holds that many calls, at most `max_calls`).
        eager: enqueue the calls of a sample one by one instead of replaying a graph.
        align: called before each sample, on every rank (a tiny collective, say).
        maximum: reduces one list of samples over the ranks.
        any_rank: makes a condition of one rank that of all.
    """

    device: torch.device
    rotations: int = 1
    rounds: int = 15
    sample_us: float = 1000.0
    max_calls: int = 100
    eager: bool = False
    align: Callable[[], None] | None = None
    maximum: Callable[[list[float]], list[float]] | None = None
    any_rank: Callable[[bool], bool] = bool

    def calls_per_sample(self, estimate_us: float) -> int:
        wanted = max(1, min(self.max_calls, math.ceil(self.sample_us / max(estimate_us, 0.1))))
        return math.ceil(wanted / self.rotations) * self.rotations


def time_calls(calls: dict[str, Call], timer: Timer) -> dict[str, Timing | Exception]:
    """Time several variants in turn; a variant that cannot run yields its exception instead."""
    results: dict[str, Timing | Exception] = {}
    replays: dict[str, tuple[Callable[[], None], int]] = {}
    for name, call in calls.items():
        prepared = _attempt(call, timer)
        failed = isinstance(prepared, Exception)
        if timer.any_rank(failed):
            results[name] = prepared if failed else RuntimeError("failed on another rank")
        else:
            replays[name] = prepared
    samples: dict[str, list[float]] = {name: [] for name in replays}
    order = list(replays)
    for turn in range(timer.rounds + 1):
        for name in order[turn % max(1, len(order)) :] + order[: turn % max(1, len(order))]:
            replay, num_calls = replays[name]
            elapsed = _sample(replay, timer)
            if turn > 0:
                samples[name].append(elapsed / num_calls)
    kind = "host" if timer.device.type == "cpu" else "eager" if timer.eager else "graph"
    for name in order:
        values = timer.maximum(samples[name]) if timer.maximum else samples[name]
        results[name] = summarize(values, replays[name][1], kind)
    return {name: results[name] for name in calls}


def _attempt(call: Call, timer: Timer) -> tuple[Callable[[], None], int] | Exception:
    try:
        return _prepare(call, timer)
    except Exception as error:
        return error


def _prepare(call: Call, timer: Timer) -> tuple[Callable[[], None], int]:
    """Warm a variant up and return (what makes one sample, number of calls in it)."""
    if timer.device.type == "cpu":
        call(0)

        def once() -> None:
            for i in range(timer.rotations):
                call(i)

        return once, timer.rotations
    stream = torch.cuda.Stream(timer.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(3):
            call(i % timer.rotations)
        end.record()
    torch.cuda.synchronize()
    estimate = begin.elapsed_time(end) * 1e3 / 3
    if timer.maximum:
        # all ranks must capture the same number of calls: a collective inside would not match otherwise
        estimate = timer.maximum([estimate])[0]
    num_calls = timer.calls_per_sample(estimate)

    def enqueue() -> None:
        for i in range(num_calls):
            call(i % timer.rotations)

    if timer.eager:
        return enqueue, num_calls
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread queries events meanwhile: only this thread's calls may break the capture
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        enqueue()
    return graph.replay, num_calls


def _sample(replay: Callable[[], None], timer: Timer) -> float:
    """Return the microseconds one sample takes on the device (host clock on the CPU)."""
    if timer.device.type == "cpu":
        if timer.align:
            timer.align()
        start = time.perf_counter()
        replay()
        return (time.perf_counter() - start) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # the device sleeps (about 0.2 ms) while the host enqueues what follows: no launch latency inside the events
    torch.cuda._sleep(400_000)
    if timer.align:
        timer.align()
    begin.record()
    replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def host_us(call: Callable[[], Any], device: torch.device, *, calls: int = 50, rounds: int = 15) -> Timing:
    """Time what the host spends to enqueue one eager call, with the device's queue never full."""
    samples = []
    for _ in range(rounds + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) * 1e6 / calls)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return summarize(samples[1:], calls, "host")


def kernel_names(call: Callable[[], Any]) -> list[str]:
    """Return the names of the Triton kernels that one call launches, in order, each once."""
    names: dict[str, None] = {}
    try:
        from triton import knobs
    except ImportError:
        call()
        return []

    def note(metadata: Any) -> None:
        # nothing from what torch.compile made: it leaves the hook out where none was there as it compiled
        if metadata is not None:
            names.setdefault(str(metadata.get()["name"]))

    chain = knobs.runtime.launch_enter_hook
    if not hasattr(chain, "add"):
        call()
        return ["unknown"]
    chain.add(note)
    try:
        call()
    finally:
        chain.remove(note)
    return list(names)


def rotations_for(num_bytes: int, limit: int = 48) -> int:
    """Return how many copies of `num_bytes` make up MIN_ROTATED_BYTES."""
    return max(1, min(limit, math.ceil(MIN_ROTATED_BYTES / max(1, num_bytes))))


# -- truth ------------------------------------------------------------------------------------------------------------


def reference_row(q: Tensor, k: Tensor, v: Tensor, q_positions: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend one row's query tokens over its contiguous keys in float32, chunk by chunk.

    Shapes:
        q: [q_len, Hq, D]; k, v: [Hkv, S, D]; q_positions: [q_len], the key at index j has position j
        returns out [q_len, Hq, D] float32 and lse [q_len, Hq] float32, natural log
    """
    q_len, num_q, dim = q.shape
    num_kv, length, _ = k.shape
    rows = q.float().view(q_len, num_kv, num_q // num_kv, dim).permute(1, 0, 2, 3).reshape(num_kv, -1, dim)
    limit = q_positions.to(q.device).repeat_interleave(num_q // num_kv)
    best = torch.full(rows.shape[:2], -math.inf, device=q.device)
    total = torch.zeros_like(best)
    acc = torch.zeros(*rows.shape[:2], v.shape[-1], device=q.device)
    for start in range(0, length, 16384):
        stop = min(length, start + 16384)
        scores = (rows @ k[:, start:stop].float().transpose(1, 2)) * scale
        hidden = torch.arange(start, stop, device=q.device)[None] > limit[:, None]
        scores = scores.masked_fill(hidden[None], -math.inf)
        peak = torch.maximum(best, scores.amax(-1))
        shift = torch.where(peak == -math.inf, 0.0, peak)
        weights = torch.exp(scores - shift[..., None])
        decay = torch.exp(best - shift)
        total = total * decay + weights.sum(-1)
        acc = acc * decay[..., None] + weights @ v[:, start:stop].float()
        best = peak
    lse = best + torch.log(total)
    out = torch.where(total[..., None] > 0, acc / total[..., None], 0.0)
    out = out.view(num_kv, q_len, -1, v.shape[-1]).permute(1, 0, 2, 3).reshape(q_len, num_q, -1)
    return out, lse.view(num_kv, q_len, -1).permute(1, 0, 2).reshape(q_len, num_q)


def compare(
    out: Tensor, reference: Tensor, dtype: torch.dtype, lse: Tensor | None = None, lse_ref: Tensor | None = None
):
    """Check one variant's output (and LSE) and return its error fields.

    The bounds: the worst row's relative error, 2e-2 in bf16 or fp16 (weights and output rounded to 8 bits or more) and
    1e-4 in float32, 1e-1 where outputs travel in 8 bits (3 bits of fraction); LSE within 2e-3 absolute.

    Raises:
        CheckFailed: positions of NaN or infinity, or the error, are off.
    """
    out, reference = out.float().flatten(0, -2), reference.float().flatten(0, -2)
    if out.shape != reference.shape:
        raise CheckFailed(f"output has {tuple(out.shape)} rows and columns, the reference {tuple(reference.shape)}")
    if not torch.isfinite(out).all():
        raise CheckFailed("output holds NaN or infinity")
    worst = ((out - reference).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-20)).max().item()
    bound = {torch.float32: 1e-4, torch.float8_e4m3fn: 1e-1}.get(dtype, 2e-2)
    if not worst <= bound:
        raise CheckFailed(f"worst row's relative error {worst:.3e} is over {bound:g}")
    fields = {"error_out": float(f"{worst:.3e}")}
    if lse is not None and lse_ref is not None:
        empty = lse_ref == -math.inf
        if not torch.equal(lse == -math.inf, empty):
            raise CheckFailed("LSE is -inf in other places than the reference")
        gap = (lse.float() - lse_ref.float()).masked_fill(empty, 0.0).abs().max().item()
        if not gap <= 2e-3:
            raise CheckFailed(f"LSE differs by {gap:.3e} (natural log, bound 2e-3)")
        fields["error_lse"] = float(f"{gap:.3e}")
    return fields

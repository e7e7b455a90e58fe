"""The frame of a benchmark script: arguments, ranks, and one measurement from check to record."""

import argparse
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import benchlib
import torch
import torch.distributed as dist
from bench_inputs import CeilingMeter, Chunking, Inputs, Shape
from bench_timing import Call, Timer, Timing, bandwidth_fields, kernel_names, time_calls

from distdec.mesh import Mesh

# a program that uses NVLink multicast can put a shared host's GPUs out of service
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

BEST_PEER = "best peer"
CEILING = "read ceiling"


@dataclass
class Variant:
    """One way of computing a point.

    Args:
        name: as the record names it.
        call: `f(copy)`, uses copy `copy` of the inputs.
        check: takes what the call returned, raises CheckFailed or returns error fields.
        backend: whose code it is: triton, reference, cudnn, nccl and the like.
        config: what tells this variant from the others of the point.
        num_bytes: of keys and values that it must read; None where bandwidth says nothing.
        flops: floating-point operations; None likewise.
        baseline: variant to put this one's time in relation to; BEST_PEER is the fastest that is not ours.
        peer: not ours: where it refuses a point, the record says "unavailable".
        rated: counts when the fastest peer is looked for.
        fields: further fields of the record.
    """

    name: str
    call: Call
    check: Callable[[Any], dict[str, Any]]
    backend: str
    config: dict[str, Any] = field(default_factory=dict)
    num_bytes: int | None = None
    flops: float | None = None
    baseline: str | None = None
    peer: bool = False
    rated: bool = True
    fields: dict[str, Any] = field(default_factory=dict)


class Bench:
    """What a script's sections share: ranks, budget, recorder, ceiling."""

    def __init__(self, script: str, args: argparse.Namespace, mesh: Mesh) -> None:
        self.args, self.mesh = args, mesh
        self.device = torch.device(mesh.device)
        self.smoke: bool = args.smoke
        self.backend: str = args.backend
        self.budget = benchlib.Budget(args.seconds, self.any_rank)
        self.recorder = benchlib.Recorder(script, args.out, self.device, ranks=mesh.world_size, rank=mesh.rank)
        self.meter = CeilingMeter(self.device)

    def inputs(self, shape: Shape, chunking: Chunking | None = None, **options: Any) -> Inputs:
        """Make inputs on this run's ranks and backend."""
        options.setdefault("backend", self.backend)
        if self.smoke:
            options.setdefault("copies", 2)
        return Inputs(self.mesh, shape, chunking, **options)

    def any_rank(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank. Collective with several ranks."""
        return bool(self.maximum([float(condition)])[0])

    def maximum(self, values: list[float]) -> list[float]:
        """Return the elementwise maximum over the ranks. Collective with several ranks."""
        if self.mesh.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.mesh.control_group)
        return tensor.tolist()

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timer(self, **options: Any) -> Timer:
        """Return a timer with this run's rounds and rank reduction."""
        options.setdefault("rounds", 2 if self.smoke else self.args.rounds)
        if self.smoke:
            options.update(max_calls=2)
        if self.mesh.world_size > 1:
            options.update(align=self._align, maximum=self.maximum, any_rank=self.any_rank)
        return Timer(self.device, **options)

    def _align(self) -> None:
        if not hasattr(self, "_token"):
            self._token = torch.zeros(1, device=self.device)
        dist.all_reduce(self._token, group=self.mesh.group)

    def point(self, section: str, config: dict[str, Any], name: str = "point"):
        """Enter one point; see `benchlib.recorded`."""
        return benchlib.recorded(self.recorder, self.budget, section, name, config)

    def checked(self, section: str, config: dict[str, Any], variants: list[Variant]) -> dict[str, tuple[Variant, dict]]:
        """Run every variant once and check it; record those that fail, return the others with their fields."""
        passed = {}
        for variant in variants:
            outcome = self._attempt(variant)
            failed = isinstance(outcome, Exception)
            if self.any_rank(failed):
                error = outcome if failed else RuntimeError("failed on another rank")
                self._failure(section, variant, config, error)
            else:
                passed[variant.name] = (variant, outcome)
        return passed

    def _attempt(self, variant: Variant) -> dict[str, Any] | Exception:
        results: list[Any] = []
        try:
            with watch_plans() as plans:
                names = kernel_names(lambda: results.append(variant.call(0)))
            found = {"kernels": names, **variant.check(results[0])}
            return {**found, "schedule": plans[-1]} if plans else found
        except Exception as error:
            return error

    def _failure(self, section: str, variant: Variant, config: dict[str, Any], error: Exception) -> None:
        # how torch and others say that no kernel of theirs takes the point; anything else is a fault
        refused = isinstance(error, benchlib.Refused)
        refused |= variant.peer and isinstance(error, RuntimeError | NotImplementedError)
        status = "unavailable" if refused else "error"
        if isinstance(error, benchlib.CheckFailed):
            status = "check_failed"
        reason = f"{type(error).__name__}: {error}".strip()[:600]
        self.recorder.write(section, variant.name, {**config, **variant.config}, status, reason=reason)
        if status != "check_failed" and self.device.type == "cuda":
            # raises where the error has broken the context: the point's guard then ends the script
            torch.cuda.synchronize(self.device)

    def measure(
        self,
        section: str,
        config: dict[str, Any],
        variants: list[Variant],
        *,
        ceiling: tuple[Call, int] | None = None,
        timer: Timer | None = None,
        **fields: Any,
    ) -> dict[str, Timing]:
        """Check, time in turn, and record the variants of one point; return the timings of those that ran.

        Args:
            ceiling: a plain read and its bytes, from `CeilingMeter.call`, timed beside them.
            fields: further fields of all the point's records.
        """
        passed = self.checked(section, config, variants)
        calls = {name: variant.call for name, (variant, _) in passed.items()}
        if ceiling is not None:
            calls[CEILING] = ceiling[0]
        results = time_calls(calls, timer or self.timer())
        times = {name: timing for name, timing in results.items() if isinstance(timing, Timing)}
        read = times.pop(CEILING, None)
        floor = (read.median_us, ceiling[1]) if ceiling is not None and read is not None else None
        for name, (variant, found) in passed.items():
            timing = results[name]
            if isinstance(timing, Exception):
                self._failure(section, variant, config, timing)
                continue
            record = bandwidth_fields(timing, variant.num_bytes, floor)
            if variant.flops:
                record["tflops"] = round(variant.flops / timing.median_us / 1e6, 2)
            baseline = self._baseline(variant, passed, times)
            if baseline is not None:
                record["baseline"] = baseline
                record["time_over_baseline"] = round(timing.median_us / times[baseline].median_us, 4)
            record.update(fields, **found, **variant.fields)
            self.recorder.write(section, name, {**config, **variant.config}, backend=variant.backend, **record)
        return times

    @staticmethod
    def _baseline(variant: Variant, passed: dict[str, Any], times: dict[str, Timing]) -> str | None:
        if variant.baseline == BEST_PEER:
            peers = [name for name in times if name in passed and passed[name][0].peer and passed[name][0].rated]
            return min(peers, key=lambda name: times[name].median_us, default=None)
        return variant.baseline if variant.baseline in times else None


@contextmanager
def watch_plans() -> Iterator[list[dict[str, Any]]]:
    """Collect the launch plans that the cost rules of decode and prefill hand out meanwhile."""
    plans: list[dict[str, Any]] = []
    with ExitStack() as undo:
        try:
            from distdec.ops import decode_triton, prefill_triton
        except ImportError:
            yield plans
            return
        for module, name in ((decode_triton, "decode_launch_plan"), (prefill_triton, "prefill_launch_plan")):
            rule = getattr(module, name)
            setattr(module, name, _noting(rule, plans))
            undo.callback(setattr, module, name, rule)
        yield plans


def _noting(rule: Callable[..., Any], plans: list[dict[str, Any]]) -> Callable[..., Any]:
    @wraps(rule)
    def noted(*args: Any, **kwargs: Any) -> Any:
        plan = rule(*args, **kwargs)
        plans.append(plan._asdict())
        return plan

    return noted


def parse(
    description: str, sections: list[str], argv: list[str] | None, *more: Callable[[argparse.ArgumentParser], None]
):
    """Read the arguments that all scripts share, and those that `more` add."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSONL file to append to; without it results are only printed")
    usual = ",".join(name for name in sections if not name.startswith(("sweep", "drafts")))
    parser.add_argument("--sections", default=usual, help=f"of {','.join(sections)}")
    parser.add_argument("--seconds", type=float, default=400.0, help="time budget; what is left is recorded as skipped")
    parser.add_argument("--rounds", type=int, default=15, help="samples per variant")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto", help="ops backend of ours: auto, triton or reference")
    parser.add_argument("--smoke", "--dry-run", action="store_true", help="tiny sizes, to see that the script works")
    for add in more:
        add(parser)
    args = parser.parse_args(argv)
    args.sections = [name for name in args.sections.split(",") if name]
    unknown = [name for name in args.sections if name not in sections]
    if unknown:
        parser.error(f"unknown sections {unknown}; legal: {sections}")
    return args


def open_mesh(args: argparse.Namespace) -> Mesh:
    """Return the mesh of a torchrun start (all ranks on the kvp axis), or a single rank."""
    os.environ.update(NO_MULTICAST)
    # torch warns at each backend that refuses a point; the records say so already
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return Mesh.create(device=args.device if args.device == "cpu" else None)
    return Mesh.single(args.device)


def run_sections(bench: Bench, sections: dict[str, Callable[[Bench], None]]) -> int:
    """Run the chosen sections in order; return the exit status: 0, or 1 where a check failed or an error came."""
    torch.manual_seed(0)
    for name in bench.args.sections:
        if bench.mesh.rank == 0:
            print(f"-- {name}, {bench.budget.left:.0f} s left", flush=True)
        with bench.point(name, {}, "section") as go:
            if go:
                sections[name](bench)
    bench.recorder.close()
    return int(bench.recorder.counts["check_failed"] + bench.recorder.counts["error"] > 0)

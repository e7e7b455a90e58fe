"""Shared parts of the benchmark scripts: time budget, environment and records (bench_timing.py times and checks).

The rules every script follows through these two modules:

- inputs are built, checked against a float32 reference, warmed up, and only then timed: a failed check writes a record
  without any number;
- on a GPU a call is timed as the replay of a CUDA graph of many calls, which walk over several copies of the keys and
  values (1 GiB or more in all), so that no call finds its data in the L2 cache;
- variants that are compared are replayed in turn, round by round, so that clocks and temperature touch all alike;
- with several ranks a sample is the maximum over the ranks of the same replay;
- one JSON line per measurement, flushed at once; a point that fails is a record too, and the run goes on.
"""

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

STATUSES = ("ok", "check_failed", "error", "unavailable", "skipped", "derived")
ALWAYS = ("script", "section", "name", "status", "config", "env")
MEASURED = ("median_us", "p10_us", "p90_us", "iterations", "timer", "ranks", "backend", "kernels")


class CheckFailed(AssertionError):
    """A result differs from the reference: the point gets no number."""


class Refused(RuntimeError):
    """This machine cannot run a variant, and says why: the record says "unavailable"."""


@dataclass
class Budget:
    """Wall-clock seconds a script may use; points that would start later are recorded as skipped.

    `any_rank` makes a condition of one rank that of all, so that ranks never part ways.
    """

    seconds: float
    any_rank: Callable[[bool], bool] = bool
    start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.start)

    def spent(self) -> bool:
        """Say whether any rank's time is up. Collective with several ranks."""
        return self.any_rank(self.left <= 0)


# -- environment ------------------------------------------------------------------------------------------------------


def _command(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, cwd=ROOT, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def environment(device: torch.device) -> dict[str, Any]:
    """Describe what the numbers depend on: GPU, driver, versions, commit.

    A machine without the repository's history takes the commit from DISTDEC_COMMIT ("<hash>" or "<hash>-dirty").
    """
    commit = os.environ.get("DISTDEC_COMMIT", "")
    dirty = commit.endswith("-dirty")
    if not commit:
        commit = _command("git", "rev-parse", "--short=12", "HEAD") or "unknown"
        dirty = bool(_command("git", "status", "--porcelain"))
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    info: dict[str, Any] = {
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "commit": commit.removesuffix("-dirty"),
        "dirty": dirty,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if device.type == "cuda":
        info["gpu"] = torch.cuda.get_device_name(device)
        info["driver"] = _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        info["cuda"] = torch.version.cuda
        info["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    else:
        info["gpu"] = "none"
    return info


# -- records ----------------------------------------------------------------------------------------------------------


def validate(record: dict[str, Any]) -> None:
    """Raise ValueError unless the record is complete, and free of numbers where it was not measured."""
    missing = [key for key in ALWAYS if key not in record]
    if record.get("status") == "ok":
        missing += [key for key in MEASURED if key not in record]
    if missing:
        raise ValueError(f"record lacks {missing}")
    if record["status"] not in STATUSES:
        raise ValueError(f"status {record['status']!r} is none of {STATUSES}")
    if record["status"] == "derived" and not record.get("value"):
        raise ValueError("a derived record needs a value")
    numbers = [key for key in record if key.endswith(("_us", "_ms", "tb_s", "tflops")) or key.startswith("share_")]
    if record["status"] != "ok":
        if numbers:
            raise ValueError(f"a record with status {record['status']!r} carries {numbers}")
        if record["status"] != "derived" and not record.get("reason"):
            raise ValueError("a record without a measurement must give its reason")
        return
    bad = [key for key in numbers if not (isinstance(record[key], int | float) and math.isfinite(record[key]))]
    if bad or record["median_us"] <= 0:
        raise ValueError(f"not finite or not positive: {bad or ['median_us']}")


class Recorder:
    """Appends records to a JSONL file, one flushed line each, and prints a short form. Only rank 0 writes."""

    def __init__(self, script: str, path: str | None, device: torch.device, *, ranks: int = 1, rank: int = 0) -> None:
        self.script, self.ranks, self.rank, self.device = script, ranks, rank, device
        self.env = environment(device)
        self.counts = dict.fromkeys(STATUSES, 0)
        self._file = None
        if path and rank == 0:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed in close()

    def write(self, section: str, name: str, config: dict[str, Any], status: str = "ok", **fields: Any) -> None:
        """Validate, append and flush one record."""
        record = {
            "script": self.script,
            "section": section,
            "name": name,
            "status": status,
            "config": config,
            "ranks": self.ranks,
            **fields,
            "env": self.env,
        }
        validate(record)
        self.counts[status] += 1
        if self.rank != 0:
            return
        if self._file is not None:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        print(short_form(record), flush=True)

    def close(self) -> None:
        if self.rank == 0:
            print("records:", ", ".join(f"{count} {status}" for status, count in self.counts.items()), flush=True)
        if self._file is not None:
            self._file.close()


USUAL = {("num_kv_heads", 8), ("head_dim", 128), ("q_len", 1), ("dtype", "bfloat16"), ("transport", "float32")}


def short_form(record: dict[str, Any]) -> str:
    """One line for the eye, without what is usual; the JSONL holds everything."""
    config = {key: value for key, value in record["config"].items() if not isinstance(value, list | dict)}
    what = " ".join(f"{key}={value}" for key, value in config.items() if (key, value) not in USUAL)
    start = f"{record['section']:<9} {record['name']:<22} {what}:"
    if record["status"] == "derived":
        return f"{start} {record['value']}"
    if record["status"] != "ok":
        return f"{start} {record['status']}: {record['reason'][:160]}"
    shown = (("tb_s", "TB/s"), ("share_of_ceiling", "of ceiling"), ("tflops", "TFLOP/s"), ("error_out", "error"))
    extra = "".join(f", {record[key]:.3g} {label}" for key, label in shown if key in record)
    if "time_over_baseline" in record:
        extra += f", {record['time_over_baseline']:.3f} x {record['baseline']}"
    return f"{start} {record['median_us']:.2f} us{extra}"


@contextmanager
def recorded(recorder: Recorder, budget: Budget, section: str, name: str, config: dict[str, Any]) -> Iterator[bool]:
    """Run one point: yield True, or False when the budget is spent; turn what it raises into a record.

    A CUDA context that an error has broken answers nothing further, so the script then ends with exit status 3.
    """
    if budget.spent():
        recorder.write(section, name, config, "skipped", reason=f"time budget of {budget.seconds:g} s spent")
        yield False
        return
    try:
        yield True
    except CheckFailed as failure:
        recorder.write(section, name, config, "check_failed", reason=str(failure))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip()[:600]
        recorder.write(section, name, config, "error", reason=reason)
        if recorder.device.type == "cuda":
            try:
                torch.cuda.synchronize(recorder.device)
            except Exception as broken:
                recorder.close()
                print(f"the CUDA context is broken: {broken}", file=sys.stderr, flush=True)
                raise SystemExit(3) from error
    finally:
        # after an error that broke the context this fails too
        if recorder.device.type == "cuda":
            with suppress(RuntimeError):
                torch.cuda.empty_cache()

"""Lose one rank of a run that decodes, and measure how long the others take to notice, and all to be gone.

    python3 scripts/check_faults.py --ranks 2
    python3 scripts/check_faults.py --ranks 8 --victim 0 --faults stopped parallel.merge=all_gather

Starts launch/generate.py under torchrun with a tiny random model, and further `key=value` options of its own. Once it
streams, the victim is killed (SIGKILL) or stopped (SIGSTOP, as a hung driver or debugger would). torchrun sees a
killed rank by itself; a stopped one is seen only by ranks that wait for it, after `parallel.timeout_s`, which
--timeout sets, or after the 20 s of a one_shot merge.

Seconds are counted from the fault: `noticed`, until the first of the other ranks has ended, and `gone`, until torchrun
has, which ends the others. The victim is let go when it is noticed, as torchrun would wait 30 s for a stopped process.
Exits with 1 if a fault is not noticed within the timeout and --grace, or if the run then takes longer than --grace to
end, or ends as if nothing had been.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from launch.assets import tiny_model_folder  # noqa: E402

FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
START_S = 300.0
"""Longest start of the run: processes, compilation and captures."""
POLL_S = 0.05
NEW_TOKENS = 200_000
"""More than are decoded before the fault: two layers take some 0.3 ms a step."""


class Outcome(NamedTuple):
    """Seconds from the fault until it was noticed and until all were gone, None if not in time; and what was said."""

    noticed: float | None
    gone: float | None
    status: int | None
    said: str

    @property
    def passed(self) -> bool:
        return self.noticed is not None and self.gone is not None and self.status != 0


def ranks_of(launcher: int) -> dict[int, int]:
    """Return the process of each rank that a torchrun process has started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # processes end while they are looked at
        with contextlib.suppress(OSError):
            if int(_stat(folder)[1]) == launcher:
                entries = (folder / "environ").read_bytes().split(b"\0")
                found.update((int(entry[5:]), int(folder.name)) for entry in entries if entry.startswith(b"RANK="))
    return found


def _stat(folder: Path) -> list[str]:
    # state, parent and so on, behind the name in parentheses
    return (folder / "stat").read_text().rpartition(")")[2].split()


def ended(pid: int) -> bool:
    """Tell whether a process has ended, waited for or not."""
    try:
        return _stat(Path("/proc") / str(pid))[0] in "ZX"
    except OSError:
        return True


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds; False if it does not in time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(POLL_S)
    return True


def errors(log: Path) -> str:
    """Return the first line of a run's errors that names one."""
    lines = log.read_text(errors="replace").splitlines()
    return next((line.strip()[:300] for line in lines if "error:" in line or "Error:" in line), "no error was said")


def lose_a_rank(args: argparse.Namespace, fault: str, folder: Path) -> Outcome:
    """Start a run, do `fault` to the victim and watch the others.

    Raises:
        RuntimeError: the run did not start.
    """
    out, err = folder / f"{fault}.out", folder / f"{fault}.err"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command += [str(ROOT / "launch" / "generate.py"), f"model.path={folder / 'model'}", "prompt=Once upon a time"]
    command += [f"max_new_tokens={NEW_TOKENS}", "ignore_eos=true", f"parallel.timeout_s={args.timeout}"]
    command += [f"hydra.run.dir={folder}", *args.options]
    with out.open("wb") as stdout, err.open("wb") as stderr:
        launcher = subprocess.Popen(command, stdout=stdout, stderr=stderr, cwd=folder)
    ranks: dict[int, int] = {}
    try:
        started = wait_for(lambda: out.stat().st_size > 0 or launcher.poll() is not None, START_S)
        ranks = ranks_of(launcher.pid)
        if not started or launcher.poll() is not None or len(ranks) != args.ranks:
            raise RuntimeError(f"the run did not start: {errors(err)}")
        victim = ranks[args.victim % args.ranks]
        begin = time.monotonic()
        os.kill(victim, FAULTS[fault])
        others = [pid for pid in ranks.values() if pid != victim]
        noticed = wait_for(lambda: any(map(ended, others)), args.timeout + args.grace)
        noticed_s = time.monotonic() - begin
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
        gone = noticed and wait_for(lambda: launcher.poll() is not None and all(map(ended, ranks.values())), args.grace)
        gone_s = time.monotonic() - begin
        return Outcome(noticed_s if noticed else None, gone_s if gone else None, launcher.poll(), errors(err))
    finally:
        for pid in (launcher.pid, *ranks.values()):
            # not one that has been waited for: its number may be another process's by now
            if not ended(pid):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()


def told(seconds: float | None) -> str:
    return "never" if seconds is None else f"after {seconds:.1f} s"


def main(argv: list[str] | None = None) -> int:
    """Run the faults one after the other; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="at least 2")
    parser.add_argument("--victim", type=int, default=-1, help="rank to lose; -1: the last")
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"of {','.join(FAULTS)}")
    parser.add_argument(
        "--timeout", type=float, default=20.0, help="seconds, as parallel.timeout_s; the start needs some too"
    )
    parser.add_argument("--grace", type=float, default=30.0, help="seconds beyond the timeout")
    parser.add_argument("options", nargs="*", help="key=value of launch/generate.py")
    args = parser.parse_args(argv)
    faults = args.faults.split(",")
    if args.ranks < 2 or not set(faults) <= set(FAULTS):
        parser.error(f"got {args.ranks} ranks and the faults {faults}; legal: 2 or more ranks, {list(FAULTS)}")
    failed = False
    with tempfile.TemporaryDirectory(prefix="distdec-faults-") as name:
        folder = Path(name)
        tiny_model_folder(folder / "model", max_position_embeddings=2 * NEW_TOKENS)
        for fault in faults:
            outcome = lose_a_rank(args, fault, folder)
            failed |= not outcome.passed
            print(
                f"{fault}: {'ok' if outcome.passed else 'FAILED'}: rank {args.victim % args.ranks} of {args.ranks}, "
                f"noticed {told(outcome.noticed)}, gone {told(outcome.gone)}, status {outcome.status}; "
                f"first error: {outcome.said}",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

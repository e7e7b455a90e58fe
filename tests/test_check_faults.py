"""A lost rank is noticed in time, and the script that measures it sees processes as they are."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def faults(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return __import__("check_faults")


def test_ranks_are_found_by_their_launcher_and_only_dead_ones_have_ended(faults):
    launcher = subprocess.Popen(["sh", "-c", "RANK=3 sleep 60 & RANK=11 sleep 60 & sleep 60 & wait"])
    ranks = {}
    try:
        assert faults.wait_for(lambda: set(faults.ranks_of(launcher.pid)) == {3, 11}, 10.0)
        ranks = faults.ranks_of(launcher.pid)
        os.kill(ranks[3], signal.SIGSTOP)
        os.kill(ranks[11], signal.SIGKILL)
        assert faults.wait_for(lambda: faults.ended(ranks[11]), 10.0)
        assert not faults.ended(ranks[3])
        assert not faults.wait_for(lambda: faults.ended(ranks[3]), 0.1)
    finally:
        for pid in (launcher.pid, *children(launcher.pid)):
            os.kill(pid, signal.SIGKILL)
        launcher.wait()


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


@pytest.mark.parametrize(
    ("noticed", "gone", "status", "passed"),
    [(1.0, 2.0, 1, True), (None, None, None, False), (1.0, None, None, False), (1.0, 2.0, 0, False)],
)
def test_a_fault_that_is_not_noticed_or_not_told_fails(faults, monkeypatch, capsys, noticed, gone, status, passed):
    outcome = faults.Outcome(noticed, gone, status, "RuntimeError: why")
    monkeypatch.setattr(faults, "lose_a_rank", lambda args, fault, folder: outcome)
    monkeypatch.setattr(faults, "tiny_model_folder", lambda folder, **sizes: folder)
    assert faults.main(["--ranks", "3", "--faults", "stopped"]) == int(not passed)
    verdict = "ok" if passed else "FAILED"
    assert (
        f"stopped: {verdict}: rank 2 of 3, noticed {'after 1.0 s' if noticed else 'never'}" in capsys.readouterr().out
    )


@pytest.mark.parametrize("arguments", [["--ranks", "1"], ["--faults", "killed,lost"]])
def test_what_cannot_be_checked_is_refused(faults, capsys, arguments):
    with pytest.raises(SystemExit):
        faults.main(arguments)
    assert "legal: 2 or more ranks" in capsys.readouterr().err


@pytest.mark.dist
@pytest.mark.slow
def test_a_killed_rank_is_noticed_at_once_and_a_stopped_one_after_the_timeout(faults, capsys):
    assert faults.main(["--ranks", "2", "--timeout", "20"]) == 0
    killed, stopped = [float(s) for s in re.findall(r"noticed after ([0-9.]+) s", capsys.readouterr().out)]
    assert killed < 10
    assert 15 < stopped < 30

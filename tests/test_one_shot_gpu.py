"""The merges on real GPUs: `scripts/check_one_shot.py` under torchrun, one check a test."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "check_one_shot.py"

# the times are for people to read; everything else passes or fails
CHECKS = ("modes", "forms", "rows", "finite", "epochs", "delays", "replays", "lost", "sum", "sum_replays", "sum_lost")


@pytest.mark.gpu
@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("check", CHECKS)
def test_merges_on_two_gpus(check):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run([*command, "--only", check], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{check}: ok" in done.stdout

"""The script that compares logits with transformers passes a right engine and fails a wrong one."""

import json
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
SMALL = ["--smoke", "--device", "cpu", "--prompt-len", "150", "--slice", "64", "--tokens", "3"]


@pytest.fixture
def check_logits(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return __import__("check_logits")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_engine_is_as_close_to_the_truth_as_transformers(check_logits, capsys, dtype):
    assert check_logits.main([*SMALL, "--dtype", dtype, "--ways", "eager", "graphs"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["way"] for line in lines] == ["eager", "graphs"]
    for line in lines:
        assert 0.0 < line["apart"] < (1e-5 if dtype == "float32" else 0.05)
        assert dtype == "bfloat16" or line["equal_tokens"] == line["tokens"] == 3


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_logits_that_are_a_little_off_or_not_finite_fail(check_logits, monkeypatch, wrong):
    def off(args, way, mesh, ids):
        logits, tokens = of_engine(args, way, mesh, ids)
        return torch.cat([logits[:1], logits[1:] * wrong]), tokens

    of_engine = check_logits.of_engine
    monkeypatch.setattr(check_logits, "of_engine", off)
    assert check_logits.main([*SMALL, "--dtype", "float32", "--ways", "eager"]) == 1

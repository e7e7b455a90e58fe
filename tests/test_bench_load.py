"""The engine's benchmark under load runs on the CPU, every workload, on one rank and on two, and its figures add up."""

import argparse
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
LATENCIES = [f"{part}_{name}_ms" for name in ("ttft", "tpot", "itl") for part in ("mean", "median", "p99")]


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def run_on_rank(arguments):
    sys.path.insert(0, str(SCRIPTS))
    return __import__("bench_load").main(["--smoke", "--device", "cpu", *arguments])


def check(record):
    import benchlib

    benchlib.validate(record)
    assert record["status"] == "derived", record
    config, value = record["config"], record["value"]
    assert value["completed"] == config["requests"]
    assert value["output_throughput"] * value["duration_s"] == pytest.approx(config["output_tokens"], rel=0.02)
    assert all(value[name] > 0 for name in LATENCIES)
    assert value["mean_ttft_ms"] <= value["p99_ttft_ms"] + 1e-9
    assert set(value["host_us"]) == {
        "plan_agree",
        "reserve_fill",
        "launch",
        "sample",
        "commit",
        "schedule_of_plan_agree",
    }
    assert 0 < value["decode_steps"] < value["steps"]
    assert 0 < value["peak_kv_use"] <= 1


def test_every_workload_runs_on_one_rank(tmp_path):
    out = tmp_path / "records.jsonl"
    assert run_on_rank(["--out", str(out)]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["section"] for record in records] == ["fixed", "poisson", "sharegpt"]
    for record in records:
        check(record)
    assert records[0]["value"]["prefix_hit_rate"] == 0


def test_drafts_are_counted(tmp_path):
    out = tmp_path / "records.jsonl"
    assert run_on_rank(["--out", str(out), "--sections", "fixed", "--layouts", "single", "--drafts", "3"]) == 0
    [record] = [json.loads(line) for line in out.read_text().splitlines()]
    check(record)
    assert record["config"]["drafts"] == 3
    assert record["value"]["drafted_tokens"] > 0
    assert 0 <= record["value"]["draft_acceptance_rate"] <= 1


@pytest.mark.dist
def test_layouts_and_graphs_on_two_ranks(tmp_path, ranks):
    out = tmp_path / "records.jsonl"
    arguments = ["--out", str(out), "--sections", "fixed", "--graphs", "on"]
    assert ranks(2).run(run_on_rank, arguments, timeout_s=120) == [0, 0]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["name"] for record in records] == ["single", "kvp2", "tp2"]
    for record in records:
        check(record)


def test_workloads_have_the_shapes_they_promise():
    from bench_workloads import WORKLOADS

    args = argparse.Namespace(num_prompts=300, input_len=50, output_len=7, rate=20.0, smoke=False)
    fixed, poisson, sharegpt = (WORKLOADS[name](args, 97) for name in WORKLOADS)
    assert {(a.at_s, len(a.prompt), a.new) for a in fixed} == {(0.0, 50, 7)}
    assert poisson[-1].at_s == pytest.approx(300 / 20, rel=0.2)
    lengths = sorted(len(a.prompt) for a in sharegpt)
    assert lengths[150] == pytest.approx(100, rel=0.3)
    assert lengths[-1] > 600


def test_latencies_are_named_as_vllm_names_them():
    from bench_load import spread

    assert spread("itl", [1.0, 2.0, 6.0]) == {"mean_itl_ms": 3.0, "median_itl_ms": 2.0, "p99_itl_ms": 5.92}
    assert spread("itl", []) == {}

"""The engine's benchmark runs on the CPU, every section, on one rank and on two, and its figures add up."""

import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
# keys and values of 2 layers, 8 heads of 16, float32
TOKEN_BYTES = 2 * 2 * 8 * 16 * 4


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def run_on_rank(arguments):
    sys.path.insert(0, str(SCRIPTS))
    return __import__("bench_engine").main(["--dry-run", "--device", "cpu", *arguments])


def read(path):
    import benchlib

    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        benchlib.validate(record)
        assert record["status"] in ("ok", "unavailable"), record
        assert {"commit", "command", "gpu"} <= set(record["env"])
        assert record["status"] != "ok" or record["model_shape"]["num_hidden_layers"] == 2
    return records


def named(records, section, name):
    [record] = [r for r in records if (r["section"], r["name"]) == (section, name)]
    return record


def test_steps_of_wrong_drafts_are_set_against_steps_without(tmp_path):
    out = tmp_path / "records.jsonl"
    arguments = ["--out", str(out), "--sections", "drafts", "--graphs", "on"]
    assert run_on_rank(arguments) == 0
    assert {record["status"] for record in read(out)} == {"unavailable"}
    out.unlink()
    assert run_on_rank([*arguments, "--option", "scheduler.num_draft_tokens=3"]) == 0
    records = read(out)
    assert [(r["name"], r["config"]["context"]) for r in records] == [
        (f"{count} drafts", context) for context in (40, 90) for count in (0, 3)
    ]
    for plain, drafted in (records[:2], records[2:]):
        assert plain["iterations"] == drafted["iterations"] == 4
        assert drafted["time_over_baseline"] == pytest.approx(drafted["median_us"] / plain["median_us"], rel=0.01)
        assert plain["value"] == {"drafted_tokens": 0, "accepted_tokens": 0}
        # each of the steps, but where the end is nearer than three tokens
        assert 3 * 4 < drafted["value"]["drafted_tokens"] <= 3 * (8 + 4 + 1)
        assert drafted["value"]["accepted_tokens"] == 0


def test_every_section_runs_on_one_rank(tmp_path):
    out = tmp_path / "records.jsonl"
    sections = "tpot,host,prefill,prefix,itl,generate,sweep,batch64"
    assert run_on_rank(["--out", str(out), "--sections", sections, "--peers", "dynamic,static"]) == 0
    records = read(out)
    assert {record["section"] for record in records} == set(sections.split(","))

    short, long = [record for record in records if record["section"] == "tpot"]
    # of 4 steps the last holds 40 tokens, the mean is 38.5, and one more where the next step is under way
    assert 38.5 * TOKEN_BYTES <= short["kv_bytes"] + 1 <= 39.5 * TOKEN_BYTES + 1
    assert long["kv_bytes"] - short["kv_bytes"] == 50 * TOKEN_BYTES
    layer = 64 * 16 * (32 + 8) * 2 + 3 * 64 * 96 + 2 * 64
    assert short["weight_bytes"] == 4 * (2 * layer + 64 + 97 * 64)
    for record in (short, long):
        floor = (record["weight_bytes"] + record["kv_bytes"]) / record["ceiling_tb_s"] * 1e-9
        assert record["floor_ms"] == pytest.approx(floor, rel=0.02)
        assert record["time_over_baseline"] == pytest.approx(record["median_us"] / 1e3 / floor, rel=0.02)
        assert record["config"]["fill"] == "random"
        assert record["iterations"] == 4

    phases = named(records, "host", "step")["value"]["phases_us"]
    assert {"plan_agree", "schedule_of_plan_agree", "reserve_fill", "launch", "device_wait", "sample", "commit"} == set(
        phases
    )
    prompt = named(records, "prefill", "prompt")
    assert prompt["value"]["steps"] == math.ceil(150 / 32) + 1
    assert prompt["value"]["tokens_per_s"] == pytest.approx(150e6 / prompt["median_us"], rel=0.01)
    assert named(records, "prefix", "second prompt")["time_over_baseline"] < 1

    among = named(records, "itl", "decode rows")
    assert among["value"]["itl_p50_ms"] == pytest.approx(among["median_us"] / 1e3, rel=0.5)
    assert among["value"]["ttft_p50_ms"] > among["value"]["itl_p50_ms"]
    assert 1 <= among["value"]["least_slice"] <= 32
    assert among["value"]["steps_after_rows"] == 0
    for cache in ("dynamic", "static"):
        # float32: the same weights give the same tokens
        assert named(records, "generate", f"transformers {cache}")["equal_tokens"] == 9
    points = [
        (r["config"]["prefill_slice"], r["config"]["max_pending_prefills"]) for r in records if r["section"] == "sweep"
    ]
    assert points == [(16, 1), (16, 2), (32, 1), (32, 2)]
    assert named(records, "batch64", "no split")["status"] == "unavailable"


@pytest.mark.dist
def test_layouts_share_the_ranks(tmp_path, ranks):
    out = tmp_path / "records.jsonl"
    arguments = ["--out", str(out), "--sections", "tpot,itl", "--rows", "2", "--deadline", "0"]
    arguments += ["--layouts", "kvp2,tp2"]
    assert ranks(2).run(run_on_rank, arguments, timeout_s=120) == [0, 0]
    records = [record for record in read(out) if record["status"] == "ok"]
    assert {record["config"]["layout"] for record in records} == {"kvp2", "tp2"}
    assert {record["section"] for record in records} == {"tpot", "itl"}
    sharded, heads = [r for r in records if r["section"] == "tpot" and r["config"]["context"] == 90]
    assert sharded["config"]["batch"] == heads["config"]["batch"] == 2
    # keys and values of both rows, each of 90 tokens at the end: half of the tokens here, half of the heads there
    assert heads["kv_bytes"] > 2 * 87 * TOKEN_BYTES / 2
    assert sharded["weight_bytes"] > heads["weight_bytes"], "the projections of q, k and v are not split along kvp"


@pytest.mark.dist
def test_a_layout_that_the_heads_do_not_allow_is_recorded_with_its_reason(tmp_path, ranks):
    out = tmp_path / "records.jsonl"
    arguments = ["--out", str(out), "--sections", "tpot,host", "--model", "one-kv-head", "--layouts", "tp2"]
    assert ranks(2).run(run_on_rank, arguments, timeout_s=120) == [0, 0]
    records = read(out)
    assert [(record["section"], record["status"]) for record in records] == [
        (n, "unavailable") for n in ("tpot", "host")
    ]
    assert all("tp = 2 does not divide the 1 KV heads" in record["reason"] for record in records)


def test_one_program_a_row_and_head_gives_the_same_tokens(monkeypatch):
    import bench_engine
    from bench_run import Bench, open_mesh, parse
    from bench_session import Layout, Need, Session, drive, unsplit

    args = parse(
        "", ["tpot"], ["--smoke", "--model", "tiny", "--device", "cpu", "--backend", "triton"], bench_engine.arguments
    )
    # the names of kernels, which the interpreter takes a minute for
    monkeypatch.setattr(Session, "_request", lambda session: None)
    session = Session(Bench("bench_engine", args, open_mesh(args)), Layout("single", 1, 1), Need(2, 2048, 16), args)

    def run():
        torch.manual_seed(1)
        for pool in (session.runner.cache.pool.k, session.runner.cache.pool.v):
            pool.normal_()
        engine = session.engine()
        session.start_rows(engine, [140, 20], 1)
        tokens = {}
        drive(engine, lambda _, r: [tokens.setdefault(e.request_id, []).append(e.token_id) for e in r.events])
        [schedule] = {(t.schedule.num_spans,) for t in last.decode_tables.values()}
        return tokens, schedule[0]

    fill = session.runner.cache.buffers.fill

    def keep(*args, **kwargs):
        nonlocal last
        last = fill(*args, **kwargs)
        return last

    last = None
    session.runner.cache.buffers.fill = keep
    tokens, spans = run()
    unsplit(session.runner, session.need)
    whole, few = run()
    assert whole == tokens
    assert few == 2 * 2 != spans
    session.close()


def test_steps_after_the_rows_have_ended_are_not_between_their_tokens(tmp_path, monkeypatch):
    import bench_prompts

    # two steps after the prompt has come, which takes five: one is under way already and holds nothing of it
    monkeypatch.setattr(bench_prompts, "itl_tokens", lambda args: bench_prompts.SETTLE + 2)
    out = tmp_path / "records.jsonl"
    assert run_on_rank(["--out", str(out), "--sections", "itl", "--deadline", "0"]) == 0
    value = named(read(out), "itl", "decode rows")["value"]
    assert (value["steps"], value["steps_after_rows"]) == (2, 4)
    assert value["least_slice"] == value["median_slice"]


def test_options_change_the_config_in_their_own_type():
    from bench_session import override

    from distdec.config import Config

    config = override(override(Config(), "scheduler.reserve_tokens=7"), "cache.prefix_caching=false")
    assert (config.scheduler.reserve_tokens, config.cache.prefix_caching) == (7, False)
    for bad in ("scheduler.none=1", "scheduler.max_rows", "cache.weights=1"):
        with pytest.raises(ValueError, match=r"section\.key=value"):
            override(Config(), bad)


def test_the_operations_of_a_prompt_are_those_of_its_products():
    from bench_prompts import prefill_flops
    from bench_weights import MODELS

    # 2 layers: q, o 64 x 64, k, v 64 x 16, three of 64 x 96; 8 heads of 8 over 1 + 2 + 3 keys, 4 operations each
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 96)
    assert prefill_flops(MODELS["tiny"], 3) == 2 * weights * 3 + 2 * 64 * 97 + 4 * 2 * 8 * 8 * (1 + 2 + 3)


def test_a_run_over_its_time_is_stopped():
    from bench_generate import limit

    with pytest.raises(TimeoutError, match=r"not done in 0.05 s"), limit(0.05):
        time.sleep(5)
    with limit(0.05):
        pass
    time.sleep(0.1)


def engine_record(section, name, config, **fields):
    env = {"date": "2026-01-01", "command": "bench_engine.py", "gpu": "some gpu", "commit": "abc", "dirty": False}
    point = {"script": "bench_engine", "section": section, "name": name, "status": "ok", "ranks": 1}
    return {**point, "config": {"model": "llama-3-8b", "layout": "single", **config}, "env": env, **fields}


def test_the_report_holds_the_figures_of_the_engine(tmp_path):
    import plot_bench

    records = [
        engine_record(
            "tpot", "decode step", {"batch": batch, "context": context}, median_us=us, time_over_baseline=ratio
        )
        for batch, context, us, ratio in ((1, 8192, 4e3, 1.16), (1, 131072, 7.4e3, 1.05), (32, 8192, 9e3, 1.3))
    ]
    records += [
        engine_record("host", "step", {"batch": 64}, median_us=900.0, value={"phases_us": {"commit": 55.5}}),
    ]
    for size, pending, first in ((512, 1, 300.0), (512, 4, 400.0), (2048, 1, 100.0)):
        value = {"itl_p50_ms": size / 64, "itl_p99_ms": size / 32, "ttft_p50_ms": first}
        config = {"prefill_slice": size, "max_pending_prefills": pending}
        records.append(engine_record("sweep", "decode rows", config, median_us=1.0, value=value))
    path = tmp_path / "engine.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert plot_bench.main([str(path), "--into", str(tmp_path / "report")]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| llama-3-8b | single | 1 | 8192 | - | 1.16 |" in text
    assert "| llama-3-8b | single | 32 | 8192 | - | 1.3 |" in text
    assert "| host | step | single | batch 64 | commit | 55.5 |" in text
    assert "| sweep | decode rows | single | prefill_slice 512, max_pending_prefills 4 | ttft_p50_ms | 400.0 |" in text
    assert plot_bench.tpot_series(records) == {
        "llama-3-8b, single, batch 1": [(8192.0, 1.16), (131072.0, 1.05)],
        "llama-3-8b, single, batch 32": [(8192.0, 1.3)],
    }
    lines = plot_bench.first_token_series(records)
    assert lines == {
        "ttft_p50_ms, 1 prompts under way": [(512.0, 300.0), (2048.0, 100.0)],
        "ttft_p50_ms, 4 prompts under way": [(512.0, 400.0)],
    }
    assert plot_bench.between_series(records)["itl_p99_ms, 4 prompts under way"] == [(512.0, 16.0)]

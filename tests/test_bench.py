"""The benchmark scripts run on the CPU in their smoke mode, write whole records, and no number after a failed check."""

import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def run(script: str, tmp_path: Path, sections: str, *more: str) -> tuple[int, list[dict]]:
    module = __import__(script)
    out = tmp_path / "records.jsonl"
    status = module.main(["--smoke", "--device", "cpu", "--out", str(out), "--sections", sections, *more])
    return status, [json.loads(line) for line in out.read_text().splitlines()]


def check_whole(records: list[dict], sections: set[str]) -> None:
    import benchlib

    assert {record["section"] for record in records} == sections
    for record in records:
        benchlib.validate(record)
        assert record["status"] == "ok", record["reason"]
        assert record["median_us"] > 0
        assert record["p10_us"] <= record["median_us"] <= record["p90_us"]
        assert {"torch", "commit", "dirty", "command", "gpu"} <= set(record["env"])


@pytest.mark.parametrize(
    "sections",
    [
        "grid,groups,dims,qlen",
        "ragged,splits,nosplit,gather,host",
        "chunks,sweep,deterministic,parts",
        "prefill,sweep_prefill",
    ],
)
def test_bench_ops_writes_whole_records(tmp_path, sections):
    status, records = run("bench_ops", tmp_path, sections)
    assert status == 0
    check_whole(records, set(sections.split(",")))
    decode = [record for record in records if record["name"].startswith("decode") and record["section"] != "host"]
    for record in decode:
        assert record["backend"] == "reference"
        assert record["error_out"] < 2e-2
        assert sum(record["chunks"].values()) > 0


def test_bench_compare_relates_ours_to_the_fastest_peer(tmp_path):
    status, records = run("bench_compare", tmp_path, "grid")
    assert status == 0
    check_whole(records, {"grid"})
    ours = [record for record in records if record["name"] in ("decode", "attention layer")]
    assert len(ours) == 4
    for record in ours:
        assert record["baseline"] == "sdpa math"
        peer = next(
            r for r in records if r["name"] == "sdpa math" and r["config"]["batch"] == record["config"]["batch"]
        )
        assert record["time_over_baseline"] == pytest.approx(record["median_us"] / peer["median_us"], abs=1e-3)


def test_a_wrong_result_gets_no_number(tmp_path, monkeypatch):
    from distdec.ops import decode
    from distdec.ops.partial import Partial

    honest = decode.decode

    def wrong(*args, **kwargs):
        out, lse = honest(*args, **kwargs)
        out[-1, -1] *= 1.1
        return Partial(out, lse)

    monkeypatch.setattr(decode, "decode", wrong)
    status, records = run("bench_ops", tmp_path, "ragged")
    assert status == 1
    assert [record["status"] for record in records] == ["check_failed"] * 4
    for record in records:
        assert "relative error" in record["reason"]
        assert not [key for key in record if key.endswith("_us") or key in ("tb_s", "share_of_ceiling")]


def test_a_base_2_lse_gets_no_number(tmp_path, monkeypatch):
    from distdec.ops import decode
    from distdec.ops.partial import Partial

    honest = decode.decode

    def wrong(*args, **kwargs):
        out, lse = honest(*args, **kwargs)
        return Partial(out, lse / 0.6931471805599453)

    monkeypatch.setattr(decode, "decode", wrong)
    status, records = run("bench_ops", tmp_path, "ragged")
    assert status == 1
    assert all(record["status"] == "check_failed" and "LSE" in record["reason"] for record in records)


def test_a_failing_point_is_recorded_and_the_run_goes_on(tmp_path, monkeypatch):
    import bench_inputs

    honest = bench_inputs.churn
    calls = []

    def once_broken(*args):
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError("no room")
        honest(*args)

    monkeypatch.setattr(bench_inputs, "churn", once_broken)
    status, records = run("bench_ops", tmp_path, "ragged")
    assert status == 1
    assert [record["status"] for record in records] == ["error", "ok", "ok"]
    assert records[0]["reason"] == "MemoryError: no room"


def test_a_spent_budget_skips_points(tmp_path):
    status, records = run("bench_ops", tmp_path, "ragged", "--seconds", "0")
    assert status == 0
    assert [record["status"] for record in records] == ["skipped"]


def test_a_record_with_a_number_but_no_measurement_is_refused():
    import benchlib

    whole = {"script": "s", "section": "a", "name": "n", "status": "ok", "config": {}, "env": {}, "ranks": 1}
    measured = {"median_us": 2.0, "p10_us": 1.0, "p90_us": 3.0, "iterations": 9, "timer": "graph"}
    whole |= {**measured, "backend": "triton", "kernels": ["decode_kernel"]}
    benchlib.validate(whole)
    for change in (
        {"status": "check_failed", "reason": "off"},
        {"median_us": float("nan")},
        {"median_us": 0.0},
        {"status": "fine"},
    ):
        with pytest.raises(ValueError):
            benchlib.validate({**whole, **change})
    for key in ("kernels", "median_us", "env"):
        with pytest.raises(ValueError, match=key):
            benchlib.validate({name: value for name, value in whole.items() if name != key})


def test_random_traffic_scatters_the_chunks_and_leaves_only_the_rows():
    import random

    import bench_inputs

    from distdec.cache.kv_cache import KVCache
    from distdec.cache.layout import CacheLayout

    kv = KVCache(CacheLayout(num_frames=(80,), min_chunk=128, max_chunk=1024))
    lengths = {0: 3000, 1: 17, 2: 1500}
    bench_inputs.churn(kv, lengths, random.Random(1))
    assert {seq: kv.length(seq) for seq in kv.sequences()} == lengths
    kv.check_integrity()
    table = kv.local_view_table(0, 0)
    assert (table[1:, 0] != table[:-1, 0] + table[:-1, 1]).any(), "the first row lies in one run"


def test_the_reference_row_is_causal_attention():
    import bench_timing

    torch.manual_seed(3)
    q, k, v = torch.randn(3, 4, 8), torch.randn(2, 50, 8), torch.randn(2, 50, 8)
    positions = torch.tensor([9, 0, 49])
    out, lse = bench_timing.reference_row(q, k, v, positions, 0.3)
    scores = torch.einsum("thd,hsd->ths", q, k.repeat_interleave(2, 0)).double() * 0.3
    scores.masked_fill_(torch.arange(50) > positions[:, None, None], float("-inf"))
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    want = torch.einsum("ths,hsd->thd", scores.softmax(-1), v.repeat_interleave(2, 0).double())
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def run_on_rank(script: str, arguments: list[str]) -> int:
    sys.path.insert(0, str(SCRIPTS))
    return __import__(script).main(["--smoke", "--device", "cpu", *arguments])


@pytest.mark.dist
def test_bench_merge_measures_every_mode_on_real_ranks(tmp_path, ranks):
    out = tmp_path / "records.jsonl"
    arguments = ["--out", str(out), "--sections", "graph,floor"]
    assert ranks(2).run(run_on_rank, "bench_merge", arguments) == [0, 0]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    names = {record["name"] for record in records if record["section"] == "graph" and record["status"] == "ok"}
    assert {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "auto"} <= names
    assert {"two all-reduces", "three all-reduces (tree attention)", "packed all-to-all"} <= names
    assert "all-gather LSE + reduce-scatter" in names
    for record in records:
        # a machine without symmetric memory says so; everything else must have run
        assert record["status"] == "ok" or "one_shot" in record["name"], record
        assert record["ranks"] == 2


@pytest.mark.dist
def test_bench_attention_relates_each_overlap_to_none(tmp_path, ranks):
    out = tmp_path / "records.jsonl"
    arguments = ["--out", str(out), "--sections", "overlap", "--modes", "all_gather"]
    assert ranks(2).run(run_on_rank, "bench_attention", arguments) == [0, 0]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    check_whole(records, {"overlap"})
    assert [(record["name"], record["config"]["overlap"]) for record in records] == [
        *((f"{name} {value}", value) for name in ("1 GPU", "2 GPUs") for value in ("none", "store")),
        *((f"2 GPUs {value}, product", value) for value in ("store", "both")),
    ]
    related = [record.get("baseline") for record in records]
    assert related == [None, "1 GPU none", None, "2 GPUs none", None, "2 GPUs store, product"]
    assert records[3]["time_over_baseline"] == pytest.approx(
        records[3]["median_us"] / records[2]["median_us"], abs=1e-3
    )


@pytest.mark.dist
def test_bench_attention_relates_the_sharded_layer_to_one_rank(tmp_path, ranks):
    out = tmp_path / "records.jsonl"
    arguments = ["--out", str(out), "--sections", "layer,graphs", "--modes", "all_gather,reduce_scatter"]
    assert ranks(3).run(run_on_rank, "bench_attention", arguments) == [0, 0, 0]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    layer = {record["name"]: record for record in records if record["section"] == "layer"}
    assert set(layer) == {"1 GPU", "3 GPUs all_gather", "3 GPUs reduce_scatter"}
    assert layer["1 GPU"]["local_tokens"] == 470
    assert layer["3 GPUs all_gather"]["local_tokens"] < 470
    assert layer["3 GPUs all_gather"]["baseline"] == "1 GPU"
    replayed = [record for record in records if record["section"] == "graphs"]
    assert [record["value"]["same_bits"] for record in replayed] == [True] * 4
    assert [record["config"]["overlap"] for record in replayed] == ["none", "store"] * 2


def test_bench_attention_runs_on_one_rank(tmp_path):
    status, records = run("bench_attention", tmp_path, "layer,graphs")
    assert status == 0
    assert [(record["name"], record["status"]) for record in records] == [("1 GPU", "ok")] + [("auto", "derived")] * 2


def test_a_step_with_other_bits_fails_the_graph_section(tmp_path, monkeypatch):
    import bench_graphs

    honest, calls = bench_graphs.DistributedAttention.__call__, []

    def drifting(self, *args, **kwargs):
        merged = honest(self, *args, **kwargs)
        calls.append(1)
        return merged._replace(out=merged.out * 1.01) if len(calls) == 8 else merged

    monkeypatch.setattr(bench_graphs.DistributedAttention, "__call__", drifting)
    status, records = run("bench_attention", tmp_path, "graphs")
    assert status == 1
    assert [record["status"] for record in records] == ["check_failed"]
    assert "step 3" in records[0]["reason"]


def test_break_even_is_where_the_gain_stays_positive():
    from bench_attention import crossing

    assert crossing([(4096, -2.0), (8192, 2.0)]) == "6144 tokens"
    assert crossing([(1, 0.5), (2, -1.0), (4, 1.0), (8, 3.0)]) == "3 tokens"
    assert crossing([(4096, -2.0), (8192, -1.0)]) == "above 8192 tokens"
    assert crossing([(4096, 2.0), (8192, 1.0)]) == "at most 4096 tokens"
    assert crossing([]) == "not measured"


def test_the_read_ceiling_reads_every_word_once():
    import ceiling_triton

    def pool():
        # small integers: the interpreter's sum of int32 does not wrap around
        return torch.randint(0, 1000, (7000, 8), dtype=torch.int32).view(torch.bfloat16).view(7000, 2, 8)

    ceiling = ceiling_triton.Ceiling([(pool(), pool()) for _ in range(2)], 6000 * 64)
    for config in ceiling_triton.CONFIGS[:3]:
        ceiling.check(config)
    ceiling.num_words -= 128
    with pytest.raises(AssertionError, match="summed to"):
        ceiling.check(ceiling_triton.CONFIGS[0])


def grid_record(batch: int, context: int, ratio: float, share: float, date: str = "2026-01-01") -> dict:
    megabytes = batch * context // 256
    config = {"batch": batch, "context": context, "num_q_heads": 32, "kv_mb": megabytes}
    env = {"date": date, "command": "bench_compare.py", "gpu": "some gpu", "commit": "abc", "dirty": False}
    numbers = {"median_us": 100.0 * ratio, "share_of_ceiling": share, "time_over_baseline": ratio}
    peer = {"baseline": "sdpa cudnn", "ranks": 1}
    point = {"script": "bench_compare", "section": "grid", "name": "decode", "status": "ok"}
    return {**point, "config": config, "env": env, **numbers, **peer}


def test_the_report_takes_the_worst_of_the_latest_records(tmp_path):
    import plot_bench

    old = grid_record(1, 131072, 1.4, 0.5)
    new = [grid_record(1, 131072, 0.97, 0.96), grid_record(8, 131072, 1.02, 0.99)]
    files = [tmp_path / "old.jsonl", tmp_path / "new.jsonl"]
    for path, records in zip(files, ([old], new), strict=True):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert plot_bench.main([*map(str, files), "--into", str(tmp_path / "report")]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| decode / fastest peer, uniform grid | <= 1 | 1.02 | 2 | NO |" in text
    assert "| decode, share of ceiling, 512 MB up | >= 0.95 | 0.96 | 2 | yes |" in text
    assert "| decode, ragged16, share of ceiling | >= 0.9 | - | 0 | not measured |" in text
    assert "| 32 | 1 | 131072 | 512 | decode | 97.0 | 0.96 | sdpa cudnn | 0.97 |" in text
    assert "140" not in text, "a record that a later one replaces was quoted"


def test_records_carry_the_plan_of_the_launch():
    import bench_run

    from distdec.ops.decode_triton import decode
    from distdec.ops.tables import KVTables

    def ints(values):
        return torch.tensor(values, dtype=torch.int32)

    tables = KVTables(ints([[0, 40, 0, 0]]), ints([[0, 1]]), ints([0, 1]))
    k, v = torch.randn(2, 40, 1, 16).unbind(0)
    with bench_run.watch_plans() as plans:
        decode(torch.randn(1, 2, 16), k, v, tables, ints([39]), 1, scale=0.25)
    assert len(plans) == 1
    assert {"num_spans", "block_n", "num_warps", "num_stages"} <= set(plans[0])
    with bench_run.watch_plans() as later:
        pass
    assert later == []

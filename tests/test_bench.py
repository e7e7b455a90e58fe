"""The benchmark scripts run on the CPU in their smoke mode, write whole records, and no number after a failed check."""

import json
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
    ["grid,groups,dims,qlen", "ragged,splits,nosplit,gather,host", "chunks,sweep", "prefill"],
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
        peer = next(r for r in records if r["name"] == "sdpa math" and r["config"] == record["config"])
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

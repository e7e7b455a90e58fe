"""The whole model's benchmark runs on the CPU, in every layout of its ranks, and counts each layout by itself."""

import json

import pytest
from test_bench import run, run_on_rank, scripts_on_path  # noqa: F401 (a fixture for all tests here)


def run_as_torchrun(arguments: list[str]) -> int:
    import torch.distributed as dist

    # what transformers reads of a torchrun start
    told = {"WORLD_SIZE": dist.get_world_size(), "RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, str(value))
        return run_on_rank("bench_model", arguments)


def model_records(ranks, tmp_path, *arguments):
    out = tmp_path / "records.jsonl"
    status = ranks(2).run(run_as_torchrun, ["--out", str(out), *arguments], timeout_s=120)
    return status, [json.loads(line) for line in out.read_text().splitlines()]


# of one KV head and token in the smoke shape: two layers x (K and V) x 16 x float32
HEAD_BYTES = 2 * 2 * 16 * 4


@pytest.mark.dist
def test_bench_model_records_what_each_layout_holds_by_itself(ranks, tmp_path):
    status, records = model_records(ranks, tmp_path, "--model", "four-kv-heads")
    assert status == [0, 0]
    value = {record["name"]: record["value"] for record in records}
    assert set(value) == {f"{name} {how}" for name in ("single", "kvp2", "tp2") for how in ("eager", "graph")}
    for record in records:
        assert record["status"] == "derived"
        assert record["value"]["step_ms"] > 0
        assert record["value"]["peak_bytes"] is None, "there is no such count on the CPU"
    whole, kvp2, tp2 = (value[f"{name} eager"] for name in ("single", "kvp2", "tp2"))
    # 300 tokens and those of the steps, in whole chunks
    assert whole["kv_bytes"] >= 300 * 4 * HEAD_BYTES
    assert 2 * tp2["kv_bytes"] == whole["kv_bytes"]
    assert kvp2["kv_bytes"] < 0.8 * whole["kv_bytes"]
    assert tp2["weights_bytes"] < kvp2["weights_bytes"] < 0.8 * whole["weights_bytes"]


@pytest.mark.dist
def test_bench_model_runs_one_kv_head_on_two_ranks_and_records_how_transformers_fails(ranks, tmp_path):
    sections = ("--sections", "decode,transformers")
    status, records = model_records(ranks, tmp_path, "--model", "one-kv-head", *sections)
    assert status == [0, 0]
    found = {(record["section"], record["config"]["layout"]): record for record in records}
    assert found["decode", "kvp2"]["status"] == "derived"
    assert found["decode", "tp2"]["status"] == "unavailable"
    assert "tp = 2 does not divide the 1 KV heads" in found["decode", "tp2"]["reason"]
    assert found["transformers", "transformers tp2"]["status"] == "unavailable"
    assert "is invalid for input of size" in found["transformers", "transformers tp2"]["reason"]


@pytest.mark.dist
def test_bench_model_times_transformers_where_the_heads_divide(ranks, tmp_path):
    status, records = model_records(ranks, tmp_path, "--sections", "transformers")
    assert status == [0, 0]
    [record] = records
    assert record["status"] == "derived", record
    value = record["value"]
    # half of eight KV heads; the first token's place is taken by the random ones
    assert 300 * 4 * HEAD_BYTES <= value["kv_bytes"] < 330 * 4 * HEAD_BYTES
    assert value["step_ms"] > 0


def test_bench_model_frees_a_layout_before_the_next(tmp_path, monkeypatch):
    import weakref

    import bench_model

    built = []
    honest = bench_model.build

    def noted(*args, **kwargs):
        assert not [name for name, model in built if model() is not None], "an earlier layout's model is still alive"
        model = honest(*args, **kwargs)
        built.append((args[0], weakref.ref(model)))
        return model

    monkeypatch.setattr(bench_model, "build", noted)
    monkeypatch.setattr(bench_model, "layouts", lambda bench, wanted: [("single", 1, 1)] * 2)
    status, records = run("bench_model", tmp_path, "decode")
    assert status == 0, records
    assert len(built) == 2


def test_bench_model_names_the_layouts_of_the_ranks(tmp_path):
    status, records = run("bench_model", tmp_path, "decode", "--layouts", "kvp2")
    assert status == 1
    assert "no layouts ['kvp2'] of 1 ranks; legal: ['single']" in records[0]["reason"]

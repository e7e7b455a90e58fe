"""The profile of a step: named ranges in its traces, and a table that gives each kernel its time and its range."""

import json
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def event(cat, name, ts, dur, tid=1, correlation=None):
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def test_traces_name_the_parts_of_a_step(tmp_path, capsys):
    import profile_step

    from distdec.merge import CollectiveMerge

    before = CollectiveMerge.__call__
    out, trace = tmp_path / "records.jsonl", tmp_path / "traces" / "step.json"
    arguments = ["--dry-run", "--device", "cpu", "--graphs", "on", "--trace", str(trace), "--out", str(out)]
    assert profile_step.main(arguments) == 0
    assert CollectiveMerge.__call__ is before, "a range was left on the merge"
    names = {}
    for how in ("decode.eager", "decode.graph", "prefill.eager", "prefill.graph"):
        events = json.loads((trace.parent / f"step.{how}.json").read_text())["traceEvents"]
        names[how] = [e["name"] for e in events if e.get("cat") == "user_annotation"]
        for phase in ("plan", "reserve, fill", "fill", "run", "sample", "commit"):
            assert names[how].count(phase) == 2, (how, phase)
    inside = ("projections", "mlp", "store", "attention", "merge", "norm", "rotary", "head", "embedding")
    for how in ("decode.eager", "prefill.eager"):
        assert set(inside) < set(names[how])
        assert names[how].count("attention") == 2 * 2, "two layers, two steps"
    assert set(inside).isdisjoint(names["decode.graph"] + names["prefill.graph"])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(record["section"], record["name"]) for record in records] == [
        ("decode", "eager"),
        ("decode", "graph"),
        ("prefill", "eager"),
        ("prefill", "graph"),
    ]
    for record in records:
        value, top = record["value"], record["top"]
        assert 0 < sum(line["us"] for line in top) <= value["kernels_us"] * 1.001 < value["step_us"]
        product = next(line for line in top if line["name"] == "aten::mm")
        # seven products a layer and the head's, in the eager steps' ranges also where there was no range
        assert product["calls"] == 15
        assert {"projections", "mlp", "head"} == set(product["ranges"].split(", "))
    assert "us a step under the profiler" in capsys.readouterr().out


def test_kernels_belong_to_the_range_of_their_launch():
    from bench_trace import Line, labels_of, table, work_of

    events = [
        event("user_annotation", "run", 0, 100),
        event("user_annotation", "mlp", 10, 20),
        event("user_annotation", "elsewhere", 0, 100, tid=2),
        event("gpu_user_annotation", "mlp", 200, 20, tid=7),
        event("cuda_runtime", "cudaLaunchKernel", 12, 1, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 40, 1, correlation=2),
        event("cuda_runtime", "cudaMemcpyAsync", 140, 1, correlation=3),
        event("kernel", "gemm<1, 2>", 200, 30, tid=7, correlation=1),
        event("kernel", "decode_kernel", 230, 60, tid=7, correlation=2),
        event("kernel", "decode_kernel", 290, 20, tid=7, correlation=2),
        event("gpu_memcpy", "Memcpy HtoD", 310, 10, tid=7, correlation=3),
        event("cpu_op", "aten::mm", 11, 5),
        {"ph": "M", "name": "process_name"},
    ]
    work = work_of(events)
    assert [(name, us, where) for name, us, where in work] == [
        ("gemm<1, 2>", 30, "mlp"),
        ("decode_kernel", 60, "run"),
        ("decode_kernel", 20, "run"),
        ("Memcpy HtoD", 10, ""),
    ]
    lines = table(work, 2, 80.0)
    assert lines[0] == Line("decode_kernel", "run", 1.0, 40.0, 0.5)
    assert [line.name for line in lines] == ["decode_kernel", "gemm<1, 2>", "Memcpy HtoD"]
    # a replay: every kernel lies under the range of the graph's launch, and is known by its name
    replayed = [w._replace(range="run") for w in work]
    assert table(replayed, 2, 80.0, labels_of(work))[1].ranges == "mlp"


def test_operators_lose_the_time_of_those_inside_them():
    from bench_trace import work_of

    events = [
        event("cpu_op", "linear", 0, 10),
        event("cpu_op", "addmm", 2, 7),
        event("cpu_op", "copy", 3, 1),
        event("cpu_op", "other", 10, 4),
        event("cpu_op", "thread", 1, 3, tid=2),
    ]
    assert {work.name: work.us for work in work_of(events)} == {
        "linear": 3,
        "addmm": 6,
        "copy": 1,
        "other": 4,
        "thread": 3,
    }


def test_the_table_is_short_enough_to_read():
    from bench_trace import Line, show

    name = "void cutlass::gemm<float, 128>(int)"
    text = show([Line(name, "mlp", 64.0, 1234.56, 0.31), Line("x", "", 1.0, 1.0, 0.0)], 1)
    assert text.splitlines()[1:] == ["   1234.6  31.0%     64  mlp                      cutlass::gemm"]


def test_a_compiled_layer_is_named_as_a_whole():
    from profile_step import parts
    from torch import nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp, self.input_layernorm = nn.Linear(2, 2), nn.LayerNorm(2)

        def forward(self, x):
            return self.mlp(self.input_layernorm(x))

    model = nn.Sequential(Layer(), Layer())
    model.lm_head = nn.Linear(2, 2)
    model[1].compile(backend="eager")
    found = [(module, label) for module, label in parts(model)]
    assert [label for _, label in found] == ["mlp", "norm", "layer", "head"]
    assert found[2][0] is model[1]

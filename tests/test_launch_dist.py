"""The launch programs as processes of their own, alone and under torchrun: who speaks, who ends, what is kept."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import boot

ROOT = Path(__file__).resolve().parent.parent


def run_alone(*arguments, rank=None):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if rank is not None:
        environment |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    command = [sys.executable, str(ROOT / "launch" / "generate.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_help_and_errors_come_from_rank_0_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = run_alone("--help")
    assert shown.returncode == 0
    assert "scheduler.prefill_slice=512" in shown.stdout
    assert run_alone("--help", rank=1).stdout == ""
    failed = run_alone("cache.foo=1")
    assert failed.returncode == 1
    assert failed.stderr.count("error: ") == 1
    assert "Traceback" not in failed.stderr
    started = time.monotonic()
    later = run_alone("cache.foo=1", rank=1)
    assert later.returncode == 1
    assert time.monotonic() - started > boot.QUIET_S, "rank 1 must leave the first word to rank 0"
    assert later.stderr.startswith("rank 1: error: ")
    assert list(tmp_path.iterdir()) == []


def test_drafts_are_reported_and_change_no_token(folder, tmp_path):
    run = run_alone(
        f"model.path={folder}",
        "scheduler=speculative",
        "prompt=over and over and over and over",
        "max_new_tokens=20",
        "ignore_eos=true",
        "parity=true",
        f"hydra.run.dir={tmp_path}/run",
    )
    assert run.returncode == 0, run.stderr
    assert "parity: all 20 tokens equal those of single-process transformers" in run.stdout
    accepted, drafted, share = map(
        int, re.search(r"drafts: (\d+) of (\d+) tokens accepted \((\d+)%\)", run.stdout).groups()
    )
    assert 0 <= accepted <= drafted > 0
    assert share == round(100 * accepted / drafted)


def torchrun(script, *arguments, num_ranks=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, str(script), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.dist
def test_a_sweep_runs_every_job_in_one_process_group(folder, tmp_path):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "first"}\n{"prompt": \n{"prompt": "the third", "max_new_tokens": 3}\n')
    process = torchrun(
        ROOT / "launch" / "generate.py",
        "-m",
        "parallel.merge=all_reduce,reduce_scatter",
        f"model.path={folder}",
        f"prompts={prompts}",
        f"output={tmp_path}/out.jsonl",
        "max_new_tokens=5",
        "ignore_eos=true",
        "on_error=skip",
        "parity=true",
        f"hydra.sweep.dir={tmp_path}/sweep",
    )
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert out.count("parity: all 8 tokens equal those of single-process transformers (eager, float32)") == 2
    assert out.count("merge all_reduce,") == out.count("merge reduce_scatter,") == 1
    assert err.count("skipped line 2: not JSON") == 2
    records = {record["line"]: record for record in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert [len(records[line]["token_ids"]) for line in (1, 3)] == [5, 3]
    assert records[2]["finish_reason"] == "error"
    # one folder a job, written by rank 0 alone
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == ["0", "1", "multirun.yaml"]


@pytest.mark.dist
def test_ranks_with_different_options_are_told_which(folder, tmp_path):
    script = tmp_path / "uneven.py"
    script.write_text(
        "import os, runpy, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.argv += ['scheduler.prefill_slice=99', 'parallel.tp=2']\n"
        f"runpy.run_path({str(ROOT / 'launch' / 'generate.py')!r}, run_name='__main__')\n"
    )
    process = torchrun(
        script, f"model.path={folder}", "prompt=a", f"output={tmp_path}/o.jsonl", f"hydra.run.dir={tmp_path}/run"
    )
    _, err = process.communicate(timeout=240)
    assert process.returncode != 0
    assert err.count("error: ") == 1, err
    assert "started with different options: parallel.tp, scheduler.prefill_slice" in err
    assert "ranks [1] differ from rank 0" in err
    assert not (tmp_path / "o.jsonl").exists()


@pytest.mark.dist
def test_ctrl_c_ends_all_ranks_and_keeps_what_is_finished(folder, tmp_path):
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "short", "max_new_tokens": 2}\n{"prompt": "long", "max_new_tokens": 4000}\n')
    process = torchrun(
        ROOT / "launch" / "generate.py",
        f"model.path={folder}",
        f"prompts={prompts}",
        f"output={output}",
        "ignore_eos=true",
        f"hydra.run.dir={tmp_path}/run",
    )
    deadline = time.monotonic() + 240
    while not output.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
    )
    ranks = [int(pid) for pid in children.stdout.split()]
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - started < 5, err
    assert process.returncode != 0
    assert "1 of 2 requests were finished; they are in" in err
    [record] = [json.loads(line) for line in output.read_text().splitlines()]
    assert record["line"] == 1
    assert len(record["token_ids"]) == 2
    assert len(ranks) == 2
    for pid in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


STUCK = """
import sys, time
sys.path.insert(0, {root!r})
from distdec.arrival import StepStuck
from distdec.mesh import Mesh
from launch import boot, generate

def for_ever(*args):
    time.sleep(600)

class Graphs:
    close = __del__ = for_ever

class Engine:
    def __init__(self):
        self.runner = self
        self.graphs = Graphs()
    def generate(self, prompts, on_step):
        if not prompts:
            raise RuntimeError("connection closed by rank 0")
        raise StepStuck("the device did not end a step")
    close = for_ever

generate.make_engine = lambda *args: Engine()
generate._fitting = lambda config, engine, work: work.prompts
Mesh.close = Mesh.__exit__ = for_ever
boot.main(generate.run)
"""


@pytest.mark.dist
def test_every_rank_ends_by_itself_when_its_device_is_stuck(folder, tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(STUCK.format(root=str(ROOT)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    # a layout of its own, whose groups are apart from the world's
    options = [f"model.path={folder}", "prompt=a", "parallel.kvp=1", "parallel.tp=2", f"hydra.run.dir={tmp_path}/run"]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *options],
            env={**where, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=150)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1], said
    assert "error: the device did not end a step" in said[0]
    assert "Traceback" not in said[0]
    assert "RuntimeError: connection closed by rank 0" in said[1]


@pytest.mark.dist
def test_a_run_without_a_number_ends_with_an_error(tmp_path):
    from safetensors.torch import load_file, save_file

    from launch.assets import tiny_model_folder

    folder = tiny_model_folder(tmp_path / "model")
    [path] = folder.glob("*.safetensors")
    weights = load_file(path)
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, path, {"format": "pt"})
    done = run_alone(f"model.path={folder}", "prompt=a", f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 1
    assert "(numerics)" in done.stdout
    assert done.stderr.count("error: every request ended with reason numerics: the model's logits are NaN") == 1


def test_a_timeout_that_nothing_can_keep_is_one_line():
    failed = run_alone("parallel.timeout_s=0.001", "prompt=a")
    assert failed.returncode == 1
    assert "error: parallel.timeout_s must be" in failed.stderr
    assert failed.stderr.count("\n") == 1


COMPILED = """
import json, sys
sys.path.insert(0, {root!r})
from launch import boot
boot.keep_compiled()
import torch
from torch._dynamo.utils import counters
from distdec.capacity import Room
from distdec.hf import compiled
from distdec.sizing import describe_start

class Binding:
    def attend(self, layer, query, key, value, call):
        return query[0].transpose(0, 1).flatten(1)[None].clone()

class Layer(torch.nn.Module):
    # products alone, which need no C++ compiler
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))
        self.attention = torch.nn.Module()
    def forward(self, x):
        q = self.q_proj(x).view(1, -1, 2, 4).transpose(1, 2)
        return self.o_proj(compiled.attend(q, q, q, self.attention._distdec_handle, None, 8, 0, [1.0, 0.0]))

layers, binding = [Layer(), Layer()], Binding()
compiled.bind(binding, [layer.attention for layer in layers])
compiled.compile_layers(layers)
with torch.no_grad():
    for tokens in (1, 2, 5):
        for layer in layers:
            layer(torch.ones(1, tokens, 8))
print(describe_start({{"load": 1.5, "warm-up": 2.0}}, Room(2**31, 2**30, 2**29), 2**28))
"""


def test_a_second_start_finds_what_the_first_has_compiled(tmp_path):
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED.format(root=str(ROOT)))
    places = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    environment = {key: value for key, value in os.environ.items() if key not in places}
    environment |= {"DISTDEC_CACHE": str(tmp_path / "kept"), "OMP_NUM_THREADS": "1"}
    said = [
        subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    memory = "; GiB a rank: free 2.0, step 1.0, graphs 0.5, cache 0.2\n"
    # one program for a single token and one for any other number
    assert said[0] == f"start: load 1.5 s, warm-up 2.0 s (compiled 2, from the cache 0){memory}"
    assert said[1] == f"start: load 1.5 s, warm-up 2.0 s (compiled 0, from the cache 2){memory}"
    assert any((tmp_path / "kept" / "inductor").iterdir())

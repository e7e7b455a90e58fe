"""The configuration: every bad value is refused with the value and what is legal, before anything starts."""

import dataclasses
import subprocess
import sys

import pytest

from distdec.config import (
    MERGE_MODES,
    MERGE_TRANSPORTS,
    CacheConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkloadConfig,
)
from distdec.config_keys import describe, flatten
from distdec.request import SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: ModelConfig(dtype="float8"),
            "model.dtype must be one of auto, float32, bfloat16, float16, got 'float8'",
        ),
        (lambda: ModelConfig(device="tpu"), "model.device must be one of"),
        (lambda: ModelConfig(name="llama"), "model.name must be one of smollm2, path"),
        (lambda: ModelConfig(name="path"), "model.path=FOLDER"),
        (lambda: ParallelConfig(kvp=-1), "parallel.kvp must be at least 0, got -1"),
        (lambda: ParallelConfig(tp=0), "parallel.tp must be at least 1, got 0"),
        (lambda: ParallelConfig(merge="ring"), "parallel.merge must be one of auto, all_reduce"),
        (lambda: ParallelConfig(reduce="gloo"), "parallel.reduce must be one of auto, nccl, one_shot, got 'gloo'"),
        (
            lambda: ParallelConfig(overlap="stores"),
            "parallel.overlap must be one of none, store, fetch, both, got 'stores'",
        ),
        (lambda: ParallelConfig(transport="fp8"), "parallel.transport must be one of float32, bfloat16, float8_e4m3"),
        (
            lambda: ParallelConfig(merge="all_reduce", transport="float8_e4m3"),
            "goes with parallel.merge auto, all_gather, all_to_all, one_shot",
        ),
        (
            lambda: ParallelConfig(timeout_s=NAN),
            "parallel.timeout_s must be .* at least 1 and .* got nan",
        ),
        (lambda: ParallelConfig(timeout_s=1e300), r"parallel.timeout_s must be .* at most 1e\+06, got 1e\+300"),
        (lambda: ParallelConfig(timeout_s=0.001), "at least 1 and .* got 0.001"),
        (lambda: CacheConfig(min_chunk=96, max_chunk=96), "cache.min_chunk must be a power of two, got 96"),
        (lambda: CacheConfig(max_chunk=2048), r"one of \[128, 256, 512, 1024\].*got 2048"),
        (lambda: CacheConfig(page_size=48), "cache.page_size=48 must divide cache.min_chunk=128"),
        (lambda: CacheConfig(memory_gb=-1.0), "cache.memory_gb must be a finite number, at least 0 and .* got -1.0"),
        (lambda: CacheConfig(host_gb=-1.0), "cache.host_gb must be a finite number, at least 0 and .* got -1.0"),
        (lambda: CacheConfig(memory_gb=1e300), r"cache.memory_gb must be .* at most 1e\+06, got 1e\+300"),
        (lambda: CacheConfig(memory_fraction=1.5), "at most 1, got 1.5"),
        (lambda: CacheConfig(weights=(1, 0)), "cache.weights must be at least 1, got 0"),
        (lambda: SchedulerConfig(prefill_slice=0), "scheduler.prefill_slice must be at least 1, got 0"),
        (lambda: SchedulerConfig(token_budget=8, max_rows=9), "max_rows=9 decode rows need .*token_budget of at least"),
        (lambda: WorkloadConfig(name="chat"), "workload.name must be one of"),
        (lambda: WorkloadConfig(depth=1.01), "workload.depth must be .* at most 1, got 1.01"),
        (lambda: Config(on_error="ignore"), "on_error must be one of stop, skip"),
        (lambda: Config(prompt="a", prompt_file="b"), "give one of .* got prompt= and prompt_file="),
        (lambda: Config(prompt="a", workload=WorkloadConfig(name="passkey")), "makes its own prompt; drop prompt="),
        (lambda: Config(workload=WorkloadConfig(name="jsonl")), "needs prompts=FILE.jsonl"),
        (lambda: Config().check_inputs(), "no prompt: give prompt=TEXT"),
        (lambda: Config(prompt=" \n").check_inputs(), "the prompt is empty"),
    ],
)
def test_bad_values_are_refused_with_what_is_legal(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number"),
        ({"max_new_tokens": True}, "max_new_tokens must be a whole number"),
        ({"temperature": -0.1}, "temperature must be a finite number, at least 0, got -0.1"),
        ({"temperature": NAN}, "temperature must be a finite number, at least 0, got nan"),
        ({"temperature": INF}, "got inf"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_p": 0.0}, "top_p must be .* more than 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "top_p must be .* at most 1, got 1.5"),
        ({"top_p": NAN}, "top_p must be .* got nan"),
        ({"min_p": -0.5}, "min_p must be .* at least 0 and at most 1, got -0.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be .* more than 0, got 0.0"),
        ({"repetition_penalty": NAN}, "repetition_penalty must be .* got nan"),
        ({"seed": -1}, "seed must be 0 to"),
        ({"stop": ("a", "")}, "stop must be strings that are not empty"),
        ({"stop": (1,)}, "stop must be strings"),
        ({"stop": None}, "stop must be strings that are not empty, got None"),
        ({"temperature": 10**400}, "temperature must be a finite number"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be a finite number"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
    ],
)
def test_bad_sampling_parameters_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        SamplingParams(**fields)


@pytest.mark.parametrize(("kvp", "tp", "world", "resolved"), [(0, 1, 5, (5, 1)), (0, 2, 8, (4, 2)), (2, 3, 6, (2, 3))])
def test_kvp_fills_what_tp_leaves(kvp, tp, world, resolved):
    assert ParallelConfig(kvp=kvp, tp=tp).resolve(world) == resolved


@pytest.mark.parametrize(("kvp", "tp", "world"), [(8, 1, 2), (2, 2, 8), (0, 2, 3), (0, 4, 2)])
def test_a_layout_that_is_not_the_world_is_refused_with_all_numbers(kvp, tp, world):
    with pytest.raises(ValueError) as error:
        ParallelConfig(kvp=kvp, tp=tp).resolve(world)
    told = str(error.value)
    assert f"parallel.tp={tp}" in told
    assert f"but {world} were started" in told
    assert f"parallel.kvp={kvp or max(1, world // tp)}" in told


def test_every_key_has_a_help_text_and_the_default_of_its_class():
    rows = describe(Config)
    assert [key for key, _, _ in rows] == [key for key, _ in flatten(Config())]
    assert [default for _, default, _ in rows] == [value for _, value in flatten(Config())]
    assert all(len(text) > 10 for _, _, text in rows)


def test_digests_differ_in_exactly_the_keys_that_differ():
    one = Config(prompt="a")
    other = dataclasses.replace(one, scheduler=SchedulerConfig(prefill_slice=64), prompt="b")
    first, second = one.digests(), other.digests()
    assert first.keys() == second.keys()
    assert {key for key in first if first[key] != second[key]} == {"scheduler.prefill_slice", "prompt"}


def test_configuration_and_scheduler_need_neither_torch_nor_hydra():
    code = (
        "import sys, distdec.config, distdec.request, distdec.scheduler, distdec.detokenize\n"
        "print(sorted({'torch', 'hydra', 'omegaconf', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_merges_that_can_be_asked_for_are_those_that_exist():
    from distdec.merge import MODES
    from distdec.merge_modes import TRANSPORTS

    assert set(MERGE_MODES) == {"auto", *MODES}
    assert set(MERGE_TRANSPORTS) == set(TRANSPORTS)


def test_lengths_of_matches_that_contradict_each_other_are_both_named():
    with pytest.raises(ValueError, match=r"ngram_max must be at least scheduler\.ngram_min=9, got 4"):
        SchedulerConfig(ngram_min=9)
    with pytest.raises(ValueError, match="ngram_max must be a whole number"):
        SchedulerConfig(ngram_max=2.5)
    assert SchedulerConfig(ngram_min=9, ngram_max=9).ngram_max == 9

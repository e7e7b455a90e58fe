"""SmolLM2-135M, real weights and 9 query / 3 KV heads, on shards: its tokens, its pass key, and what breaks them."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distdec.config import CacheConfig, Config, ParallelConfig, SchedulerConfig
from distdec.engine import Engine
from distdec.mesh import Mesh
from distdec.request import SamplingParams
from distdec.runner import Runner
from launch.assets import passkey_prompt, smollm2_folder
from launch.parity import load_reference, reference_tokens

pytestmark = pytest.mark.dist

ROOT = Path(__file__).resolve().parent.parent
NEW = 32
# chunks of 16 tokens, so that prompts of some dozen tokens are spread over every rank
CONFIG = Config(
    cache=CacheConfig(max_tokens=700, min_chunk=16, max_chunk=16, page_size=16),
    scheduler=SchedulerConfig(prefill_slice=64, token_budget=128),
)
TEXTS = (
    "Once upon a time, there was a little",
    "A hash table is a data structure that maps keys to values. To find a value, it first computes the hash of the key"
    ", which says in which bucket of the table the value lies. The capital of Italy is Rome, the capital of France is",
)


@pytest.fixture(scope="module")
def folder():
    return str(smollm2_folder())


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def work(folder, tokenizer):
    """Prompts, their expected continuations, and the pass key of the last prompt."""
    passkey, key = passkey_prompt(tokenizer, 400, 0.5, 0)
    prompts = [tokenizer(text)["input_ids"] for text in (*TEXTS, passkey)]
    model = load_reference(folder, "float32", "cpu")
    counts = (NEW, NEW, 8)
    expected = [reference_tokens(model, prompt, n) for prompt, n in zip(prompts, counts, strict=True)]
    return list(zip(prompts, counts, strict=True)), expected, key


def run_real(folder, prompts, merge, lose_rank):
    """Generate; return this rank's tokens, its shares of the sequences and the collectives a layer and step."""
    with Mesh.create(device="cpu", timeout_s=100) as mesh:
        config = dataclasses.replace(CONFIG, parallel=ParallelConfig(merge=merge))
        engine = Engine(Runner.load(folder, mesh, config), config.scheduler)
        if mesh.kvp_rank == lose_rank:
            forget_the_shard(engine)
        held = []

        def watch(_result):
            kv = engine.cache.kv
            held.append([(kv.length(s), kv.local_length(s, mesh.kvp_rank)) for s in kv.sequences()])

        requests = [(ids, SamplingParams(max_new_tokens=n, ignore_eos=True)) for ids, n in prompts]
        done = engine.generate(requests if mesh.is_leader else None, watch)
        calls = engine.runner.attention.merge.calls / (engine.runner.num_forwards * engine.runner.num_layers)
        return [list(d.token_ids) for d in done], held, calls


def forget_the_shard(engine):
    """Negative control: this rank says it holds no key of anything."""
    fill = engine.cache.buffers.fill

    def forgetful(*args, **kwargs):
        batch = fill(*args, **kwargs)
        for tables in (batch.decode_tables[0], batch.prefill_tables[0]):
            tables.tile_ranges[:, 1] = tables.tile_ranges[:, 0]
            tables.cum_tiles.zero_()
        return batch

    engine.cache.buffers.fill = forgetful


@pytest.mark.parametrize(("num_ranks", "merge", "collectives"), [(2, "all_gather", 1), (3, "all_reduce", 2)])
def test_real_tokens_are_those_of_one_process(ranks, folder, work, tokenizer, num_ranks, merge, collectives):
    prompts, expected, key = work
    results = ranks(num_ranks).run(run_real, folder, prompts, merge, None, timeout_s=240)
    for tokens, _, calls in results:
        assert tokens == expected
        assert calls == collectives
    assert key in tokenizer.decode(results[0][0][2])
    for rows in zip(*(held for _, held, _ in results), strict=True):
        for shares in zip(*rows, strict=True):
            length, locals_ = shares[0][0], [share[1] for share in shares]
            assert sum(locals_) == length
            assert max(locals_) - min(locals_) <= CONFIG.cache.max_chunk


def test_a_lost_shard_breaks_the_tokens_and_the_pass_key(ranks, folder, work, tokenizer):
    prompts, expected, key = work
    for tokens, _, _ in ranks(2).run(run_real, folder, prompts, "all_gather", 1, timeout_s=240):
        assert all(got != want for got, want in zip(tokens, expected, strict=True))
        assert key not in tokenizer.decode(tokens[2])


def largest_tensor_of_a_decode_step(context):
    """Return the largest tensor, in elements, that any op of a decode step makes, and the bytes of this rank's keys."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from distdec.attention import DistributedAttention
    from distdec.sharded_cache import ShardedCache

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                    self.largest = max(self.largest, tensor.numel())
            return out

    with Mesh.create(device="cpu") as mesh:
        cache = ShardedCache(mesh, num_layers=1, num_kv_heads=2, head_dim=32, max_tokens=9000, max_chunk=512)
        attention = DistributedAttention(mesh, cache, merge="all_gather")
        cache.pool.k.normal_()
        cache.pool.v.normal_()
        for seq, length in enumerate((context, 700)):
            cache.kv.add(seq)
            cache.begin_step([(seq, length)])
        for _ in range(2):
            batch = cache.begin_step([(0, 1), (1, 1)])
            with Watch() as watch:
                attention(*(torch.randn(2, heads, 32) for heads in (8, 2, 2)), batch, 0)
        return watch.largest, cache.kv.local_length(0, mesh.kvp_rank) * 2 * 32


def test_nothing_that_a_decode_step_makes_grows_with_the_context(ranks):
    short, long = (ranks(2).run(largest_tensor_of_a_decode_step, n) for n in (4500, 8000))
    for (small, _), (large, keys) in zip(short, long, strict=True):
        assert small == large
        assert large < keys / 10


PREFILL = """
import resource, sys
from distdec.config import CacheConfig, Config, SchedulerConfig
from distdec.engine import Engine
from distdec.mesh import Mesh
from distdec.request import SamplingParams
from distdec.runner import Runner
folder, count = sys.argv[1], int(sys.argv[2])
config = Config(cache=CacheConfig(max_tokens=8000), scheduler=SchedulerConfig(prefill_slice=512, token_budget=512))
with Mesh.single() as mesh:
    engine = Engine(Runner.load(folder, mesh, config), config.scheduler)
    ids = [(7 * i) % 40000 + 100 for i in range(count)]
    engine.generate([(ids, SamplingParams(max_new_tokens=1))])
    token_bytes = engine.cache.pool.bytes // engine.cache.pool.k.shape[1]
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - count * token_bytes)
"""


@pytest.mark.slow
def test_prefill_memory_does_not_follow_the_prompt(folder):
    peaks = []
    for count in (2000, 7500):
        command = [sys.executable, "-c", PREFILL, folder, str(count)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=True)
        peaks.append(int(done.stdout.split()[-1]))
    assert abs(peaks[1] / peaks[0] - 1) < 0.05, peaks

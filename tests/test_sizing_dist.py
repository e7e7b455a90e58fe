"""The cache takes what the largest step and the captured steps leave, on every rank, on a device that is made up."""

import dataclasses
import gc
import weakref

import pytest
import torch

from distdec import sizing
from distdec.cache.pool import KVPool
from distdec.config import BackendConfig, CacheConfig, Config, SchedulerConfig
from distdec.engine import Engine
from distdec.graphs import StepGraphs
from distdec.load import load_model
from distdec.mesh import Mesh
from distdec.request import SamplingParams
from distdec.runner import Runner
from distdec.sampling import sample

MIB = 2**20
WORKSPACE, PER_TOKEN = 300_000, 20_000
GUESS = 50_000
CONFIG = Config(
    cache=CacheConfig(memory_fraction=0.75),
    scheduler=SchedulerConfig(prefill_slice=16, token_budget=40, max_rows=7, decode_deadline_ms=0),
    backend=BackendConfig(graphs="on"),
)
# 7 decode rows beside 40 tokens of prompts
STEP = WORKSPACE + 47 * PER_TOKEN
# logits of 256 float32 numbers for 14 rows of four steps without prompts and 15 rows of two with four
SET_ASIDE = 47 * PER_TOKEN + (14 + 4 + 11) * 1024 + 6 * GUESS
GREEDY = SamplingParams(max_new_tokens=5, ignore_eos=True)


class Device:
    """Memory in which pools, activations, workspaces and captured steps are counted, and which must not run out.

    Args:
        total: bytes that are free when the weights are there.
        graphs: bytes that each captured step takes, in the first capture, in the second and so on.
    """

    measures = True

    def __init__(self, patch, total, graphs=(30_000,)):
        self.total, self.graphs = total, list(graphs)
        self.pools, self.steps, self.sampled, self.captures = [], [], [], 0
        self.cached = self.workspace = self.captured = self.most = 0
        make, close = KVPool.__init__, StepGraphs.close

        def make_pool(pool, *args, **kwargs):
            make(pool, *args, **kwargs)
            self.pools.append(weakref.ref(pool))

        def capture(graphs, function, inputs):
            self.captured += self.graphs[0]
            self.look()
            return None, None

        def close_graphs(graphs):
            close(graphs)
            self.captured, self.captures = 0, self.captures + 1
            del self.graphs[:1]

        patch.setattr(KVPool, "__init__", make_pool)
        patch.setattr(StepGraphs, "_record", capture)
        patch.setattr(StepGraphs, "close", close_graphs)
        patch.setattr(sizing, "GRAPH_BYTES", GUESS)
        patch.setattr(sizing, "sample", self.sample)

    def watch(self, model):
        model.register_forward_pre_hook(self._forward, with_kwargs=True)
        return model

    def _forward(self, module, args, kwargs):
        tokens = kwargs["input_ids"].shape[1]
        self.steps.append(tokens)
        self.workspace = WORKSPACE
        self.cached = max(self.cached, tokens * PER_TOKEN)
        self.look()

    def sample(self, logits, rows):
        self.sampled.append((len(rows), all(not row.params.greedy for row in rows)))
        return sample(logits, rows)

    def look(self):
        self.most = max(self.most, self.total - self.free(trim=False))

    def free(self, *, trim=True):
        if trim:
            gc.collect()
            self.cached = 0
        pools = sum(pool().bytes for pool in self.pools if pool() is not None)
        return self.total - pools - self.cached - self.workspace - self.captured


def load(folder, config, mesh, device, wanted=10**9):
    return Runner.build(device.watch(load_model(folder, mesh, config)), mesh, config, wanted, memory=device)


def test_the_largest_step_the_captured_steps_and_the_cache_share_the_memory(folder, monkeypatch):
    device = Device(monkeypatch, 8 * MIB)
    runner = load(folder, CONFIG, Mesh.single(), device)
    # as the compiler is to see them: one token, another number, and the largest again when all is loaded
    assert device.steps[:4] == [1, 2, 47, 47]
    assert device.sampled == [(1, True), (2, True), (11, True), (11, True)]
    assert runner.room == (8 * MIB, STEP, 6 * 30_000)
    # 512 bytes a token, frames of 128
    left = int(0.75 * 8 * MIB) - STEP - SET_ASIDE - runner.cache.pool.bytes
    assert 0 <= left < 128 * 512
    assert runner.max_tokens == runner.cache.pool.bytes // 512 - 1024
    engine = Engine(runner, CONFIG.scheduler)
    engine.generate([([3] * length, GREEDY) for length in (5, 37, 1, 22, 9, 30, 30)])
    assert max(device.steps) == 47
    assert device.most <= 0.75 * 8 * MIB
    engine.close()


def test_drafts_are_part_of_the_largest_step(folder, monkeypatch):
    device = Device(monkeypatch, 10 * MIB)
    config = dataclasses.replace(CONFIG, scheduler=dataclasses.replace(CONFIG.scheduler, num_draft_tokens=3))
    runner = load(folder, config, Mesh.single(), device)
    # seven rows of four tokens beside 40
    assert device.steps[:4] == [1, 2, 68, 68]
    assert device.sampled[-1] == (7 * 4 + 4, True)
    # four steps without drafts and four with; with prompts two and one, none being without decode rows
    assert runner.room.graphs == 30_000 * (6 + 5)
    Engine(runner, config.scheduler).generate([([3, 4] * length, GREEDY) for length in (5, 19, 1, 22, 9, 30, 30)])
    assert max(device.steps) == 68
    assert device.most <= 0.75 * 10 * MIB


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_a_step_may_have_fewer_tokens_than_prompts_under_way(folder, monkeypatch, graphs):
    device = Device(monkeypatch, 32 * MIB)
    steps = dataclasses.replace(CONFIG.scheduler, prefill_slice=2, token_budget=3, max_rows=2, max_pending_prefills=6)
    config = dataclasses.replace(CONFIG, scheduler=steps, backend=BackendConfig(graphs=graphs))
    runner = load(folder, config, Mesh.single(), device, wanted=999)
    assert (max(device.steps), device.sampled[-1]) == (5, (8, True))
    prompts = [([3 + i] * length, GREEDY) for i, length in enumerate((5, 1, 9))]
    plain = Engine(Runner.load(folder, Mesh.single(), Config(), wanted_tokens=999))
    want = [one.token_ids for one in plain.generate(prompts)]
    assert [one.token_ids for one in Engine(runner, steps).generate(prompts)] == want


def test_a_cache_is_as_large_as_wanted_where_memory_allows(folder, monkeypatch):
    # each captured step takes far more than was set aside, and nobody needs the room
    device = Device(monkeypatch, 16 * MIB, [MIB])
    runner = load(folder, CONFIG, Mesh.single(), device, wanted=999)
    assert runner.max_tokens == 999
    assert device.captures == 0
    assert runner.room.graphs == 6 * MIB


def test_captured_steps_that_take_more_than_was_set_aside_make_the_cache_smaller(folder, monkeypatch):
    device = Device(monkeypatch, 16 * MIB, [MIB, MIB])
    runner = load(folder, CONFIG, Mesh.single(), device)
    assert device.captures == 1
    left = int(0.75 * 16 * MIB) - STEP - 6 * MIB - runner.cache.pool.bytes
    assert 0 <= left < 128 * 512
    Engine(runner, CONFIG.scheduler).generate([([3] * 37, GREEDY)])


@pytest.mark.parametrize(
    ("graphs", "options", "said"),
    [
        ([MIB, 1.2 * MIB], {}, r"captured steps take 0.00703 GiB, more each time, .* backend.graphs=off"),
        ([MIB], {"max_tokens": 9000}, r"max_tokens=9000 does not fit: .* captured steps 0.00586: smaller scheduler"),
        ([3 * MIB], {}, "is not enough for a KV cache .* captured steps 0.0176"),
    ],
)
def test_what_cannot_fit_is_refused_at_the_start(folder, monkeypatch, graphs, options, said):
    device = Device(monkeypatch, 16 * MIB, [int(size) for size in graphs])
    config = dataclasses.replace(CONFIG, cache=CacheConfig(memory_fraction=0.75, **options))
    with pytest.raises(ValueError, match=said):
        load(folder, config, Mesh.single(), device)


def test_memory_that_runs_out_at_the_start_is_one_clear_error(folder, monkeypatch):
    device = Device(monkeypatch, 16 * MIB)
    monkeypatch.setattr(device, "look", lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("tried\nlong")))
    with pytest.raises(ValueError, match=r"memory ran out at the start: smaller scheduler.token_budget.*\(tried\)$"):
        load(folder, CONFIG, Mesh.single(), device)


def test_nothing_is_run_first_where_memory_cannot_be_measured(folder, monkeypatch):
    device = Device(monkeypatch, 16 * MIB)
    device.measures = False
    config = dataclasses.replace(CONFIG, backend=BackendConfig())
    runner = load(folder, config, Mesh.single(), device)
    assert device.steps == []
    assert runner.room == (16 * MIB, 0, 0)
    host = sizing.HostMemory(2).free()
    assert 0 < host <= sizing.HostMemory(1).free() * 0.6


def test_layers_are_compiled_for_the_smallest_cache_and_the_real_one_alike(folder, monkeypatch):
    from torch._dynamo.utils import counters

    from distdec.hf import compiled

    torch.compiler.reset()
    counters.clear()
    compile_layers = compiled.compile_layers
    monkeypatch.setattr(
        compiled, "compile_layers", lambda layers: compile_layers(layers, backend="eager", options=None)
    )
    device = Device(monkeypatch, 8 * MIB)
    config = dataclasses.replace(CONFIG, backend=BackendConfig(graphs="on", compile="on"))
    runner = load(folder, config, Mesh.single(), device)
    # for one token, and for any other number
    assert counters["stats"]["unique_graphs"] == 2
    Engine(runner, config.scheduler).generate([([3] * 37, GREEDY), ([4] * 3, GREEDY)])
    assert counters["stats"]["unique_graphs"] == 2


def sized(folder, weights, totals):
    """Two ranks with different room: size, own pool, own room and the most that was taken."""
    with pytest.MonkeyPatch.context() as patch, Mesh.create(device="cpu", timeout_s=20) as mesh:
        device = Device(patch, totals[mesh.rank])
        config = dataclasses.replace(CONFIG, cache=dataclasses.replace(CONFIG.cache, weights=weights))
        runner = load(folder, config, mesh, device)
        engine = Engine(runner, config.scheduler)
        done = engine.generate([([3 + i] * length, GREEDY) for i, length in enumerate((5, 37, 1, 22, 9))])
        found = runner.max_tokens, runner.cache.pool.bytes, runner.cache.layout.num_frames, tuple(runner.room)
        engine.close()
        return *found, device.most, [one.token_ids for one in done]


@pytest.mark.dist
@pytest.mark.parametrize(("weights", "totals"), [(None, (20 * MIB, 9 * MIB)), ((3, 1), (20 * MIB, 9 * MIB))])
def test_ranks_with_different_room_agree_on_a_size_that_fits_all(ranks, folder, weights, totals):
    results = ranks(2).run(sized, folder, weights, totals, timeout_s=120)
    assert len({(size, frames, str(tokens)) for size, _, frames, _, _, tokens in results}) == 1
    spare = []
    for (_, pool, frames, (free, step, graphs), most, _), total in zip(results, totals, strict=True):
        assert (free, step) == (total, STEP)
        assert pool + step + graphs <= 0.75 * total
        assert most <= 0.75 * total
        spare.append(int(0.75 * total) - STEP - SET_ASIDE - pool)
        assert pool == frames[len(spare) - 1] * 128 * 512
    # the one with least room for its share is full, to less than a frame
    assert 0 <= min(spare) < 128 * 512
    if weights:
        assert results[0][2][0] - 8 > 2.9 * (results[0][2][1] - 8)


@pytest.mark.gpu
def test_a_gpu_keeps_within_its_share_with_everything_in_place(folder):
    gc.collect()
    torch.cuda.empty_cache()
    # some GB: the tables of a cache as large as the device would take minutes
    config = dataclasses.replace(CONFIG, cache=CacheConfig(memory_fraction=0.03))
    runner = Runner.load(folder, Mesh.single("cuda"), config, wanted_tokens=10**9)
    engine = Engine(runner, config.scheduler)
    engine.generate([([3] * length, GREEDY) for length in (5, 37, 1, 22, 9, 30, 30)])
    room, pool = runner.room, runner.cache.pool.bytes
    assert room.step > 0 and room.graphs > 0
    assert 0.01 * room.free < pool <= 0.03 * room.free - room.step - room.graphs
    # pages of the driver, blocks of the allocator, and code that a device loads when it first runs: 300 MB on an H200
    assert sizing.GpuMemory(runner.mesh.device).free(trim=False) >= 0.97 * room.free - 512 * MIB
    engine.close()

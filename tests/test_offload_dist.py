"""Requests that are preempted to host memory and come back, on real ranks: tokens as if each ran alone, no leaks."""

import math

import pytest
import torch

from distdec.config import CacheConfig, Config, SchedulerConfig
from distdec.engine import Engine
from distdec.mesh import Mesh
from distdec.request import FinishReason, SamplingParams
from distdec.runner import Runner
from launch.assets import tiny_model_folder
from launch.parity import load_reference, reference_tokens

pytestmark = pytest.mark.dist

SCHEDULER = SchedulerConfig(
    prefill_slice=32, token_budget=64, max_rows=6, max_pending_prefills=6, reserve_tokens=4, decode_deadline_ms=0
)
GROWING = [(20, 42), (13, 47), (25, 35), (5, 55), (17, 43), (9, 50)]
FRAME = 4


def tokens_of(seed, length):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(folder):
    model = load_reference(folder, "float32", "cpu")
    return [reference_tokens(model, tokens_of(seed, length), new) for seed, (length, new) in enumerate(GROWING)]


def make_engine(folder, mesh, host_frames, prefix_caching):
    """Return an engine for two of the six requests, its pool full of NaN; it offloads whatever has room on the host."""
    sizes = {"max_tokens": 104, "min_chunk": FRAME, "max_chunk": 8, "page_size": 2, "prefix_caching": prefix_caching}
    config = Config(cache=CacheConfig(**sizes, host_gb=0.001), scheduler=SCHEDULER)
    engine = Engine(Runner.load(folder, mesh, config), SCHEDULER)
    host = engine.cache.host
    assert host.parking.num_frames == int(0.001 * 2**30) // host.frame_bytes
    assert host.parking.ms_per_token > 0.0
    host.parking.num_frames = host_frames
    engine.cache.pool.k.fill_(math.nan)
    engine.cache.pool.v.fill_(math.nan)
    engine.scheduler.cost.prefill_ms = lambda num_tokens, slice_tokens: math.inf
    return engine


def growing(folder, host_frames, prefix_caching, end):
    """Run the six; `end` cancels the first that is on the host, or lets its time run out."""
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        engine = make_engine(folder, mesh, host_frames, prefix_caching)
        host, num_ranks = engine.cache.host, mesh.kvp_size
        if mesh.is_leader:
            for seed, (length, new) in enumerate(GROWING):
                engine.add(tokens_of(seed, length), SamplingParams(max_new_tokens=new, ignore_eos=True))
        done, ended_there, most, restored = {}, None, 0, []
        while True:
            result = engine.step()
            done.update((one.request_id, (one.finish_reason, list(one.token_ids))) for one in result.completions)
            engine.cache.kv.check_integrity()
            assert host.frames_held == host.parking.frames[mesh.kvp_rank]
            most = max(most, host.frames_held)
            restored += result.plan.restore
            if mesh.is_leader:
                engine.scheduler.check_integrity()
                on_host = [s for s in engine.scheduler.waiting if s.request_id in host.parking]
                if end and on_host and ended_there is None:
                    ended_there = on_host[0].request_id
                    if end is FinishReason.CANCELLED:
                        engine.cancel(ended_there)
                    else:
                        on_host[0].expires = 0.0
            if result.done:
                break
        stats, counts = engine.cache.kv.stats(), engine.scheduler.stats
        free = [a + b for a, b in zip(stats.free_frames, stats.cached_frames, strict=True)]
        left = (
            sum(free) - sum(engine.cache.layout.num_frames),
            host.frames_held,
            host.parking.frames == [0] * num_ranks,
        )
        engine.close()
        return done, ended_there, (counts.offloads, counts.preemptions, most, restored), left


CASES = [
    (1, 40, False, None),
    (2, 40, True, None),
    (3, 40, False, None),
    (2, 40, False, FinishReason.CANCELLED),
    (3, 40, True, FinishReason.TIMEOUT),
    (2, 5, True, None),
]


@pytest.mark.parametrize(("num_ranks", "host_frames", "prefix_caching", "end"), CASES)
def test_what_comes_back_from_the_host_goes_on_with_the_same_tokens(
    ranks, folder, expected, num_ranks, host_frames, prefix_caching, end
):
    results = ranks(num_ranks).run(growing, folder, host_frames, prefix_caching, end, timeout_s=200)
    done, ended_there, (offloads, preemptions, _, restored), _ = results[0]
    assert offloads >= 3
    assert len(restored) == offloads - (end is not None)
    # with room for all, only those recompute that were alone
    assert preemptions > offloads if host_frames == 5 else preemptions - offloads <= 1
    for seed, (reason, tokens) in done.items():
        if seed == ended_there:
            assert reason is end
            assert tokens == expected[seed][: len(tokens)]
        else:
            assert (reason, tokens) == (FinishReason.LENGTH, expected[seed])
    assert len(done) == len(GROWING)
    assert (ended_there is not None) == (end is not None)
    for _, _, (_, _, most, others), left in results:
        assert left == (0, 0, True), "frames of the cache or of the host leaked"
        assert 0 < most <= host_frames
        assert others == restored

"""Continuous batching on real ranks: prefix hits, preemption, aborts and timeouts; tokens as if each ran alone."""

import dataclasses
import itertools

import pytest
import torch

from distdec.config import CacheConfig, Config, SchedulerConfig
from distdec.engine import Engine
from distdec.mesh import Mesh
from distdec.request import FinishReason, SamplingParams
from distdec.runner import Runner
from launch.parity import load_reference, reference_tokens

pytestmark = pytest.mark.dist

# the deadline goes by the clock, and these tests look at what a plan holds
SCHEDULER = SchedulerConfig(
    prefill_slice=32, token_budget=64, max_rows=6, max_pending_prefills=6, reserve_tokens=4, decode_deadline_ms=0
)


def tokens_of(seed, length):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(new):
    return SamplingParams(max_new_tokens=new, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(folder):
    return load_reference(folder, "float32", "cpu")


def make_engine(folder, mesh, scheduler=SCHEDULER, **cache):
    config = Config(cache=CacheConfig(**cache), scheduler=scheduler)
    return Engine(Runner.load(folder, mesh, config), config.scheduler)


def state_of(cache):
    """Check the books and return what has to be the same on every rank."""
    cache.kv.check_integrity()
    stats = cache.kv.stats()
    available = [sum(frames) for frames in zip(stats.free_frames, stats.cached_frames, strict=True)]
    return available, stats.published_pages, stats.evicted_chunks, stats.num_sequences


def prompts_with_a_prefix():
    shared = tokens_of(1, 150)
    return [shared + tokens_of(2, 61), shared + tokens_of(3, 40), shared + tokens_of(2, 61), tokens_of(4, 33)]


def one_after_the_other(folder, prefix_caching):
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        sizes = {"max_tokens": 900, "min_chunk": 16, "max_chunk": 64, "page_size": 16}
        engine = make_engine(folder, mesh, prefix_caching=prefix_caching, **sizes)
        tokens, hits = [], [0]
        for prompt in prompts_with_a_prefix():
            tokens += [list(done.token_ids) for done in engine.generate([(prompt, greedy(8))])]
            hits.append(engine.scheduler.stats.hit_tokens)
        return tokens, [after - before for before, after in itertools.pairwise(hits)], state_of(engine.cache)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_prefix_hits_change_no_token_and_their_unit_does_not_grow_with_the_ranks(ranks, folder, reference, num_ranks):
    expected = [reference_tokens(reference, prompt, 8) for prompt in prompts_with_a_prefix()]
    results = ranks(num_ranks).run(one_after_the_other, folder, True, timeout_s=120)
    assert results[0][1] == [0, 144, 208, 0], "150 shared tokens are 9 pages, 211 are 13"
    for tokens, _, state in results:
        assert tokens == expected
        assert state == results[0][2]
    # 211 prompt tokens and 7 of the output that were fed back: 13 pages; then one page behind the 9, 2 + 2 of 40 + 7
    assert results[0][2][1] == 13 + (150 + 40 + 7) // 16 - 9 + (33 + 7) // 16
    cold = ranks(num_ranks).run(one_after_the_other, folder, False, timeout_s=120)
    assert cold[0][:2] == (expected, [0, 0, 0, 0])
    assert cold[0][2][1] == 0


GROWING = [(20, 42), (13, 47), (25, 35), (5, 55), (17, 43), (9, 50)]


def growing(folder, abort):
    """Six requests that each grow to 60 tokens, in a cache for two of them; `abort` cancels the first preempted one."""
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        engine = make_engine(folder, mesh, max_tokens=104, min_chunk=4, max_chunk=8, page_size=2)
        start = state_of(engine.cache)[0]
        if mesh.is_leader:
            for seed, (length, new) in enumerate(GROWING):
                engine.add(tokens_of(seed, length), greedy(new))
        done, aborted, oldest = {}, None, []
        while True:
            result = engine.step()
            done.update((one.request_id, one) for one in result.completions)
            if mesh.is_leader:
                engine.scheduler.check_integrity()
                if engine.scheduler.running:
                    oldest.append(min(engine.scheduler.running.values(), key=lambda s: s.order).num_computed)
                waiting = [s.request.request_id for s in engine.scheduler.waiting if s.num_preemptions]
                if abort and waiting and aborted is None:
                    aborted = waiting[0]
                    engine.cancel(aborted)
            if result.done:
                break
        state = state_of(engine.cache)
        ended = {i: (one.finish_reason, list(one.token_ids)) for i, one in done.items()}
        return ended, aborted, engine.scheduler.stats.preemptions, (state, state[0] == start)


@pytest.mark.parametrize(("num_ranks", "abort"), [(2, False), (3, True)])
def test_six_growing_requests_finish_in_a_cache_for_two(ranks, folder, reference, num_ranks, abort):
    results = ranks(num_ranks).run(growing, folder, abort, timeout_s=200)
    ended, aborted, preemptions, state = results[0]
    assert preemptions > 3
    assert state[1], "frames leaked"
    assert all(result[3] == state for result in results)
    assert (aborted is not None) == abort
    for seed, (length, new) in enumerate(GROWING):
        expected = reference_tokens(reference, tokens_of(seed, length), new)
        reason, tokens = ended[seed]
        if seed == aborted:
            assert reason is FinishReason.CANCELLED
            assert tokens == expected[: len(tokens)]
        else:
            assert (reason, tokens) == (FinishReason.LENGTH, expected)


def straddled_timeouts(folder):
    """Every rank has its own clock, 50 ms apart; the timeouts fall between them."""
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        engine = make_engine(folder, mesh, max_tokens=400, min_chunk=4, max_chunk=8, page_size=2)
        now = 0.0
        engine.scheduler.clock = lambda: now + 0.05 * mesh.rank
        if mesh.is_leader:
            for seed in range(4):
                engine.add(tokens_of(seed, 9 + 30 * seed), greedy(30), timeout_s=0.05 + 0.04 * seed)
        reasons, plans = {}, []
        while True:
            result = engine.step()
            now += 0.01
            plans.append(result.plan.encode())
            reasons.update((one.request_id, one.finish_reason) for one in result.completions)
            if result.done:
                break
        return reasons, plans, state_of(engine.cache)


def test_only_the_clock_of_rank_0_counts(ranks, folder):
    results = ranks(4).run(straddled_timeouts, folder, timeout_s=60)
    assert set(results[0][0].values()) == {FinishReason.TIMEOUT}
    assert len(results[0][0]) == 4
    assert all(result[1:] == results[0][1:] for result in results)
    assert results[0][2][3] == 0


def test_pages_of_a_request_that_failed_are_not_handed_out(folder, reference):
    engine = make_engine(folder, Mesh.single(), max_tokens=400, min_chunk=4, max_chunk=8, page_size=2)
    prompt = tokens_of(5, 30)

    def damage(result):
        if result.plan.rows and result.plan.rows[0].start == 0:
            slots = engine.cache.kv.slots(0, 0, 30, 0)
            engine.cache.pool.k[0][slots] = float("nan")

    [failed] = engine.generate([(prompt, greedy(6))], damage)
    assert failed.finish_reason is FinishReason.NUMERICS
    [again] = engine.generate([(prompt, greedy(6))])
    assert list(again.token_ids) == reference_tokens(reference, prompt, 6)
    assert engine.scheduler.stats.hit_tokens == 0
    [third] = engine.generate([(prompt, greedy(6))])
    assert third.token_ids == again.token_ids
    assert engine.scheduler.stats.hit_tokens == 28


def test_a_hit_may_not_keep_a_request_from_running(folder, reference):
    # page by page, each in a chunk of its own, the hit pins more frames than the request alone would need
    engine = make_engine(folder, Mesh.single(), max_tokens=40, min_chunk=8, max_chunk=8, page_size=2)
    prompt = tokens_of(6, 30)
    for length in range(3, 31, 2):
        engine.generate([(prompt[:length], greedy(1))])
    [done] = engine.generate([(prompt, dataclasses.replace(greedy(11)))])
    assert list(done.token_ids) == reference_tokens(reference, prompt, 11)

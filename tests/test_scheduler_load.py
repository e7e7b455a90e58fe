"""The scheduler on a clock of its own: deadlines, priorities, starvation, timeouts; and against the real cache."""

import dataclasses
import itertools
import math
import random

import pytest

from distdec.cache.kv_cache import KVCache
from distdec.cache.layout import CacheLayout
from distdec.cache.parking import Parking
from distdec.cache.prefix import PrefixIndex, token_bytes
from distdec.config import SchedulerConfig
from distdec.replay import Replay
from distdec.request import FinishReason, PlanKind, Request, SamplingParams, StepPlan
from distdec.scheduler import MAX_DELAY, MIN_SLICE, Scheduler
from distdec.speculative import verify
from distdec.step_cost import LEAST_STEPS, StepCost, StepLoad


class Machine:
    """A scheduler, the caches and hosts of its ranks, and a clock that a step moves by `cost(plan)` milliseconds."""

    def __init__(self, cost=lambda plan: 1.0, frames=(400, 400), frame=8, page_size=2, host_frames=0, **config):
        fields = {"prefill_slice": 64, "token_budget": 256, "max_rows": 16, "decode_deadline_ms": 0} | config
        layout = CacheLayout(num_frames=frames, min_chunk=frame, max_chunk=4 * frame, page_size=page_size)
        self.caches = [KVCache(layout) for _ in frames]
        self.hosts = [Parking(cache, rank, host_frames) for rank, cache in enumerate(self.caches)]
        self.replays = [Replay(cache, host=host) for cache, host in zip(self.caches, self.hosts, strict=True)]
        self.now, self.cost, self.added = 0.0, cost, 0
        self.scheduler = Scheduler(
            SchedulerConfig(**fields), self.caches[0], host=self.hosts[0], clock=lambda: self.now
        )
        self.token_times = {}
        self.ended = {}
        self.kept = ()

    def add(self, prompt, new=4, **fields):
        tokens = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
        request = Request(self.added, tokens, SamplingParams(max_new_tokens=new, ignore_eos=True), **fields)
        self.scheduler.add(request)
        self.added += 1
        return request.request_id

    def step(self, token=lambda request_id: 3):
        plan = StepPlan.decode(dataclasses.replace(self.scheduler.schedule(), kept=self.kept).encode())
        for rank, (cache, replay) in enumerate(zip(self.caches, self.replays, strict=True)):
            if rank:
                replay.keep(plan.kept)
                replay.admit(plan)
            rows = [(row.request_id, row.num_tokens) for row in plan.rows]
            assert cache.can_extend(rows), "a plan that does not fit"
            for (request_id, count), row in zip(rows, plan.rows, strict=True):
                assert cache.length(request_id) == row.start
                cache.extend(request_id, count)
            replay.publish(plan)
        self.now += self.cost(plan) / 1e3
        chosen = {row.request_id: [token(row.request_id) for _ in range(row.num_logits)] for row in plan.rows}
        tokens = verify(plan, {i: new for i, new in chosen.items() if new}, self.scheduler.running, ())
        # the other ranks hear of it with the next plan
        self.kept = tuple([(r.request_id, r.start + len(tokens[r.request_id])) for r in plan.rows if r.num_drafts])
        self.replays[0].keep(self.kept)
        for event in self.scheduler.commit(plan, tokens):
            self.token_times.setdefault(event.request_id, []).append(self.now)
        for request_id in list(self.scheduler.finished):
            self.ended[request_id] = self.scheduler.forget(request_id)
        return plan

    def run(self, limit=10_000):
        for count in range(limit):
            if self.step().kind is PlanKind.DONE:
                return count
        raise AssertionError("it does not end")

    def gaps_ms(self, request_id):
        times = self.token_times[request_id]
        return [1e3 * (late - early) for early, late in itertools.pairwise(times)]


def linear(plan):
    """5 ms a step, 0.25 a decode row, 0.2 a prompt token."""
    decode = sum(row.num_tokens == 1 for row in plan.rows)
    return 5.0 + 0.25 * decode + 0.2 * (sum(row.num_tokens for row in plan.rows) - decode)


@pytest.mark.parametrize(("deadline", "longest"), [(0, 57.0), (20, 21.0), (12, 13.0)])
def test_slices_shrink_to_the_deadline_of_decode_rows(deadline, longest):
    machine = Machine(linear, prefill_slice=256, decode_deadline_ms=deadline)
    rows = [machine.add(4, new=150) for _ in range(4)]
    for _ in range(LEAST_STEPS + 6):
        machine.step()
    # teaches what a prompt token costs
    machine.add(range(500, 560))
    for _ in range(6):
        machine.step()
    before = len(machine.token_times[rows[0]])
    late = machine.add(range(1000, 2500), new=2)
    machine.run()
    gaps = machine.gaps_ms(rows[0])[before:]
    assert machine.ended[late].finish_reason is FinishReason.LENGTH
    assert max(gaps) <= longest
    # it uses the time there is
    assert max(gaps) >= 0.85 * (deadline or longest)


@pytest.mark.parametrize("outlier_ms", [0.0, 500.0, 20_000.0])
def test_one_slow_step_does_not_starve_the_prompts_behind_it(outlier_ms):
    slow = [outlier_ms]

    def time_of(plan):
        decode_only = all(row.num_tokens == 1 for row in plan.rows)
        # steps are padded to powers of two; the first one with a prompt loads something
        tokens = 1 << (sum(row.num_tokens for row in plan.rows if row.num_tokens > 1) - 1).bit_length()
        return 6.0 if decode_only else 8.0 + 0.03 * max(tokens, 128) + (slow.pop() if slow else 0.0)

    machine = Machine(
        time_of, frames=(4000, 4000), max_rows=20, prefill_slice=2048, token_budget=2112, decode_deadline_ms=50
    )
    for _ in range(16):
        machine.add(4, new=600)
    for _ in range(60):
        machine.step()
    late = machine.add([i % 1000 for i in range(20_000)], new=1)
    steps = 0
    while late not in machine.ended:
        machine.step()
        steps += 1
    # 512 or 1024 tokens fit beside the rows at a time
    assert steps < 60


def test_prompts_wait_for_late_decode_rows_but_not_for_ever():
    machine = Machine(lambda plan: 30.0 + linear(plan), decode_deadline_ms=20)
    machine.add(4, new=400)
    for _ in range(LEAST_STEPS + 2):
        machine.step()
    machine.add(range(100, 130))
    machine.run()
    late = machine.add(range(1000, 1100), new=1)
    machine.add(5, new=400)
    machine.step()
    slices = []
    while late not in machine.ended:
        slices.append(sum(row.num_tokens for row in machine.step().rows if row.request_id == late))
    waits = "".join("x" if count else "." for count in slices)
    assert "." * MAX_DELAY in waits
    assert "." * (MAX_DELAY + 1) not in waits
    assert max(slices[1:]) == MIN_SLICE
    assert machine.scheduler.stats.delayed_steps >= waits.count(".") > 0


def test_only_so_many_prompts_are_under_way():
    machine = Machine(max_pending_prefills=3, token_budget=200, prefill_slice=20, max_rows=10)
    for i in range(9):
        machine.add(range(100 * i, 100 * i + 50), new=3)
    most = 0
    while machine.scheduler.has_work:
        machine.step()
        most = max(most, sum(s.num_outstanding > 1 for s in machine.scheduler.running.values()))
    assert most == 3
    assert len(machine.ended) == 9


def test_lower_priority_numbers_go_first_and_the_rest_in_order_of_arrival():
    machine = Machine(max_rows=1)
    order = [machine.add(3, priority=priority) for priority in (0, 2, 1, 0, -1, 1)]
    machine.run()
    first = sorted(order, key=lambda i: machine.token_times[i][0])
    assert first == [4, 0, 3, 2, 5, 1]


def test_a_stream_of_urgent_requests_starves_nobody():
    machine = Machine(lambda plan: 1000.0, max_rows=1, priority_ageing_s=30.0)
    machine.add(3, new=1)
    patient = machine.add(3, new=1, priority=1)
    for _ in range(60):
        machine.add(3, new=1)
        machine.step()
    # overtaken for 30 s, and then by nobody
    assert 30.0 <= machine.token_times[patient][0] <= 33.0


def test_a_timeout_ends_a_request_wherever_it_stands():
    machine = Machine(lambda plan: 100.0, max_rows=2, prefill_slice=2)
    machine.add(3, new=50, timeout_s=1.0)
    machine.add(200, new=50, timeout_s=0.5)
    machine.add(3, new=50, timeout_s=0.3)
    other = machine.add(3, new=8)
    machine.run()
    reasons = [machine.ended[i].finish_reason for i in range(4)]
    assert reasons == [FinishReason.TIMEOUT] * 3 + [FinishReason.LENGTH]
    assert len(machine.ended[0].output_ids) in (9, 10)
    assert machine.ended[1].output_ids == machine.ended[2].output_ids == []
    assert machine.token_times[other][0] >= 0.5


def test_the_first_in_order_gets_on_in_every_step_while_others_are_preempted():
    machine = Machine(frames=(6, 6), reserve_tokens=1, max_rows=6, max_pending_prefills=6)
    for i in range(6):
        machine.add(range(50 * i, 50 * i + 10 + i), new=60)
    while machine.scheduler.has_work:
        states = [*machine.scheduler.running.values(), *machine.scheduler.waiting]
        first = min(states, key=lambda state: state.order)
        computed, preemptions = first.num_computed, first.num_preemptions
        machine.step()
        assert first.num_preemptions == preemptions
        assert first.num_computed > computed
    machine.run()
    assert all(len(state.output_ids) == 60 for state in machine.ended.values())
    assert list(machine.ended) == sorted(machine.ended), "who came first ends first"
    assert machine.scheduler.stats.preemptions >= 4


def storm(num_requests, seed, host_frames=0, drafts=0):
    """Random requests with common prefixes arrive, grow, are cancelled and time out, in a cache that is too small.

    Where there is a host, the cheaper way of a preemption is drawn. Two tokens take turns at random in the outputs, so
    that drafts from the text are right or wrong.
    """
    chance = random.Random(seed)
    machine = Machine(
        lambda plan: chance.uniform(1, 40),
        frames=(9, 7, 8),
        host_frames=host_frames,
        reserve_tokens=3,
        max_rows=8,
        prefill_slice=12,
        num_draft_tokens=drafts,
    )
    machine.hosts[0].ms_per_token = 1.0
    machine.scheduler.cost.prefill_ms = lambda num_tokens, slice_tokens: chance.choice([0.0, math.inf, math.inf])
    stems = [[chance.randrange(9) for _ in range(60)] for _ in range(5)]
    alive = []
    while machine.added < num_requests or machine.scheduler.has_work:
        while machine.added < num_requests and len(machine.scheduler.waiting) < 6 and chance.random() < 0.7:
            prompt = [*chance.choice(stems)[: chance.randint(1, 60)], 10 + chance.randrange(3)]
            timeout = chance.choice([None, None, 0.3])
            alive.append(machine.add(prompt, chance.randint(1, 30), priority=chance.randint(0, 2), timeout_s=timeout))
        if alive and chance.random() < 0.05:
            machine.scheduler.finish(alive.pop(chance.randrange(len(alive))), FinishReason.CANCELLED)
        machine.step(lambda i: None if chance.random() < 0.002 else 20 + (i + (chance.random() < 0.2)) % 3)
        # not between the ranks' hearing of what is kept
        if chance.random() < 0.1 and not machine.kept:
            agree(machine)
    while machine.step().kind is not PlanKind.DONE:
        pass
    agree(machine)
    assert len(machine.ended) == num_requests
    stats = machine.caches[0].stats()
    assert stats.num_sequences == 0
    assert sum(stats.free_frames) + sum(stats.cached_frames) == 24, "frames leaked"
    assert machine.hosts[0].frames == [0, 0, 0], "host memory leaked"
    return machine.scheduler.stats


def agree(machine):
    machine.scheduler.check_integrity()
    first = machine.caches[0]
    size = first.layout.page_size
    for request_id, state in machine.scheduler.running.items():
        # of what was published nothing was ever taken back, and no page was left out
        keys, tokens = [first._ledger.index.root(0)], (*state.request.prompt_ids, *state.output_ids)
        for start in range(0, state.num_computed - size + 1, size):
            keys.append(PrefixIndex.key(keys[-1], token_bytes(tokens[start : start + size])))
        published = first._get(request_id).keys
        assert published == keys[1 : len(published) + 1]
        assert len(published) == state.num_computed // size
    for cache, host in zip(machine.caches, machine.hosts, strict=True):
        cache.check_integrity()
        assert host.frames == machine.hosts[0].frames
        assert [i for i in range(machine.added) if i in host] == [
            i for i in range(machine.added) if i in machine.hosts[0]
        ]
        assert [cache.views(i) for i in cache.sequences()] == [first.views(i) for i in first.sequences()]
        parts = [s.free_frames + s.cached_frames + (s.evicted_chunks, s.published_pages) for s in [cache.stats()]]
        stats = first.stats()
        assert parts == [stats.free_frames + stats.cached_frames + (stats.evicted_chunks, stats.published_pages)]


def check_storm(stats):
    assert stats.preemptions > 0
    assert 0.1 < stats.hit_rate < 1.0


def test_random_requests_in_a_small_cache_all_end_and_every_rank_agrees():
    check_storm(storm(300, seed=1))


@pytest.mark.parametrize("host_frames", [2, 9])
def test_random_requests_of_which_some_wait_on_the_host_all_end_and_every_rank_agrees(host_frames):
    stats = storm(300, 3, host_frames)
    check_storm(stats)
    assert 5 < stats.offloads < stats.preemptions


@pytest.mark.parametrize("host_frames", [0, 5])
def test_random_requests_with_drafts_all_end_and_every_rank_agrees(host_frames):
    stats = storm(300, 5, host_frames, drafts=4)
    check_storm(stats)
    assert 0.2 < stats.acceptance_rate < 0.9


@pytest.mark.slow
def test_ten_thousand_random_requests_in_a_small_cache_all_end_and_every_rank_agrees():
    check_storm(storm(10_000, seed=2))
    check_storm(storm(10_000, seed=4, host_frames=5))
    check_storm(storm(10_000, seed=6, host_frames=5, drafts=4))


def test_the_cost_of_steps_is_learned_and_follows_a_change():
    cost, chance = StepCost(), random.Random(0)
    assert cost.predict(StepLoad(1)) is None
    assert cost.room(StepLoad(1), 0, 50.0) is None

    def time_of(load, factor):
        return factor * (
            3.0 + 0.1 * load.decode_rows + 1e-5 * load.decode_context + 0.05 * load.prefill_tokens
            + 2e-6 * load.prefill_work
        )  # fmt: skip

    for factor in (1.0, 2.0):
        for _ in range(300):
            tokens = chance.choice([0, 0, 128, 512])
            rows = chance.randint(1, 32)
            load = StepLoad(rows, rows * chance.randint(100, 9000), tokens, tokens * chance.randrange(0, 60000))
            cost.learn(load, time_of(load, factor) * chance.uniform(0.98, 1.02))
        load = StepLoad(16, 64000, 256, 256 * 30000)
        assert cost.predict(load) == pytest.approx(time_of(load, factor), rel=0.05)
        room = cost.room(StepLoad(16, 64000), 30000, 30.0)
        exact = (30.0 / factor - 3.0 - 1.6 - 0.64) / (0.05 + 2e-6 * 30000)
        assert room == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize(
    ("tokens", "slice_tokens", "work"),
    [(100, 512, 0), (1024, 512, 512 * 512), (1100, 512, 512 * 512 + 76 * 1024)],
)
def test_a_prompt_costs_its_tokens_and_their_positions_beside_others(tokens, slice_tokens, work):
    cost = StepCost()
    for rows in range(LEAST_STEPS):
        cost.learn(StepLoad(rows), 5.0)
    assert cost.prefill_ms(tokens, slice_tokens) is None, "no step with a prompt was seen"
    for count in (64, 128, 512, 512, 300):
        for start in (0, 1000, 50_000):
            cost.learn(StepLoad(2, 0, count, count * start), 5.0 + 0.05 * count + 2e-6 * count * start)
    # the fit is one of shares, and goes by factors one at a time
    for _ in range(50):
        cost.learn(StepLoad(1), 5.0)
        cost.predict(StepLoad(1))
    assert cost.prefill_ms(tokens, slice_tokens) == pytest.approx(0.05 * tokens + 2e-6 * work, rel=0.05)

"""Steps launched before the tokens of the one before are read: the same tokens, the same caches, nothing left over."""

import dataclasses
import random

import pytest
import torch

from distdec.config import BackendConfig, CacheConfig, Config, SchedulerConfig
from distdec.engine import Engine
from distdec.mesh import Mesh
from distdec.request import PENDING, FinishReason, PlanKind, Request, SamplingParams
from distdec.runner import Runner
from distdec.scheduler import Scheduler
from launch.parity import load_reference, reference_tokens

pytestmark = pytest.mark.dist

CONFIG = Config(
    cache=CacheConfig(max_tokens=400, min_chunk=4, max_chunk=16, page_size=4),
    scheduler=SchedulerConfig(prefill_slice=16, token_budget=40, max_rows=7, decode_deadline_ms=0),
    backend=BackendConfig(graphs="on"),
)
LENGTHS = (5, 37, 11, 22)
NEW = 30


def prompts():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(folder):
    model = load_reference(folder, "float32", "cpu")
    return [reference_tokens(model, prompt, NEW) for prompt in prompts()]


def run(folder, lookahead, eos, cancel_at):
    """Run the prompts; then, alone, the second one with its output and more behind it, which finds cached pages.

    The third is cancelled before step `cancel_at`. Returns tokens and reasons, plans that were pending, hit tokens and
    the cache's state.
    """
    with Mesh.create(device="cpu", timeout_s=60) as mesh:
        scheduler = dataclasses.replace(CONFIG.scheduler, lookahead=lookahead)
        runner = Runner.load(folder, mesh, dataclasses.replace(CONFIG, scheduler=scheduler))
        engine = Engine(runner, scheduler, eos_ids=eos)
        engine.cache.pool.k.fill_(float("nan"))
        engine.cache.pool.v.fill_(float("nan"))
        done, pending, steps = {}, 0, 0

        def drive():
            nonlocal pending, steps
            while True:
                if mesh.is_leader and steps == cancel_at:
                    engine.cancel(2)
                result = engine.step()
                steps += 1
                pending += result.plan.pending
                engine.cache.kv.check_integrity()
                done.update((one.request_id, (one.finish_reason, list(one.token_ids))) for one in result.completions)
                # a collective of the caller's own, which has to meet its like on every rank
                assert mesh.agree([steps] if mesh.is_leader else None) == [steps]
                if result.done:
                    return

        if mesh.is_leader:
            for prompt in prompts():
                engine.add(prompt, SamplingParams(max_new_tokens=NEW))
        drive()
        if mesh.is_leader:
            engine.add([*prompts()[1], *done[1][1], 7, 8, 9], SamplingParams(max_new_tokens=3, ignore_eos=True))
        drive()
        hits, stats = engine.scheduler.stats.hit_tokens, engine.cache.kv.stats()
        engine.close()
        return done, pending, hits, (stats.free_frames, stats.cached_frames, stats.published_pages, stats.num_sequences)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_requests_that_end_early_give_the_tokens_and_caches_of_steps_one_by_one(ranks, folder, expected, num_ranks):
    # tokens that end the first in the middle of the others, and one that never comes
    eos = (expected[0][7], 999_999)
    results = ranks(num_ranks).run(run, folder, True, eos, 20, timeout_s=120)
    done, pending, hits, state = results[0]
    assert pending > 10
    assert all(result[3] == state for result in results)
    assert state[3] == 0
    for index in (0, 1, 3):
        reason, tokens = done[index]
        end = next((at + 1 for at, token in enumerate(expected[index]) if token in eos), NEW)
        assert (reason, tokens) == (FinishReason.EOS if end < NEW else FinishReason.LENGTH, expected[index][:end])
    reason, tokens = done[2]
    assert reason is FinishReason.CANCELLED
    assert tokens == expected[2][: len(tokens)]
    # every full page of the prompt and the output but the last token, which was never fed
    assert hits == (LENGTHS[1] + len(done[1][1]) - 1) // 4 * 4
    plain = ranks(num_ranks).run(run, folder, False, eos, 20, timeout_s=120)
    assert plain[0][1] == 0
    assert [plain[0][0][i] for i in (0, 1, 3, 4)] == [done[i] for i in (0, 1, 3, 4)]
    assert plain[0][2] == hits


class Room:
    """A cache for the scheduler alone: so many more tokens."""

    def __init__(self, tokens):
        self.tokens = tokens

    def can_extend(self, needs, reserved=0):
        return sum(count for _, count in needs) <= self.tokens

    def match(self, token_ids):
        raise AssertionError("no prefixes here")

    def adopt(self, request_id, key):
        return 0

    def free(self, request_id, withdraw=False):
        pass


def scheduler_at_decode(room=1000, new=8, clock=lambda: 0.0, **sampling):
    """A scheduler that has planned the second decode step of two requests, and that plan."""
    scheduler = Scheduler(
        SchedulerConfig(max_rows=2), Room(1000), (99,), prefix_caching=False, lookahead=True, clock=clock
    )
    for request_id in (0, 1):
        params = SamplingParams(max_new_tokens=new, **sampling)
        scheduler.add(Request(request_id, (1, 2, 3), params, timeout_s=50.0))
    for _ in range(2):
        plan = scheduler.schedule()
        if plan.decode_only:
            break
        scheduler.commit(plan, {0: [5], 1: [6]})
        scheduler.cache.tokens = room
    return scheduler, plan


def test_the_next_step_has_the_same_rows_one_token_on():
    scheduler, plan = scheduler_at_decode()
    assert plan.followed
    ahead = scheduler.ahead(plan)
    assert ahead.followed
    assert ahead.pending
    assert [(row.request_id, row.start, row.token_ids) for row in ahead.rows] == [
        (0, 4, (PENDING,)),
        (1, 4, (PENDING,)),
    ]
    assert ahead.step == plan.step + 1
    scheduler.commit(plan, {0: [99], 1: [7]})
    # the first has ended with that: its row in the step under way is left out, and the next has to wait
    assert scheduler.ahead(ahead).kind is PlanKind.HOLD
    assert [event.request_id for event in scheduler.commit(ahead, {0: [1], 1: [8]})] == [1]
    assert scheduler.schedule().free == (0,)


@pytest.mark.parametrize(
    "change",
    [{"new": 2}, {"room": 3}, {"temperature": 1.0}, {"repetition_penalty": 1.1}],
    ids=["last token", "cache full", "random", "penalty"],
)
def test_a_step_that_has_to_wait_is_not_followed(change):
    _, plan = scheduler_at_decode(**change)
    assert plan.decode_only
    assert not plan.followed


def test_arrivals_ends_and_timeouts_hold_the_next_step():
    now = [0.0]
    for act in ("add", "cancel", "timeout"):
        scheduler, plan = scheduler_at_decode(clock=lambda: now[0])
        scheduler.config = dataclasses.replace(scheduler.config, max_rows=3)
        assert plan.followed
        if act == "add":
            scheduler.add(Request(2, (1, 2), SamplingParams(max_new_tokens=2)))
        elif act == "cancel":
            scheduler.finish(1, FinishReason.CANCELLED)
        else:
            now[0] = 51.0
        assert scheduler.ahead(plan).kind is PlanKind.HOLD


def test_steps_follow_each_other_as_long_as_every_row_may_go_on():
    rng, followed = random.Random(3), 0
    for _ in range(60):
        now = [0.0]
        scheduler = Scheduler(
            SchedulerConfig(max_rows=4),
            Room(10**6),
            (99,),
            prefix_caching=False,
            lookahead=True,
            clock=lambda n=now: n[0],
        )
        for request_id in range(rng.randrange(1, 6)):
            params = SamplingParams(max_new_tokens=rng.randrange(1, 14), temperature=rng.choice((0, 0, 0, 0, 0, 1)))
            timeout = rng.choice((None, 4.5, 9.5))
            scheduler.add(Request(request_id, (1,) * rng.randrange(1, 5), params, timeout_s=timeout))
        plan = scheduler.schedule()
        while plan.kind is not PlanKind.DONE:
            may = (
                plan.decode_only
                and len(plan.rows) == len(scheduler.running)
                and all(
                    state.plain
                    and state.expires > now[0]
                    # what it has with this plan's token, and with the one that would follow
                    and row.start + 2 - state.num_prompt < state.max_new
                    for row in plan.rows
                    if (state := scheduler.running[row.request_id])
                )
            )
            waits = scheduler.waiting and not scheduler._blocked and len(scheduler.running) < 4
            late = any(state.expires <= now[0] for state in scheduler.waiting)
            if not plan.pending:
                assert plan.followed == bool(may and not waits and not late)
            following = scheduler.ahead(plan) if plan.followed else None
            if following is not None:
                assert (following.kind is PlanKind.RUN) == bool(may and not waits and not late)
                followed += following.kind is PlanKind.RUN
            now[0] += rng.choice((0.0, 1.0))
            tokens = {row.request_id: [rng.choice((5, 5, 5, 99))] for row in plan.rows if row.needs_logits}
            scheduler.commit(plan, tokens)
            scheduler.check_integrity()
            hold = following is None or following.kind is PlanKind.HOLD
            plan = scheduler.schedule() if hold else following
    assert followed > 50

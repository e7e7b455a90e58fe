"""Preemption by offload on a clock of its own and real caches: when it is chosen, and how requests come back."""

import math

import pytest
from test_scheduler_load import Machine, agree, linear

from distdec.request import FinishReason
from distdec.step_cost import StepLoad


def crowded(**fields):
    """Return a machine whose cache is full of three requests, at 0.2 ms a prompt token: the last is about to go."""
    machine = Machine(linear, frames=(6, 6), page_size=4, **{"host_frames": 12, "reserve_tokens": 1} | fields)
    for i in range(3):
        machine.add(range(50 * i, 50 * i + 24 - i), new=30)
    return machine


def run_to_preemption(machine):
    for _ in range(100):
        plan = machine.step()
        if machine.scheduler.stats.preemptions:
            return plan
    raise AssertionError("nothing was preempted")


@pytest.mark.parametrize(
    ("ms_per_token", "host_frames", "known", "offloads"),
    [(0.1, 12, True, 1), (0.4, 12, True, 0), (0.1, 1, True, 0), (0.1, 12, False, 0)],
    ids=["cheaper", "dearer", "host full", "nothing known"],
)
def test_a_preempted_request_goes_to_the_host_where_that_is_cheaper(ms_per_token, host_frames, known, offloads):
    machine = crowded(host_frames=host_frames)
    machine.hosts[0].ms_per_token = ms_per_token
    if known:
        for count in (8, 64, 32, 16, 24):
            machine.scheduler.cost.learn(StepLoad(1, 0, count, 0), 5.25 + 0.2 * count)
    else:
        machine.scheduler.cost.prefill_ms = lambda num_tokens, slice_tokens: None
    plan = run_to_preemption(machine)
    assert machine.scheduler.stats.offloads == offloads
    assert plan.offload == ((2,) if offloads else ())
    assert plan.free == (2,)
    [state] = machine.scheduler.waiting
    assert (state.num_computed > 25) == bool(offloads)
    agree(machine)
    machine.run()
    assert [len(state.output_ids) for state in machine.ended.values()] == [30, 30, 30]


def parked(**fields):
    """Return a machine whose request 2 has just been parked."""
    machine = crowded(**fields)
    machine.scheduler.cost.prefill_ms = lambda num_tokens, slice_tokens: math.inf
    assert run_to_preemption(machine).offload == (2,)
    return machine


def test_what_comes_back_goes_on_where_it_was_and_its_step_teaches_nothing_about_costs():
    machine = parked()
    [state] = machine.scheduler.waiting
    computed, looked_up = state.num_computed, machine.scheduler.stats.looked_up_tokens
    assert computed % 4, "it should leave in the middle of a page"
    plan = None
    while plan is None or not plan.restore:
        seen = machine.scheduler.cost.num_steps
        plan = machine.step()
    assert 2 in plan.restore
    assert set(plan.restore) <= set(plan.admit)
    assert next(row.start for row in plan.rows if row.request_id == 2) == computed
    assert machine.scheduler.cost.num_steps == seen
    assert machine.scheduler.stats.looked_up_tokens == looked_up
    machine.step()
    for cache in machine.caches:
        assert len(cache.origin(2).keys) == cache.length(2) // 4, "pages go on where they stopped"
    machine.run()
    agree(machine)
    assert machine.hosts[1].frames == [0, 0]


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.TIMEOUT])
def test_a_request_that_ends_on_the_host_is_forgotten_on_every_rank(reason):
    machine = parked()
    if reason is FinishReason.CANCELLED:
        machine.scheduler.finish(2, reason)
    else:
        machine.scheduler.waiting[0].expires = machine.now
    plan = machine.step()
    assert (plan.free, plan.offload) == ((2,), ())
    assert machine.ended[2].finish_reason is reason
    assert [host.frames for host in machine.hosts] == [[0, 0]] * 2
    machine.run()
    agree(machine)


def test_a_request_that_never_has_room_on_its_old_ranks_is_computed_again_when_it_is_alone():
    machine = parked()
    machine.hosts[0].can_return = lambda seq_id, more, rows: False
    machine.run()
    assert len(machine.ended[2].output_ids) == 30
    assert [host.frames for host in machine.hosts] == [[0, 0]] * 2
    agree(machine)

"""What a step costs the host beside the model, counted in calls of Python functions: times depend on the machine."""

import sys

from distdec.batch import StepBuffers
from distdec.cache.kv_cache import KVCache
from distdec.cache.layout import CacheLayout
from distdec.config import SchedulerConfig
from distdec.ops.backends import get_backend
from distdec.replay import Replay
from distdec.request import Request, SamplingParams
from distdec.scheduler import Scheduler

STEPS = 32


def calls_of_a_step(num_rows):
    """Return the calls of a decode step of this many rows that is launched ahead, averaged over whole pages."""
    kv = KVCache(CacheLayout((4 * num_rows,) * 2, min_chunk=128, max_chunk=1024, page_size=16))
    config = SchedulerConfig(max_rows=num_rows, token_budget=1024, prefill_slice=1024, max_pending_prefills=num_rows)
    scheduler, replay = Scheduler(config, kv, lookahead=True), Replay(kv)
    buffers = StepBuffers(kv, 0, get_backend("reference", "cpu"), max_tokens=1024, max_rows=num_rows, max_views=1024)
    for request_id in range(num_rows):
        scheduler.add(Request(request_id, tuple(range(1, 11)), SamplingParams(max_new_tokens=99)))

    def launch(plan):
        rows = [(row.request_id, row.num_tokens) for row in plan.rows]
        kv.extend_all(rows)
        buffers.fill(rows, num_decode=plan.num_decode, q_len=1, derive=False)
        if not plan.pending:
            replay.publish(plan)
        return plan

    plan = launch(scheduler.schedule())
    while not plan.followed:
        scheduler.commit(plan, {row.request_id: [5] for row in plan.rows if row.needs_logits})
        plan = launch(scheduler.schedule())
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        for _ in range(STEPS):
            following = scheduler.ahead(plan)
            following.encode()
            launch(following)
            replay.publish(following, [5] * num_rows)
            scheduler.commit(plan, {row[0]: [5] for row in plan.rows})
            plan = following
    finally:
        sys.setprofile(None)
    kv.check_integrity()
    scheduler.check_integrity()
    return calls / STEPS


def test_a_row_more_costs_a_step_few_calls():
    few, many = calls_of_a_step(8), calls_of_a_step(64)
    # two tuples with names, a property of this test, and a sixteenth of a page
    assert (many - few) / 56 < 4
    assert few < 200

"""Padded steps of a whole model: the same tokens as without, on every rank. Without a GPU they run eagerly."""

import dataclasses

import numpy as np
import pytest
import torch

from distdec.arrival import StepStuck
from distdec.config import BackendConfig, CacheConfig, Config, ParallelConfig, SchedulerConfig
from distdec.engine import Engine
from distdec.hf.sharding import rank_sum_of
from distdec.mesh import Mesh
from distdec.request import Row, SamplingParams, StepPlan
from distdec.row_tables import Padding
from distdec.runner import Runner
from launch.parity import load_reference, reference_tokens

pytestmark = pytest.mark.dist

CONFIG = Config(
    # chunks end every 4 to 16 tokens, so that decoding crosses many
    cache=CacheConfig(max_tokens=400, min_chunk=4, max_chunk=16, page_size=2),
    scheduler=SchedulerConfig(prefill_slice=16, token_budget=40, max_rows=7, decode_deadline_ms=0),
    backend=BackendConfig(graphs="on"),
)
LENGTHS = (5, 37, 1, 22, 9)
NEW = 24


def prompts():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(folder):
    model = load_reference(folder, "float32", "cpu")
    return [reference_tokens(model, prompt, NEW) for prompt in prompts()]


def generated(folder, move_on_rank, overlap):
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        captured = []
        config = dataclasses.replace(CONFIG, parallel=ParallelConfig(overlap=overlap))
        runner = Runner.load(folder, mesh, config, progress=lambda count, total: captured.append((count, total)))
        engine = Engine(runner, config.scheduler)
        engine.cache.pool.k.fill_(float("nan"))
        engine.cache.pool.v.fill_(float("nan"))
        shapes = []
        handle = runner.model.register_forward_hook(
            lambda module, args, kwargs, out: shapes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        buffers = engine.cache.buffers
        addresses = {buffers.view_table.data_ptr()}
        steps = 0

        def on_step(result):
            nonlocal steps
            steps += 1
            if steps == 12 and mesh.rank == move_on_rank:
                buffers.reserve(tokens=500, rows=70, views=5000)
            addresses.add(buffers.view_table.data_ptr())

        # pairwise different numbers of tokens, so that the rows fall from five to one
        params = [SamplingParams(max_new_tokens=NEW - 3 * i, ignore_eos=True) for i in range(5)]
        done = engine.generate(list(zip(prompts(), params, strict=True)), on_step)
        handle.remove()
        stale = runner.graphs.stale
        engine.close()
        return [list(one.token_ids) for one in done], shapes, captured, len(addresses), stale


@pytest.mark.parametrize(("num_ranks", "moved", "overlap"), [(2, None, "none"), (3, 1, "none"), (2, 0, "store")])
def test_padded_decode_steps_give_the_same_tokens_across_chunk_borders(
    ranks, folder, expected, num_ranks, moved, overlap
):
    results = ranks(num_ranks).run(generated, folder, moved, overlap, timeout_s=120)
    for rank, (tokens, shapes, captured, addresses, stale) in enumerate(results):
        assert tokens == [expected[i][: NEW - 3 * i] for i in range(5)]
        assert captured == [(i, 6) for i in range(1, 7)], "1, 2, 4 and 7 rows, and 0 and 7 with 40 tokens of prompts"
        # five rows run as seven, three as four
        # the prompt of one token is a decode row from the start, beside slices of the others
        assert set(shapes) == {1, 2, 4, 7, 47}
        assert shapes == results[0][1]
        assert stale == (rank == moved)
        assert addresses == 1 + (rank == moved), "the tables moved"


def test_padding_rows_change_no_bit_of_the_others(folder):
    """The same step with 3 rows, alone and padded to 4 and 7 between poisoned rows of the pool."""
    mesh = Mesh.single()
    runner = Runner.load(folder, mesh, CONFIG)
    kv = runner.cache.kv
    runner.cache.pool.k.fill_(float("nan"))
    runner.cache.pool.v.fill_(float("nan"))
    step = 0
    for seq, prompt in enumerate(prompts()[:3]):
        kv.adopt(seq)
        plan = StepPlan(step, rows=(Row(seq, 0, tuple(prompt), False),))
        runner.run(plan, runner.cache.begin_step([(seq, len(prompt))], q_len=1))
    rows = tuple(Row(seq, LENGTHS[seq], (40 + seq,), True) for seq in range(3))
    plan = StepPlan(1, rows=rows)
    graphs, logits = runner.graphs, []
    for pad in (0, 4, 7):
        for seq in range(3):
            kv.truncate(seq, LENGTHS[seq])
        runner.graphs = graphs if pad else None
        graphs.padding = lambda plan, pad=pad: Padding(pad)
        batch = runner.cache.begin_step([(seq, 1) for seq in range(3)], q_len=1, pad=Padding(pad), derive=not pad)
        assert batch.num_tokens == (pad or 3)
        logits.append(runner.run(plan, batch).clone())
        assert logits[-1].shape[0] == 3
    assert logits[0].isfinite().all()
    for padded in logits[1:]:
        torch.testing.assert_close(padded, logits[0], rtol=1e-5, atol=1e-5)
    runner.graphs = graphs
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.run(plan, batch)


def test_a_step_with_prompts_gives_the_logits_it_gives_without_padding(folder):
    """Decode rows, a slice of one token without logits, one that ends a prompt and one that does not."""
    runner = Runner.load(folder, Mesh.single(), CONFIG)
    kv, graphs = runner.cache.kv, runner.graphs
    cached, new = (5, 22, 9, 0, 16), ((40,), (41,), (7,), tuple(range(11)), tuple(range(9)))
    rows = tuple(Row(i, cached[i], new[i], i not in (2, 4)) for i in range(5))
    plan = StepPlan(0, rows=rows)
    assert runner.padding(plan) == Padding(7, 4, 40)
    for pool in (runner.cache.pool.k, runner.cache.pool.v):
        pool.fill_(float("nan"))
    for seq, length in enumerate(cached):
        kv.adopt(seq)
        if length:
            first = StepPlan(0, rows=(Row(seq, 0, tuple(prompts()[1][:length]), False),))
            batch = runner.cache.begin_step([(seq, length)], q_len=1, pad=runner.padding(first), derive=False)
            runner.run(first, batch)
    logits, keys = [], []
    for padded in (False, True):
        for seq, length in enumerate(cached):
            kv.truncate(seq, length)
        runner.graphs = graphs if padded else None
        pad = runner.padding(plan)
        batch = runner.cache.begin_step(
            [(i, len(ids)) for i, ids in enumerate(new)], q_len=1, pad=pad, derive=not padded
        )
        assert batch.num_tokens == (47 if padded else 23)
        logits.append(runner.run(plan, batch).clone())
        assert logits[-1].shape[0] == 3
        slots = [kv.slots(i, cached[i], cached[i] + len(ids), 0) for i, ids in enumerate(new)]
        keys.append(runner.cache.pool.k[:, torch.from_numpy(np.concatenate(slots))].clone())
    assert logits[0].isfinite().all()
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys[1], keys[0], rtol=1e-5, atol=1e-5)
    runner.close()


def test_padding_follows_from_the_plan_alone(folder):
    runner = Runner.load(folder, Mesh.single(), CONFIG)
    decode, slice_, last = Row(0, 5, (1,), True), Row(1, 0, (1, 2), True), Row(2, 0, (3,), False)
    cases = {
        (decode,) * 3: Padding(4),
        (decode, last): Padding(2),
        (slice_,): Padding(0, 4, 40),
        (decode, slice_, slice_): Padding(7, 4, 40),
        (*(decode,) * 7, *(slice_,) * 4): Padding(7, 4, 40),
        # more rows of a kind, or tokens, than any captured step has
        (decode, *(slice_,) * 5): Padding(),
        (decode,) * 8: Padding(),
        (Row(1, 0, (1,) * 41, False),): Padding(),
        (): Padding(),
    }
    for rows, padding in cases.items():
        assert runner.padding(StepPlan(0, rows=rows)) == padding, rows
    runner.capture(7, 40)
    assert runner.padding(StepPlan(0, rows=(decode, slice_))) == Padding(), "prompts were left out"
    assert runner.padding(StepPlan(0, rows=(decode,))) == Padding(1)
    off = Runner.load(folder, Mesh.single(), dataclasses.replace(CONFIG, backend=BackendConfig()))
    assert off.graphs is None
    assert off.padding(StepPlan(0, rows=(decode,) * 3)) == Padding()


def test_steps_with_drafts_are_captured_beside_those_without(folder):
    seen = []
    scheduler = dataclasses.replace(CONFIG.scheduler, num_draft_tokens=3)
    config = dataclasses.replace(CONFIG, scheduler=scheduler)
    runner = Runner.load(folder, Mesh.single(), config, progress=lambda count, total: seen.append(total))
    assert seen[0] == 6 + 4 + 1, "1, 2, 4 and 7 rows, and 7 with 40 tokens of prompts, once more"
    decode, drafted, slice_ = Row(0, 5, (1,), True), Row(1, 5, (1, 2, 3), True, 2), Row(2, 0, (1, 2), True)
    cases = {
        (decode,) * 3: Padding(4),
        (drafted,): Padding(1, q_len=4),
        (decode, decode, drafted): Padding(4, q_len=4),
        (decode, drafted, slice_): Padding(7, 4, 40, 4),
        # a slice of one token stands behind the drafts, as any other
        (decode, drafted, Row(2, 0, (1,), False)): Padding(7, 4, 40, 4),
        (decode, slice_): Padding(7, 4, 40),
        (Row(1, 5, (1, 2, 3, 4, 5), True, 4),): Padding(),
    }
    for rows, padding in cases.items():
        assert runner.padding(StepPlan(0, rows=rows)) == padding, rows
    runner.close()


def test_logits_of_every_draft_come_out_in_the_order_of_the_rows(folder):
    """A decode row, rows of two drafts and of one, a whole prompt; alone, padded, and token by token."""
    scheduler = dataclasses.replace(CONFIG.scheduler, num_draft_tokens=3)
    runner = Runner.load(folder, Mesh.single(), dataclasses.replace(CONFIG, scheduler=scheduler))
    kv, graphs = runner.cache.kv, runner.graphs
    texts = [prompts()[1][:length] for length in (6, 9, 11, 5)]
    plan = StepPlan(
        0,
        rows=(
            Row(0, 5, tuple(texts[0][5:]), True),
            Row(1, 6, tuple(texts[1][6:]), True, 2),
            Row(2, 9, tuple(texts[2][9:]), True, 1),
            Row(3, 0, tuple(texts[3]), True),
        ),
    )
    whole = []
    for seq, text in enumerate(texts):
        kv.adopt(seq)
        for at in range(len(text)):
            # one by one, so that each has its logits
            one = StepPlan(0, rows=(Row(seq, at, (text[at],), True),))
            batch = runner.cache.begin_step([(seq, 1)], q_len=1, pad=runner.padding(one), derive=False)
            whole.append(runner.run(one, batch).clone())
    wanted = [5, *range(6 + 6, 6 + 9), *range(15 + 9, 15 + 11), 26 + 4]
    for padded in (False, True):
        for row in plan.rows:
            kv.truncate(row.request_id, row.start)
        runner.graphs = graphs if padded else None
        pad = runner.padding(plan)
        assert pad == (Padding(7, 4, 40, 4) if padded else Padding())
        batch = runner.cache.begin_step(
            [(row.request_id, row.num_tokens) for row in plan.rows],
            q_len=4 if padded else 3,
            num_decode=3,
            pad=pad,
            derive=not padded,
        )
        assert batch.num_tokens == (7 * 4 + 40 if padded else 3 * 3 + 5)
        got = runner.run(plan, batch)
        torch.testing.assert_close(got, torch.cat([whole[i] for i in wanted]), rtol=1e-4, atol=1e-4)
    runner.graphs = graphs
    with pytest.raises(ValueError, match="the first 2 rows may have 2 tokens at most"):
        runner.cache.begin_step([(0, 1), (1, 3)], q_len=2, num_decode=2)
    runner.close()


class WatchedSum:
    """Stands in for the one-kernel sum and notes what happens to it, and whether the graphs are still there then."""

    def __init__(self, runner):
        self.runner, self.mesh, self.seen = runner, runner.mesh, []

    def __call__(self, y):
        self.seen.append("sum")
        out = y.clone()
        torch.distributed.all_reduce(out, group=self.mesh.group)
        return out

    def check(self):
        self.seen.append("check")
        if self.seen.count("check") > 3:
            raise RuntimeError("a rank was lost")

    def close(self):
        self.seen.append("closed after the graphs" if self.runner.graphs._graphs._closed else "closed too early")


def watched(folder):
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        runner = Runner.load(folder, mesh, CONFIG)
        total = rank_sum_of(runner.model)
        reason = total.reason
        kernel = WatchedSum(runner)
        total.use(kernel)
        engine = Engine(runner, CONFIG.scheduler)
        with pytest.raises(RuntimeError, match="a rank was lost"):
            engine.generate([(prompts()[0], SamplingParams(max_new_tokens=NEW, ignore_eos=True))])
        runner.close()
        return reason, kernel.seen


def test_the_sum_is_checked_before_each_step_and_closed_after_the_graphs(ranks, folder):
    for reason, seen in ranks(2).run(watched, folder, timeout_s=120):
        assert "one_shot sum is not possible here: no CUDA device" in reason
        # a prompt of one slice, then decode steps of equally many sums
        first, second, third, last = [i for i, what in enumerate(seen) if what == "check"]
        assert first == 0 and second == third - second == last - third
        assert seen[last + 1 :] == ["closed after the graphs"]


def test_nothing_waits_for_a_device_that_was_given_up(folder, monkeypatch):
    runner = Runner.load(folder, Mesh.single(), CONFIG)
    waits = []
    monkeypatch.setattr(runner._patience, "wait_for_all", waits.append)
    closed = []
    monkeypatch.setattr(runner.graphs, "close", lambda: closed.append("graphs"))
    monkeypatch.setattr(runner.attention.merge, "close", lambda: closed.append("merge"), raising=False)
    runner._patience.stuck = True
    runner.close()
    assert closed == waits == []
    # one that still runs is waited for, within the timeout, before anything is closed
    runner._patience.stuck = False
    waiting = StepStuck("not in time")

    def never(device):
        raise waiting

    monkeypatch.setattr(runner._patience, "wait_for_all", never)
    with pytest.raises(StepStuck):
        runner.close()
    assert closed == []
    monkeypatch.setattr(runner._patience, "wait_for_all", waits.append)
    runner.close()
    assert closed == ["graphs", "merge"]
    assert waits == [torch.device("cpu")]

"""Graphs by key: picking, static inputs, staleness; on CPU the callables run in place of graphs."""

import pytest
import torch

from distdec.graphs import GraphKey, StepGraphs, mixed_buckets, row_buckets

ROWS = (1, 4, 8)


def made(calls, **how):
    """Graphs of three row counts whose callable doubles its input and notes its rows in `calls`."""
    graphs = StepGraphs("cpu", **how)

    def double(x):
        calls.append(x.shape[0])
        return x * 2

    graphs.capture({GraphKey(rows): (double, (torch.zeros(rows, 3),)) for rows in ROWS})
    return graphs


def test_every_callable_runs_before_any_rank_passes_the_barrier():
    calls, seen = [], []
    made(calls, barrier=lambda: seen.append(sorted(calls)))
    assert seen[0] == list(ROWS)
    assert len(seen) == 2


def test_the_smallest_bucket_that_holds_the_rows_is_picked():
    graphs = made([])
    graphs.capture(
        {GraphKey(8, q_len=4, schedule="fixed", splits=s): (torch.neg, (torch.zeros(8, 3),)) for s in (2, 6)}
    )
    assert [graphs.pick(rows).rows for rows in (1, 2, 4, 5, 8)] == [1, 4, 4, 8, 8]
    assert graphs.pick(9) is None
    assert graphs.pick(3, q_len=4) is None
    assert graphs.pick(3, 4, "fixed", 3) == GraphKey(8, 4, "fixed", 6)
    assert graphs.pick(3, 4, "fixed", 7) is None
    assert GraphKey(4) in graphs and GraphKey(5) not in graphs


def test_replay_reads_new_inputs_from_the_static_tensors():
    graphs = made([])
    x = torch.randn(3, 3)
    out = graphs.replay(graphs.pick(3), x)
    assert out.shape == (4, 3)
    assert torch.equal(out[:3], x * 2)


def test_inputs_that_do_not_fit_are_refused_before_they_are_copied():
    graphs = made([])
    with pytest.raises(ValueError, match="at most 4 leading rows, got 5"):
        graphs.replay(GraphKey(4), torch.zeros(5, 3))
    with pytest.raises(ValueError, match=r"takes \[4, 3\] torch.float32, got \[4, 2\]"):
        graphs.replay(GraphKey(4), torch.zeros(4, 2))
    with pytest.raises(ValueError, match="float64"):
        graphs.replay(GraphKey(4), torch.zeros(4, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="takes 1 inputs, got 2"):
        graphs.replay(GraphKey(4), torch.zeros(4, 3), torch.zeros(4, 3))
    with pytest.raises(KeyError, match="rows=5"):
        graphs.replay(GraphKey(5), torch.zeros(5, 3))
    with pytest.raises(ValueError, match="captured already"):
        graphs.capture({GraphKey(4): (torch.neg, (torch.zeros(4, 3),))})


def test_moved_static_tensors_make_the_graphs_stale():
    generation = [7]
    graphs = made([], moved=lambda: generation[0])
    graphs.replay(GraphKey(1), torch.zeros(1, 3))
    generation[0] = 8
    with pytest.raises(RuntimeError, match="generation 7, now 8"):
        graphs.replay(GraphKey(1), torch.zeros(1, 3))


def test_buffers_that_grow_while_warming_up_do_not_make_the_first_graphs_stale():
    generation = [0]

    def grows(x):
        generation[0] = 1
        return x

    graphs = StepGraphs("cpu", moved=lambda: generation[0])
    graphs.capture({GraphKey(2): (grows, (torch.zeros(2),))})
    assert torch.equal(graphs.replay(GraphKey(2), torch.ones(2)), torch.ones(2))


def test_a_failed_check_stops_the_replay():
    calls = []

    def lost():
        raise RuntimeError("rank 1 was lost")

    graphs = made(calls, checks=[lost])
    before = len(calls)
    with pytest.raises(RuntimeError, match="rank 1 was lost"):
        graphs.replay(GraphKey(1), torch.zeros(1, 3))
    assert len(calls) == before


def test_closed_graphs_are_of_no_use_and_let_go_of_what_they_kept():
    kept = torch.zeros(1)
    graphs = made([], keep=[kept])
    graphs.close()
    graphs.close()
    assert graphs.keys == []
    with pytest.raises(RuntimeError, match="closed"):
        graphs.replay(GraphKey(1), torch.zeros(1, 3))


def test_row_buckets_end_at_the_largest_batch():
    assert row_buckets(1) == [1]
    assert row_buckets(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert row_buckets(256) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    with pytest.raises(ValueError, match="got 0"):
        row_buckets(0)


def test_a_step_with_prompts_takes_the_fewest_tokens_then_the_fewest_rows():
    graphs = StepGraphs("cpu")
    x = torch.zeros(1)
    keys = [GraphKey(r, prefill_tokens=t) for r in (0, 16, 40) for t in (0, 128, 256)]
    graphs.capture({key: (lambda x: x, (x,)) for key in keys})
    picked = [graphs.pick(rows, prefill_tokens=tokens) for rows, tokens in ((0, 1), (1, 128), (17, 129), (40, 256))]
    assert [(key.rows, key.prefill_tokens) for key in picked] == [(0, 128), (16, 128), (40, 256), (40, 256)]
    assert graphs.pick(3) == GraphKey(16), "no prompts, no prefill tokens"
    assert graphs.pick(41, prefill_tokens=1) is None
    assert graphs.pick(1, prefill_tokens=257) is None


def test_mixed_buckets_are_few_and_reach_the_largest_step():
    assert mixed_buckets(40, 300) == [(r, t) for r in (0, 16, 40) for t in (128, 256, 300)]
    assert mixed_buckets(7, 40) == [(0, 40), (7, 40)]
    assert mixed_buckets(64, 1024)[-1] == (64, 1024)
    assert mixed_buckets(256, 16384)[-1] == (256, 2048)
    assert len(mixed_buckets(256, 16384)) == 4 * 5

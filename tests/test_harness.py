"""The rank pool itself: failures are told in full and do not spoil the next test."""

import os
import signal
import time

import harness
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.dist


def sum_of_ranks(scale):
    total = torch.tensor([dist.get_rank() * scale])
    dist.all_reduce(total)
    return int(total)


def return_rank_and_size():
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def raise_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("planted fault")
    dist.barrier()


def die_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def exit_on(rank):
    if dist.get_rank() == rank:
        os._exit(7)


def sleep_on(rank):
    if dist.get_rank() == rank:
        time.sleep(60)


def draw():
    return torch.rand(3)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 2])
def test_results_come_back_in_rank_order(ranks, num_ranks):
    assert ranks(num_ranks).run(sum_of_ranks, 10) == [10 * sum(range(num_ranks))] * num_ranks
    answers = ranks(num_ranks).run(return_rank_and_size)
    assert [a[:2] for a in answers] == [(rank, num_ranks) for rank in range(num_ranks)]
    assert len({a[2] for a in answers}) == num_ranks


def test_processes_are_reused(ranks):
    first = ranks(2).run(return_rank_and_size)
    assert ranks(2).run(return_rank_and_size) == first


def test_every_run_starts_from_the_same_seed(ranks):
    first, second = ranks(2).run(draw), ranks(2).run(draw)
    assert all(torch.equal(first[0], other) for other in [first[1], *second])


@pytest.mark.parametrize(
    ("body", "culprit", "told"),
    [(raise_on, 1, "planted fault"), (die_on, 2, "exit code -9"), (exit_on, 0, "exit code 7")],
)
def test_a_failing_rank_is_named_and_the_pool_recovers(ranks, body, culprit, told):
    old = ranks(3).run(return_rank_and_size)
    started = time.monotonic()
    with pytest.raises(harness.RanksFailed, match=told) as error:
        ranks(3).run(body, culprit)
    assert time.monotonic() - started < harness.GRACE_S + 3
    lines = str(error.value).splitlines()
    assert f"rank {culprit} " in lines[0]
    assert all(any(line.startswith(f"--- rank {rank}:") for line in lines) for rank in range(3))
    new = ranks(3).run(return_rank_and_size)
    assert not {a[2] for a in old} & {a[2] for a in new}


def test_a_rank_that_hangs_is_killed_at_the_timeout(ranks):
    with pytest.raises(harness.RanksFailed, match=r"rank 1 hung"):
        ranks(2).run(sleep_on, 1, timeout_s=0.5)
    assert ranks(2).run(sum_of_ranks, 1) == [1, 1]


def test_a_body_that_cannot_be_sent_says_so_at_once(ranks):
    with pytest.raises(Exception, match=r"[Cc]an't (pickle|get)|local object"):
        ranks(2).run(lambda: None)
    assert ranks(2).run(sum_of_ranks, 1) == [1, 1]

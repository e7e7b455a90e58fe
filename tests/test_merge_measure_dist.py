"""Choosing a merge from times: agreement between ranks whose clocks differ, with timers that are made up."""

import os
import tempfile

import pytest
import torch
from slab_ranks import shared_slabs

import distdec.merge as module
from distdec.merge import make_merge
from distdec.merge_choice import choose_mode
from distdec.merge_measure import FURTHER_TOKENS, choose, measure
from distdec.mesh import Mesh
from distdec.one_shot import OneShotMerge
from distdec.ops.partial import Partial

SIZES = [1, 8]


def test_the_typical_size_decides():
    table = {"a": [5.0, 9.0], "b": [7.0, 8.0]}
    assert choose(table, SIZES, 8, "here").mode == "b"
    assert choose(table, SIZES, 1, "here").mode == "a"
    assert choose(table, SIZES, 8, "here").reason == (
        "b: measured us at 1 / 8 tokens (8 typical) here: a 5.0 / 9.0, b 7.0 / 8.0"
    )


def test_ties_go_by_name_and_what_was_not_measured_cannot_win():
    table = {"c": [4.0, 4.0], "b": [4.0, 4.0], "a": "not measured on ranks [1]"}
    choice = choose(table, SIZES, 8, "here")
    assert choice.mode == "b"
    assert "a not measured on ranks [1]" in choice.reason
    assert choose({"a": "not measured on ranks [0, 1]"}, SIZES, 8, "here") is None


class Timer:
    """Counts the calls it is asked to time; the times come from a table by mode of this rank."""

    def __init__(self, times, broken=()):
        self.times, self.broken, self.order, self.made = times, broken, [], {}

    def __call__(self, call):
        # the merge that is timed, from the closure of the call
        merge = next(cell.cell_contents for cell in call.__closure__ if hasattr(cell.cell_contents, "mode"))
        call()
        if merge.mode in self.broken:
            raise RuntimeError("no room for a graph")
        self.order.append(merge.mode)
        self.made[merge.mode] = merge
        return lambda: self.times[merge.mode]


# each rank would choose for itself: rank 0 all_gather, rank 1 all_reduce; the slowest count: 30 against 20
REPLICATED = ({"all_gather": 5.0, "all_reduce": 20.0}, {"all_gather": 30.0, "all_reduce": 9.0})
SCATTERED = ({"all_to_all": 5.0, "reduce_scatter": 6.0}, {"all_to_all": 5.5, "reduce_scatter": 3.0})


def choose_together(times, replicated, broken):
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        timer = Timer(times[mesh.rank], broken[mesh.rank])
        merge = make_merge(
            "auto", mesh, replicated=replicated, num_tokens=8 + mesh.rank, num_heads=4, head_dim=8, timer=timer
        )
        before = merge.calls
        merged = merge(Partial(torch.ones(2, 4, 8), torch.zeros(2, 4)))
        return merge.mode, merge.reason, timer.order, before, merged.out.shape[1]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("times", "replicated", "want", "told"),
    [
        (REPLICATED, True, "all_reduce", "all_gather 30.0 / 30.0 / 30.0 / 30.0, all_reduce 20.0 / 20.0 / 20.0 / 20.0"),
        (SCATTERED, False, "all_to_all", "all_to_all 5.5 / 5.5 / 5.5 / 5.5, reduce_scatter 6.0 / 6.0 / 6.0 / 6.0"),
    ],
)
def test_ranks_with_different_times_choose_the_same(ranks, times, replicated, want, told):
    answers = ranks(2).run(choose_together, times, replicated, ((), ()))
    assert answers[0] == answers[1]
    mode, reason, order, calls, _ = answers[0]
    assert (mode, calls) == (want, 0)
    assert reason.startswith(f"{want}: measured us at 1 / 8 / 64 / 256 tokens (8 typical) of 4 heads x 8 over 2 ranks")
    assert told in reason
    assert "; not one_shot" in reason and "no CUDA device (rank 0)" in reason
    assert order == [mode for mode in sorted(times[0]) for _ in range(1 + len(FURTHER_TOKENS))]


@pytest.mark.dist
def test_a_mode_that_one_rank_cannot_time_is_nobodys_choice(ranks):
    answers = ranks(2).run(choose_together, REPLICATED, True, ((), ("all_reduce",)))
    assert {answer[0] for answer in answers} == {"all_gather"}
    assert all("all_reduce not measured on ranks [1]" in answer[1] for answer in answers)


@pytest.mark.dist
def test_the_estimate_decides_where_nothing_could_be_timed(ranks):
    answers = ranks(2).run(choose_together, REPLICATED, True, (("all_gather", "all_reduce"), ("all_gather",)))
    want = choose_mode(True, 8, 4, 8, 2, "cpu").mode
    for mode, reason, *_ in answers:
        assert mode == want
        assert "estimated" in reason and "all_gather not measured on ranks [0, 1]" in reason


def choose_one_shot(path, one_shot_us):
    """`auto` as if `one_shot` were possible: its slabs are in shared host memory, too small for 64 tokens."""
    made = []

    def build(mode, mesh, wire, reason):
        made.append(OneShotMerge(mesh, map_slabs=shared_slabs(path), capacity_bytes=4096, timeout_s=20.0))
        return made[-1]

    saved, module.BUILDERS = module.BUILDERS, {"one_shot": build}
    try:
        with Mesh.create(device="cpu", timeout_s=20) as mesh:
            timer = Timer({"all_gather": 9.0, "all_reduce": 20.0, "one_shot": one_shot_us[mesh.rank]})
            merge = make_merge("auto", mesh, num_tokens=2, num_heads=2, head_dim=16, timer=timer)
            # a slab that nobody uses is given back
            open_slabs = bool(made[0]._slabs._memory)
            merged = merge(Partial(torch.ones(2, 2, 16), torch.zeros(2, 2)))
            made[0].close()
            return merge.mode, merge.reason, open_slabs, merged.out
    finally:
        module.BUILDERS = saved


@pytest.mark.dist
@pytest.mark.parametrize(("one_shot_us", "want"), [((4.0, 5.0), "one_shot"), ((4.0, 12.0), "all_gather")])
def test_one_shot_competes_and_its_slab_goes_where_it_loses(ranks, one_shot_us, want):
    with tempfile.TemporaryDirectory() as directory:
        answers = ranks(2).run(choose_one_shot, os.path.join(directory, "slab"), one_shot_us)
    for mode, reason, open_slabs, out in answers:
        assert mode == want
        assert f"one_shot {one_shot_us[1]:.1f}" in reason
        assert open_slabs == (want == "one_shot")
        assert torch.equal(out, torch.ones(2, 32))


def count_calls():
    """What measuring costs in collectives is the same on every rank, and each rank hears the same table."""
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        merge = make_merge("all_gather", mesh)
        calls = []

        def timer(call):
            call()
            return lambda: calls.append(merge.calls) or float(mesh.rank)

        return measure({"all_gather": merge}, [1, 3], 2, 4, mesh, timer), calls, merge.calls


@pytest.mark.dist
def test_the_table_is_the_slowest_ranks_everywhere(ranks):
    assert ranks(3).run(count_calls) == [({"all_gather": [2.0, 2.0]}, [1, 2], 0)] * 3

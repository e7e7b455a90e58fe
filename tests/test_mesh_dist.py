"""The mesh over real gloo ranks: places, groups, agreement on integers, checks that name the odd one out."""

import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
import torch.distributed as dist

from distdec.mesh import MAX_AGREED, Mesh, all_gather, reduce_scatter

pytestmark = pytest.mark.dist


def places(kvp, tp, members=None):
    mesh = Mesh.create(kvp, tp, ranks=members, device="cpu", timeout_s=20)
    if mesh is None:
        return None
    with mesh:
        on_kvp = torch.empty(mesh.kvp_size, dtype=torch.int64)
        on_tp = torch.empty(mesh.tp_size, dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            all_gather(on_kvp, torch.tensor([dist.get_rank()]), mesh.kvp_group)
            all_gather(on_tp, torch.tensor([dist.get_rank()]), mesh.tp_group)
        assert dist.get_rank(mesh.kvp_group) == mesh.kvp_rank
        assert dist.get_rank(mesh.tp_group) == mesh.tp_rank
        assert dist.get_backend(mesh.control_group) == "gloo"
        mesh.barrier()
        return mesh.rank, mesh.kvp_rank, mesh.tp_rank, on_kvp.tolist(), on_tp.tolist()


def test_kvp_runs_fastest(ranks):
    assert ranks(6).run(places, 2, 3) == [
        (0, 0, 0, [0, 1], [0, 2, 4]),
        (1, 1, 0, [0, 1], [1, 3, 5]),
        (2, 0, 1, [2, 3], [0, 2, 4]),
        (3, 1, 1, [2, 3], [1, 3, 5]),
        (4, 0, 2, [4, 5], [0, 2, 4]),
        (5, 1, 2, [4, 5], [1, 3, 5]),
    ]


@pytest.mark.parametrize(("num_ranks", "kvp", "tp"), [(2, 2, 1), (2, 1, 2), (3, None, 1), (4, 2, 2), (4, None, 4)])
def test_every_axis_has_its_ranks(ranks, num_ranks, kvp, tp):
    kvp = kvp or num_ranks // tp
    for rank, place in enumerate(ranks(num_ranks).run(places, kvp, tp)):
        tp_rank, kvp_rank = divmod(rank, kvp)
        on_kvp = [tp_rank * kvp + i for i in range(kvp)]
        assert place == (rank, kvp_rank, tp_rank, on_kvp, [i * kvp + kvp_rank for i in range(tp)])


def test_a_mesh_may_span_a_subset_and_the_others_get_none(ranks):
    assert ranks(4).run(places, 2, 1, [1, 3]) == [None, (0, 0, 0, [1, 3], [1]), None, (1, 1, 0, [1, 3], [3])]


def two_replicas(num_steps):
    first = Mesh.create(ranks=[0, 1], device="cpu", timeout_s=20)
    second = Mesh.create(ranks=[2, 3], device="cpu", timeout_s=20)
    mesh = first or second
    steps = num_steps if mesh is first else 0  # the second replica is idle, then does one step
    seen = [mesh.agree([step, dist.get_rank()]) for step in range(steps)]
    dist.barrier()
    seen.append(mesh.agree([99, dist.get_rank()]))
    mesh.close()
    return seen


def test_an_idle_replica_does_not_disturb_a_busy_one(ranks):
    busy = [[0, 0], [1, 0], [2, 0], [99, 0]]
    assert ranks(4).run(two_replicas, 3) == [busy, busy, [[99, 2]], [[99, 2]]]


def refused(kvp, tp, members):
    with pytest.raises(ValueError) as error:
        Mesh.create(kvp, tp, ranks=members, device="cpu")
    return str(error.value)


def test_wrong_degrees_are_refused_on_every_rank_with_all_numbers(ranks):
    for told in ranks(4).run(refused, 4, 2, None):
        assert "is not the number of ranks, 4 (ranks=4, kvp=4, tp=2); legal (kvp, tp): (4, 1), (2, 2), (1, 4)" in told
    for told in ranks(4).run(refused, 2, 1, [2, 1]):
        assert "ascending world ranks from 0 to 3, got [2, 1]" in told
    for told in ranks(4).run(refused, 2, 1, [3, 4]):
        assert "got [3, 4]" in told


def told_about_hosts(kvp, tp, ranks_per_host):
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_host)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with Mesh.create(kvp, tp, device="cpu", timeout_s=20) as mesh:
                mesh.barrier()
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
    return [str(w.message) for w in told if issubclass(w.category, RuntimeWarning)]


def test_rank_0_warns_of_kvp_groups_that_span_hosts(ranks):
    assert ranks(4).run(told_about_hosts, 2, 2, 2) == [[]] * 4
    assert ranks(4).run(told_about_hosts, 4, 1, 4) == [[]] * 4
    [told], *others = ranks(4).run(told_about_hosts, 4, 1, 2)
    assert "1 of 1 kvp groups span hosts of 2 ranks, the first is [0, 1, 2, 3]" in told
    assert others == [[]] * 3


def agree_on(lengths):
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        plans = [[7 * i - (1 << 62) for i in range(length)] for length in lengths]
        return [mesh.agree(plan if mesh.is_leader else None) == plan for plan in plans]


def test_agreed_integers_arrive_whole_at_every_length(ranks):
    lengths = [0, 1, 508, 509, 510, 5000, 3]
    assert ranks(3).run(agree_on, lengths) == [[True] * len(lengths)] * 3


def agree_badly(values):
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        with pytest.raises(ValueError, match="integers of 64 bits"):
            mesh.agree(values if mesh.is_leader else None)
        return mesh.agree([5] if mesh.is_leader else [6])


@pytest.mark.parametrize("values", [None, [0.5], [1 << 63], range(MAX_AGREED + 1)])
def test_a_refused_plan_is_refused_everywhere_and_the_next_one_works(ranks, values):
    assert ranks(2).run(agree_badly, values) == [[5], [5]]


def agree_out_of_step():
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        mesh._num_agreed += mesh.rank == 1
        if mesh.rank == 1:
            with pytest.raises(RuntimeError, match="rank 1 enters agreement 1, rank 0 sent agreement 0"):
                mesh.agree()
            return True
        return mesh.agree([1])


def test_a_rank_out_of_step_notices(ranks):
    assert ranks(2).run(agree_out_of_step) == [[1], True]


def agree_damaged():
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        if not mesh.is_leader:
            with pytest.raises(RuntimeError, match="arrived damaged"):
                mesh.agree()
            return True
        words = torch.tensor([0, 2, 12345, 8, 9] + [0] * 507)
        dist.broadcast(words, src=0, group=mesh.control_group)
        return True


def test_damaged_words_are_noticed(ranks):
    assert ranks(2).run(agree_damaged) == [True, True]


def check(name, digests, kvp, tp, axis):
    with Mesh.create(kvp, tp, device="cpu", timeout_s=20) as mesh:
        mesh.check_same("settled", b"same")
        try:
            mesh.check_same(name, digests[mesh.rank], axis)
        except RuntimeError as error:
            return str(error)
        return None


def test_check_same_names_the_key_and_the_ranks_on_every_rank(ranks):
    told = ranks(4).run(check, "cache.page_size", [b"16", b"32", b"16", b"8"], 4, 1, None)
    assert told == ["'cache.page_size' is not the same on all ranks: ranks [1, 3] differ from rank 0"] * 4
    assert ranks(4).run(check, "cache.page_size", [b"16"] * 4, 4, 1, None) == [None] * 4


def test_check_same_along_kvp_lets_heads_differ(ranks):
    assert ranks(4).run(check, "merge output", [b"a", b"a", b"b", b"b"], 2, 2, "kvp") == [None] * 4
    told = ranks(4).run(check, "merge output", [b"a", b"a", b"b", b"c"], 2, 2, "kvp")
    assert told == ["'merge output' is not the same on all ranks: ranks [3] differ from rank 2"] * 4


def check_different_things():
    with Mesh.create(device="cpu", timeout_s=20) as mesh, pytest.raises(RuntimeError, match="check something else"):
        mesh.check_same("config" if mesh.is_leader else "weights", b"")
    return True


def test_checks_of_different_things_are_told_apart(ranks):
    assert ranks(2).run(check_different_things) == [True, True]


def close_only_ours():
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    mesh = Mesh.create(2, 2, device="cpu", timeout_s=20)
    during = len(groups)
    mesh.close()
    mesh.close()
    return during - before, len(groups) - before, dist.is_initialized()


def test_close_drops_what_it_made_and_nothing_else(ranks):
    assert ranks(4).run(close_only_ours) == [(4, 0, True)] * 4


def scatter_sums():
    output = torch.empty(2, dtype=torch.float32)
    mine = torch.arange(6, dtype=torch.float32) * (dist.get_rank() + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reduce_scatter(output, mine, dist.group.WORLD)
    return output.tolist()


def test_reduce_scatter_keeps_this_ranks_stretch(ranks):
    assert ranks(3).run(scatter_sums) == [[0, 6], [12, 18], [24, 30]]


SCRIPT = """
    import torch.distributed as dist
    from distdec.mesh import Mesh
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        print(f"agreed on {mesh.agree([mesh.world_size] if mesh.is_leader else None)}\\n", end="", flush=True)
    assert not dist.is_initialized()
"""


def test_torchrun_starts_and_ends_a_world(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(textwrap.dedent(SCRIPT))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(launch, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agreed on [2]\n") == 2

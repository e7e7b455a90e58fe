"""The sum over ranks without a GPU: its kernel in the interpreter, between processes, in layers, and its refusals."""

import math
import os
import tempfile

import pytest
import torch
from slab_ranks import SimulatedSlabs, shared_slabs
from torch._dynamo.utils import counters

from distdec.hf.linears import RowLinear, VocabEmbedding
from distdec.mesh import Mesh
from distdec.ops.one_shot_sum_triton import fits, one_shot_sum
from distdec.rank_sum import OneShotSum, RankSum
from distdec.slabs import Peers, why_not

# blocks hold 512 float32 or 1,024 float16 numbers
SIZES = (1, 511, 512, 1537, 3000)


class Simulation(SimulatedSlabs):
    """Ranks of the sum: three channels of two blocks each."""

    def __init__(self, num_ranks, **how):
        super().__init__(num_ranks, **{"capacity": 4096, **how})

    def launch(self, rank, y, *, push=True, merge=True):
        out = torch.full_like(y, math.nan)
        one_shot_sum(self.slabs[rank], y, out, spin_limit=self.spin_limit, push=push, merge=merge)
        return out


def addends(num_ranks, size, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(num_ranks)]


def in_rank_order(parts):
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def check(results, parts):
    """Every rank has the sum in rank order to the bit, NaN where it is NaN."""
    want = in_rank_order(parts)
    for got in results:
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_rank_gets_the_sum_in_rank_order(num_ranks, dtype):
    sim = Simulation(num_ranks)
    # sizes and with them the numbers of programs rise and fall, over both parities
    for use, size in enumerate((*SIZES, *reversed(SIZES))):
        parts = addends(num_ranks, size, dtype, use)
        check(sim.step(parts), parts)
    assert [slab.state[-1].item() for slab in sim.slabs] == [0] * num_ranks


def test_only_the_channels_of_a_launch_move_on():
    sim = Simulation(2)
    for size in (3000, 1, 1000):
        parts = addends(2, size)
        check(sim.step(parts), parts)
    assert [slab.state.tolist() for slab in sim.slabs] == [[3, 2, 1, 0]] * 2


def test_dtypes_may_change_from_call_to_call():
    sim = Simulation(3)
    for use, dtype in enumerate((torch.float16, torch.float32, torch.float16)):
        parts = addends(3, 1537, dtype, use)
        check(sim.step(parts), parts)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_spoils_its_own_place_alone(value):
    parts = addends(3, 700)
    parts[1][600] = value
    results = Simulation(3).step(parts)
    check(results, parts)
    assert [(~torch.isfinite(got)).nonzero().flatten().tolist() for got in results] == [[600]] * 3


@pytest.mark.parametrize("first_epoch", [2**16 - 2, 2**31 - 2, -2])
def test_epochs_pass_any_boundary(first_epoch):
    sim = Simulation(2, first_epoch=first_epoch)
    for use in range(4):
        parts = addends(2, 900, seed=use)
        check(sim.step(parts), parts)


def test_a_peer_may_be_one_use_ahead_and_no_further():
    sim = Simulation(2)
    calls = [addends(2, 900, seed=use) for use in range(4)]
    sim.launch(0, calls[0][0], merge=False)
    sim.launch(1, calls[0][1], merge=False)
    for use in range(3):
        second = sim.launch(1, calls[use][1], push=False)
        sim.launch(1, calls[use + 1][1], merge=False)
        first = sim.launch(0, calls[use][0], push=False)
        sim.launch(0, calls[use + 1][0], merge=False)
        check([first, second], calls[use])
    for _ in range(2):
        sim.slabs[1].state[:3] += 1
        sim.launch(1, calls[3][1], merge=False)
    assert sim.launch(0, calls[3][0], push=False).isnan().all()
    assert sim.alarms[0].item() == sim.slabs[0].state[-1].item() == 1 << 30


def test_a_lost_rank_ends_in_an_error_word_and_nobody_pushes_any_more():
    sim = Simulation(3)
    parts = addends(3, 900)
    # numbers of earlier uses lie in both parities: nothing but the flags tells that the lost rank's are old
    for _ in range(2):
        check(sim.step(parts), parts)
    for rank in (0, 1):
        sim.launch(rank, parts[rank], merge=False)
    for rank in (0, 1):
        assert sim.launch(rank, parts[rank], push=False).isnan().all()
        assert sim.alarms[rank].item() == sim.slabs[rank].state[-1].item() == 1 << 2
    sim.launch(2, parts[2], merge=False)
    check([sim.launch(2, parts[2], push=False)], parts)
    before = sim.memory[2].clone()
    for rank in (0, 1):
        sim.launch(rank, parts[rank], merge=False)
    assert torch.equal(sim.memory[2], before)


def test_what_does_not_fit_is_refused_and_an_empty_tensor_touches_nothing():
    sim = Simulation(2)
    slab = sim.slabs[0]
    assert fits(slab, 6 * 512, torch.float32) and fits(slab, 6 * 1024, torch.bfloat16)
    assert not fits(slab, 6 * 512 + 1, torch.float32) and not fits(slab, 4, torch.int32)
    with pytest.raises(ValueError, match=r"7 blocks of 2048 bytes, 6 at most"):
        sim.launch(0, torch.zeros(6 * 512 + 1))
    assert sim.launch(0, torch.zeros(0, 4)).shape == (0, 4)
    assert slab.state.tolist() == [0] * 4


def sum_between_processes(path, kvp):
    """Sums through a `RankSum`: small, of three dimensions and transposed, larger than the slab, and after close."""
    with Mesh.create(kvp, torch.distributed.get_world_size() // kvp) as mesh:
        total = RankSum(mesh.group)
        kernel = OneShotSum(mesh, capacity_bytes=8192, map_slabs=shared_slabs(path), timeout_s=5.0)
        total.use(kernel)
        mine = [addends(mesh.world_size, size, seed=use)[mesh.rank] for use, size in enumerate((6, 600, 5000, 20))]
        mine[1] = mine[1].view(2, 20, 15).transpose(1, 2)
        assert [kernel.fits(y.numel(), y.dtype) for y in mine] == [True, True, False, True]
        kept = [y.clone() for y in mine]
        sums = [total(y) for y in mine[:3]]
        assert all(torch.equal(y, before) for y, before in zip(mine[:3], kept, strict=False))
        total.check()
        total.close()
        total.close()
        sums.append(total(mine[3]))
        return [y.contiguous() for y in kept], sums


@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "kvp"), [(2, 2), (3, 1), (4, 2)])
def test_all_ranks_of_a_mesh_sum_through_shared_memory(ranks, num_ranks, kvp):
    with tempfile.TemporaryDirectory() as directory:
        outcomes = ranks(num_ranks).run(sum_between_processes, os.path.join(directory, "slab"), kvp)
    for use in range(4):
        want = in_rank_order([mine[use] for mine, _ in outcomes])
        for _, sums in outcomes:
            torch.testing.assert_close(sums[use], want, rtol=1e-6, atol=1e-6)


def lose_a_rank(path):
    with Mesh.create() as mesh:
        total = RankSum(mesh.group)
        total.use(OneShotSum(mesh, map_slabs=shared_slabs(path), timeout_s=1e-5))
        if mesh.rank == 1:
            total.close()
            return None
        lost = total(torch.ones(2, 8))
        told = []
        for call in (total.check, lambda: total(torch.ones(2, 8))):
            with pytest.raises(RuntimeError) as error:
                call()
            told.append(str(error.value))
        total.close()
        return lost.isnan().all().item(), told


@pytest.mark.dist
def test_the_sum_tells_which_rank_was_lost(ranks):
    with tempfile.TemporaryDirectory() as directory:
        (failed, told), _ = ranks(2).run(lose_a_rank, os.path.join(directory, "slab"))
    assert failed
    assert all("one_shot sum on rank 0: ranks [1] did not come in time" in text for text in told)


def choose_without_gpus(modes):
    with Mesh.create() as mesh:
        total = RankSum(mesh.group)
        reasons = []
        for mode in ("auto", "nccl"):
            total.choose(mode, mesh)
            reasons.append(total.reason)
        with pytest.raises(RuntimeError, match="one_shot sum is not possible here: no CUDA device"):
            total.choose("one_shot", mesh)
        with pytest.raises(ValueError, match="one of auto, nccl, one_shot, got 'ring'"):
            total.choose("ring", mesh)
        with pytest.raises(RuntimeError, match="'reduce' is not the same on all ranks"):
            total.choose(modes[mesh.rank], mesh)
        return reasons, total(torch.ones(3)).tolist()


@pytest.mark.dist
def test_where_the_kernel_cannot_work_auto_says_why_and_takes_the_library(ranks):
    for reasons, summed in ranks(2).run(choose_without_gpus, ("nccl", "auto")):
        assert reasons == [
            "all-reduce: one_shot sum is not possible here: no CUDA device (rank 0)",
            "all-reduce: asked for",
        ]
        assert summed == [2.0] * 3


def test_one_rank_has_nothing_to_sum():
    assert why_not(Peers.all(Mesh.single())) == "there is one rank, so nothing to merge"


class StandIn:
    """A kernel that sums two ranks of which the other one has the same numbers."""

    def __init__(self):
        self.seen = []
        self.closed = False

    def __call__(self, y, following=None):
        self.seen.append((*y.shape, following))
        return 2 * y

    def close(self):
        self.closed = True


class Block(torch.nn.Module):
    """Two products of parts and a residual, as a decoder layer has them."""

    def __init__(self, reduce, generator):
        super().__init__()
        weights = [torch.randn(8, 8, generator=generator) for _ in range(2)]
        self.first = RowLinear(weights[0], torch.ones(8), 8, (0, 8), reduce)
        self.second = RowLinear(weights[1], None, 8, (0, 8), reduce)

    def forward(self, x):
        return x + self.second(self.first(x).relu())


@pytest.mark.parametrize("linked", [False, True])
def test_compiled_layers_find_the_sum_by_its_handle_and_share_a_program(linked):
    torch.compiler.reset()
    counters.clear()
    others = [RankSum("a group") for _ in range(2)]
    total, kernel = RankSum("a group"), StandIn()
    total.use(kernel)
    assert len({int(one.handle[0]) for one in (*others, total)}) == 3
    generator = torch.Generator().manual_seed(0)
    following = [torch.zeros(1) if linked else None for _ in range(3)]
    blocks = [Block(total if weight is None else total.before(weight), generator) for weight in following]
    inputs = [torch.randn(tokens, 8, generator=generator) for tokens in (3, 5)]
    with torch.no_grad():
        want = [blocks[2](blocks[1](blocks[0](x))) for x in inputs]
        seen, kernel.seen = kernel.seen, []
        for block in blocks:
            block.compile(backend="aot_eager", dynamic=True, fullgraph=True)
        got = [blocks[2](blocks[1](blocks[0](x))) for x in inputs]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert [call[:2] for call in kernel.seen] == [call[:2] for call in seen]
    # both sums of a block come before the same weight
    wanted = [id(weight) for _ in inputs for weight in following for _ in range(2)]
    assert [id(call[2]) for call in kernel.seen] == wanted
    assert len(seen) == 12
    assert counters["stats"]["unique_graphs"] == 1
    total.close()
    assert kernel.closed and total.reason.startswith("all-reduce")


def test_the_operator_keeps_its_promises():
    total = RankSum("a group")
    total.use(StandIn())
    for y in (torch.randn(2, 3), torch.randn(4, 1, 8)):
        for handle in (total.handle, total.before(y).handle):
            torch.library.opcheck(torch.ops.distdec.sum_over_ranks.default, (y, handle))


def test_an_embedding_of_parts_is_summed_before_it_is_scaled():
    table = torch.arange(12.0).view(6, 2)
    kernel = StandIn()
    embedding = VocabEmbedding(table[2:5].clone(), (2, 5), 3.0, kernel)
    got = embedding(torch.tensor([[2, 0, 4]]))
    assert got.tolist() == [[[24.0, 30.0], [0.0, 0.0], [48.0, 54.0]]]
    assert kernel.seen == [(1, 3, 2, None)]


def test_an_error_that_may_be_one_ranks_own_is_not_taken_for_a_refusal(monkeypatch):
    def fail(mesh, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("distdec.rank_sum.OneShotSum", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        RankSum(None).choose("auto", Mesh.single())

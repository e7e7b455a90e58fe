"""Every merge mode over real gloo ranks, against its simulation and against float64 attention."""

import warnings

import pytest
import torch
from merge_inputs import NAN, assemble, make_rows, same_bits, shard, truth_of
from torch.testing import assert_close

from distdec.merge import MODES, make_merge, simulate
from distdec.mesh import Mesh
from distdec.ops.partial import Partial

pytestmark = pytest.mark.dist

T32 = {"rtol": 1e-5, "atol": 1e-5}
LENGTHS = [0, 1, 130, 17, 411]
# collectives a call, of the modes that run over torch.distributed
COLLECTIVES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 2, "all_to_all": 1}
REPLICATED = sorted(mode for mode in COLLECTIVES if MODES[mode].replicated)


def partials_of(num_ranks, num_heads=9, seed=0):
    rows = make_rows(LENGTHS, num_heads=num_heads, head_dim=7, seed=seed)
    return rows, shard(rows, num_ranks, seed, poison=NAN)


def merge_all_modes(num_ranks, transport, sinks):
    """Merge the same shards in every mode that takes the transport; returns {mode: (merged, calls, reason)}."""
    _, partials = partials_of(num_ranks)
    done = {}
    with Mesh.create(device="cpu", timeout_s=20) as mesh, warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in COLLECTIVES:
            if transport == "float8_e4m3" and MODES[mode].reduces:
                continue
            merge = make_merge(mode, mesh, transport=transport)
            merged = merge(partials[mesh.kvp_rank], sinks=sinks)
            merge.check_replicated(merged)
            done[mode] = (merged, merge.calls, merge.reason)
    return done


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 6])
def test_real_ranks_equal_simulated_ones_and_the_truth(ranks, num_ranks):
    sinks = torch.linspace(-2, 3, 9)
    answers = ranks(num_ranks).run(merge_all_modes, num_ranks, "float32", sinks)
    rows, partials = partials_of(num_ranks)
    out, lse = truth_of(rows, sinks)
    out[0], lse[0] = 0, -float("inf")  # no key: stays empty beside sinks
    for mode in COLLECTIVES:
        results = [answer[mode][0] for answer in answers]
        assert {answer[mode][1] for answer in answers} == {COLLECTIVES[mode]}
        assert_close(assemble(results).double(), out, **T32)
        for result, simulated in zip(results, simulate(mode, partials, sinks=sinks), strict=True):
            assert_close(result.lse.double(), lse, **T32)
            assert torch.equal(result.lse, results[0].lse)
            assert result.columns == simulated.columns
            if MODES[mode].replicated:
                assert torch.equal(result.out, results[0].out)
            if mode in ("all_gather", "all_to_all"):
                assert torch.equal(result.out, simulated.out)
                assert torch.equal(result.lse, simulated.lse)


@pytest.mark.parametrize(("transport", "num_ranks"), [("bfloat16", 3), ("float8_e4m3", 2), ("float8_e4m3", 3)])
def test_compressed_transport_over_real_ranks(ranks, transport, num_ranks):
    answers = ranks(num_ranks).run(merge_all_modes, num_ranks, transport, None)
    rows, partials = partials_of(num_ranks)
    out, lse = truth_of(rows)
    largest = max(p.out.nan_to_num().abs().max() for p in partials)
    modes = [mode for mode in COLLECTIVES if transport == "bfloat16" or not MODES[mode].reduces]
    assert sorted(answers[0]) == sorted(modes)
    for mode in modes:
        results = [answer[mode][0] for answer in answers]
        error = (assemble(results).double() - out).abs().max()
        unit = 2**-8 if transport == "bfloat16" else 2**-4
        assert 0 < error <= unit * largest * (num_ranks if MODES[mode].reduces else 1)
        assert_close(results[1].lse.double(), lse, **T32)
        assert not MODES[mode].replicated or all(torch.equal(r.out, results[0].out) for r in results)
        assert COLLECTIVES[mode] == answers[0][mode][1]
        reasons = {answer[mode][2] for answer in answers}
        assert len(reasons) == 1 and f"; transport {transport}: out off by up to " in reasons.pop()


def choose_with_float8(num_tokens):
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        merge = make_merge("auto", mesh, transport="float8_e4m3", num_tokens=num_tokens, num_heads=64)
        return merge.mode, merge.reason


def test_auto_leaves_out_what_the_transport_cannot_do(ranks):
    """With so many tokens all_reduce would be estimated to be faster."""
    [(mode, reason), other] = ranks(2).run(choose_with_float8, 10**6)
    assert (mode, reason) == other
    assert mode == "all_gather" and "all_reduce" not in reason.partition(";")[0]


def refuse_without_hardware(able):
    with Mesh.create(device="cpu", timeout_s=20) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr("distdec.merge.has_8_bit_floats", lambda device: able[mesh.rank])
        with pytest.raises(RuntimeError) as error:
            make_merge("all_gather", mesh, transport="float8_e4m3")
        return str(error.value)


def test_8_bits_are_refused_on_all_ranks_where_one_has_no_such_numbers(ranks):
    for told in ranks(3).run(refuse_without_hardware, (True, False, True)):
        assert told.endswith("compute capability 8.9 or more, not there on ranks [1]")


def poison_one_rank(num_ranks, culprit):
    _, partials = partials_of(num_ranks)
    results = {}
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        mine = partials[mesh.kvp_rank]
        mine.lse[2], mine.out[2] = 1.0, 0.5
        for mode in COLLECTIVES:
            merge = make_merge(mode, mesh)
            clean = merge(mine)
            for tensor in ("lse", "out"):
                bad = Partial(mine.out.clone(), mine.lse.clone())
                if mesh.kvp_rank == culprit:
                    getattr(bad, tensor)[2, 0] = NAN
                merged = merge(bad)
                flagged = merged.out[2].isnan().all() and merged.lse[2].isnan().all()
                rest = [0, 1, 3, 4]
                spared = torch.equal(merged.out[rest], clean.out[rest]) and torch.equal(
                    merged.lse[rest], clean.lse[rest]
                )
                results[mode, tensor] = (bool(flagged), spared)
    return results


@pytest.mark.parametrize(("num_ranks", "culprit"), [(3, 0), (3, 1), (3, 2), (4, 3)])
def test_nan_on_one_rank_is_seen_by_all_and_spares_the_rest(ranks, num_ranks, culprit):
    for answer in ranks(num_ranks).run(poison_one_rank, num_ranks, culprit):
        assert answer == {(mode, tensor): (True, True) for mode in COLLECTIVES for tensor in ("lse", "out")}


def merge_many_times(num_ranks, repeats):
    _, partials = partials_of(num_ranks)
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        merges = [make_merge(mode, mesh) for mode in REPLICATED]
        first = [merge(partials[mesh.kvp_rank]) for merge in merges]
        for _ in range(repeats):
            for merge, expected in zip(merges, first, strict=True):
                again = merge(partials[mesh.kvp_rank])
                assert torch.equal(again.out, expected.out)
                assert torch.equal(again.lse, expected.lse)
        return first


def test_the_same_request_gives_the_same_bits_50_times(ranks):
    answers = ranks(2).run(merge_many_times, 2, 50)
    for mine, other in zip(*answers, strict=True):
        assert torch.equal(mine.out, other.out)


def merge_ragged_steps(num_steps):
    """Steps of random sizes, some without tokens, some with a rank that has no key; returns the collectives of each."""
    counts = []
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        merges = [make_merge(mode, mesh) for mode in COLLECTIVES]
        plan = torch.Generator().manual_seed(5)
        for step in range(num_steps):
            num_tokens = int(torch.randint(0, 4, (), generator=plan))
            idle = int(torch.randint(0, mesh.kvp_size, (), generator=plan))
            lse = torch.randn(num_tokens, 2)
            out = torch.randn(num_tokens, 2, 3)
            if mesh.kvp_rank == idle:
                lse.fill_(-float("inf"))
                out.fill_(NAN)
            merge = merges[step % len(merges)]
            merged = merge(Partial(out, lse))
            assert not merged.out.isnan().any()
            assert merged.out.shape[0] == num_tokens
            counts.append(merge.calls)
    return counts


def test_every_rank_enters_every_collective_with_or_without_tokens(ranks):
    counts = ranks(3).run(merge_ragged_steps, 200)
    assert counts[0] == counts[1] == counts[2]
    expected = [COLLECTIVES[mode] * 50 for mode in COLLECTIVES]
    assert counts[0][-4:] == expected


def merge_along_kvp_only(kvp, tp):
    """Every tp rank has its own heads, here told apart by the seed."""
    with Mesh.create(kvp, tp, device="cpu", timeout_s=20) as mesh:
        _, partials = partials_of(kvp, num_heads=3, seed=mesh.tp_rank)
        merge = make_merge("all_gather", mesh)
        merged = merge(partials[mesh.kvp_rank])
        merge.check_replicated(merged)
        return merged


@pytest.mark.parametrize(("kvp", "tp"), [(2, 2), (3, 2), (2, 1), (1, 2)])
def test_tp_ranks_do_not_mix(ranks, kvp, tp):
    for rank, merged in enumerate(ranks(kvp * tp).run(merge_along_kvp_only, kvp, tp)):
        rows, _ = partials_of(kvp, num_heads=3, seed=rank // kvp)
        assert_close(merged.out.double(), truth_of(rows)[0], **T32)


def merge_on_one_of_two_replicas():
    meshes = [Mesh.create(ranks=pair, device="cpu", timeout_s=20) for pair in ([0, 1], [2, 3])]
    mesh = meshes[0] or meshes[1]
    merge = make_merge("all_reduce", mesh)
    _, partials = partials_of(2, num_heads=3)
    nothing = Partial(torch.empty(0, 3, 7), torch.empty(0, 3))
    busy = meshes[0] is not None
    results = [merge(partials[mesh.kvp_rank] if busy else nothing).out for _ in range(3)]
    last = merge(partials[mesh.kvp_rank]).out
    mesh.close()
    return [tuple(result.shape) for result in results], last


def test_an_idle_replica_steps_cleanly(ranks):
    answers = ranks(4).run(merge_on_one_of_two_replicas)
    out = truth_of(partials_of(2, num_heads=3)[0])[0]
    for rank, (shapes, last) in enumerate(answers):
        assert shapes == [(5, 21) if rank < 2 else (0, 21)] * 3
        assert_close(last.double(), out, **T32)


def choose_from_own_sizes():
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        # for themselves, the ranks would choose differently
        merge = make_merge("auto", mesh, num_tokens=1 if mesh.rank else 10**6, num_heads=64)
        return merge.mode, merge.reason


def test_auto_is_rank_0s_choice_everywhere(ranks):
    answers = ranks(3).run(choose_from_own_sizes)
    assert answers[0][0] == "all_reduce"
    assert answers.count(answers[0]) == 3
    assert "1000000 tokens" in answers[2][1]


def ask_for_different_modes():
    with Mesh.create(device="cpu", timeout_s=20) as mesh, pytest.raises(RuntimeError) as error:
        make_merge("all_gather" if mesh.rank != 1 else "all_reduce", mesh)
    return str(error.value)


def test_different_modes_are_refused_before_any_data_moves(ranks):
    for told in ranks(3).run(ask_for_different_modes):
        assert told == "'merge' is not the same on all ranks: ranks [1] differ from rank 0"


def differ_by_one_bit():
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        _, partials = partials_of(mesh.kvp_size)
        merge = make_merge("all_gather", mesh)
        merged = merge(partials[mesh.kvp_rank], out_dtype=torch.bfloat16)
        merge.check_replicated(merged)
        if mesh.rank == 1:
            merged.out[3, 3] = torch.nextafter(merged.out[3, 3], torch.tensor(9.0, dtype=torch.bfloat16))
        with pytest.raises(RuntimeError, match=r"merged output.*ranks \[1\] differ from rank 0"):
            merge.check_replicated(merged)
    return True


def test_one_differing_bit_is_found(ranks):
    assert ranks(2).run(differ_by_one_bit) == [True, True]


def merge_shape_after_shape():
    """Alternate shapes, so that reused buffers hold the last one's remains; compare with a fresh merge each time."""
    with Mesh.create(device="cpu", timeout_s=20) as mesh:
        same = []
        for mode in COLLECTIVES:
            merge = make_merge(mode, mesh)
            for num_tokens in (5, 2, 64, 1, 5):
                rows = make_rows(range(1, num_tokens + 1), num_heads=5, head_dim=3)
                partial = shard(rows, mesh.kvp_size)[mesh.kvp_rank]
                ours, fresh = merge(partial), make_merge(mode, mesh)(partial)
                same.append(same_bits(ours.out, fresh.out) and same_bits(ours.lse, fresh.lse))
    return all(same)


def test_reused_buffers_leave_no_trace(ranks):
    assert ranks(3).run(merge_shape_after_shape) == [True] * 3

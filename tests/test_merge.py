"""Every merge mode with ranks simulated in one process, against attention in float64 over the whole sequence."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merge_inputs import INF, NAN, assemble, attend, make_rows, same_bits, shard, truth_of
from torch.testing import assert_close

from distdec.merge import MODES, column_range, make_merge, mask_by_length, padded_columns, simulate, transport_error
from distdec.merge_choice import choose_mode, received_bytes
from distdec.merge_collective import advance
from distdec.merge_place import Place
from distdec.mesh import Mesh
from distdec.ops.partial import Partial

T32 = {"rtol": 1e-5, "atol": 1e-5}
LENGTHS = [1, 3, 17, 130, 411]
modes = pytest.mark.parametrize("mode", sorted(MODES))
rank_counts = pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 6, 8])


def fill(buffer, byte):
    buffer.view(torch.uint8).fill_(byte)
    return buffer


@pytest.fixture(scope="module", autouse=True)
def nan_in_fresh_buffers():
    """Every buffer starts as NaN, so that an element nobody wrote shows."""
    buffer = Place.buffer
    with pytest.MonkeyPatch.context() as patch:
        # bytes of 0xFF are NaN in every format
        patch.setattr(Place, "buffer", lambda *args: fill(buffer(*args), 0xFF))
        yield


def assert_merged(results, out, lse):
    assert_close(assemble(results).double(), out, **T32)
    for result in results:
        assert_close(result.lse.double(), lse, **T32)


def clone(partials):
    return [Partial(p.out.clone(), p.lse.clone()) for p in partials]


@modes
@rank_counts
@pytest.mark.parametrize("seed", range(3))
def test_merged_shards_equal_whole_attention(mode, num_ranks, seed):
    rows = make_rows(LENGTHS, seed=seed)
    assert_merged(simulate(mode, shard(rows, num_ranks, seed)), *truth_of(rows))


@modes
@rank_counts
def test_nan_in_the_out_of_empty_shards_is_ignored(mode, num_ranks):
    rows = make_rows([0, *LENGTHS, 0])
    results = simulate(mode, shard(rows, num_ranks, poison=NAN))
    assert_merged(results, *truth_of(rows))
    for result in results:
        assert not result.out[0].any()
        assert (result.lse[0] == -INF).all()


@modes
@pytest.mark.parametrize("garbage", [0.0, NAN, INF])
def test_garbage_of_a_foreign_kernel_is_masked_by_length(mode, garbage):
    rows = make_rows(LENGTHS)
    partials = shard(rows, 4)
    lengths = [(p.lse[:, 0] > -INF).long() for p in partials]
    for partial, length in zip(partials, lengths, strict=True):
        partial.out[length == 0] = 1e3
        partial.lse[length == 0] = garbage
    assert any((length == 0).any() for length in lengths)
    masked = [mask_by_length(p, n) for p, n in zip(partials, lengths, strict=True)]
    assert_merged(simulate(mode, masked), *truth_of(rows))
    if garbage == 0.0:
        wrong = assemble(simulate(mode, partials)).double()
        assert (wrong - truth_of(rows)[0]).abs().max() > 0.5


@modes
def test_empty_rows_survive_successive_merges(mode):
    """Requests without context beside long ones, chunk by chunk: -inf - -inf must never appear."""
    rows = make_rows([0, 2415, 0, 130])
    so_far = Partial(torch.full((4, 6, 5), NAN), torch.full((4, 6), -INF))
    for begin, end in ((0, 0), (0, 128), (128, 2415)):
        chunk = [(scores[:, begin:end], values[begin:end]) for scores, values in rows]
        results = simulate(mode, [so_far, *shard(chunk, 3, poison=NAN)])
        so_far = Partial(assemble(results).unflatten(1, (6, 5)), results[0].lse)
        assert not so_far.out[0].any()
        assert (so_far.lse[0] == -INF).all()
        assert not so_far.out.isnan().any()
    assert_merged(results, *truth_of(rows))


@modes
@pytest.mark.parametrize("prefix", [64, 3072, 16384])
def test_error_does_not_grow_with_the_prefix(mode, prefix):
    rows = make_rows([prefix + 64, prefix + 7], num_heads=4)
    context = shard([(scores[:, :prefix], values[:prefix]) for scores, values in rows], 4)
    new = shard([(scores[:, prefix:], values[prefix:]) for scores, values in rows], 1)
    first = simulate(mode, context)
    both = [Partial(assemble(first).unflatten(1, (4, 5)), first[0].lse), new[0]]
    results = simulate(mode, both)
    assert_merged(results, *truth_of(rows))
    assert (assemble(results).double() - truth_of(rows)[0]).abs().max() < 2e-6


@modes
@rank_counts
def test_sinks_count_once(mode, num_ranks):
    rows = make_rows(LENGTHS)
    sinks = torch.tensor([0.0, 5.0, -3.0, 20.0, -INF, 1.0])
    results = simulate(mode, shard(rows, num_ranks), sinks=sinks)
    assert_merged(results, *truth_of(rows, sinks))


@modes
def test_rows_without_a_key_stay_empty_beside_sinks(mode):
    nothing = Partial(torch.full((2, 3, 4), NAN), torch.full((2, 3), -INF))
    for result in simulate(mode, [nothing, nothing], sinks=torch.tensor([1.0, -INF, 0.0])):
        assert not result.out.any()
        assert (result.lse == -INF).all()


FAULTS = {
    "nan out": lambda p: p.out[2, 1].fill_(NAN),
    "one nan": lambda p: p.out[2, 0, 0].fill_(NAN),
    "inf out": lambda p: p.out[2, 3, 4].fill_(INF),
    "nan lse": lambda p: p.lse[2, 5].fill_(NAN),
    "inf lse": lambda p: p.lse[2].fill_(INF),
}


@modes
@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("fault", sorted(FAULTS))
@pytest.mark.parametrize("sinks", [None, torch.zeros(6)])
def test_a_bad_row_fails_alone_and_on_every_rank(mode, culprit, fault, sinks):
    partials = shard(make_rows([5, 60, 400, 31]), 3)
    for partial in partials:  # the row that fails has keys on every rank
        partial.lse[2] = 1.0
        partial.out[2] = 0.5
    clean = simulate(mode, clone(partials), sinks=sinks)
    FAULTS[fault](partials[culprit])
    for rank, (result, before) in enumerate(zip(simulate(mode, partials, sinks=sinks), clean, strict=True)):
        assert result.out[2].isnan().all(), rank
        assert result.lse[2].isnan().all(), rank
        others = [0, 1, 3]
        assert torch.equal(result.out[others], before.out[others])
        assert torch.equal(result.lse[others], before.lse[others])


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_mesh_of_one_rank_keeps_the_same_rules(fault):
    (partial,) = shard(make_rows([5, 0, 400, 31]), 1, poison=NAN)
    FAULTS[fault](partial)
    merge = make_merge("auto", Mesh.single())
    result = merge(partial)
    assert result.out[2].isnan().all()
    assert result.lse[2].isnan().all()
    assert not result.out[1].any()
    assert torch.equal(result.out[[0, 3]], partial.out[[0, 3]].flatten(1))
    assert (merge.calls, merge.replicated, result.columns) == (0, True, (0, 30))


@modes
def test_padding_rows_with_nan_do_not_reach_real_rows(mode):
    rows = make_rows([17, 130, 3])
    partials = []
    for partial in shard(rows, 4):
        out, lse = torch.full((8, 6, 5), NAN), torch.full((8, 6), -INF)
        out[:3], lse[:3] = partial
        partials.append(Partial(out, lse))
    results = simulate(mode, partials)
    out, lse = truth_of(rows)
    assert_close(assemble(results)[:3].double(), out, **T32)
    assert_close(results[1].lse[:3].double(), lse, **T32)
    assert not assemble(results)[3:].any()


@modes
@pytest.mark.parametrize("owner", [0, 1, 4])
def test_all_shards_but_one_empty_give_the_owners_bits(mode, owner):
    (whole,) = shard(make_rows(LENGTHS), 1)
    empty = Partial(torch.full_like(whole.out, NAN), torch.full_like(whole.lse, -INF))
    partials = [whole if rank == owner else empty for rank in range(5)]
    results = simulate(mode, partials)
    assert torch.equal(assemble(results), whole.out.flatten(1))
    assert all(torch.equal(result.lse, whole.lse) for result in results)


@modes
def test_large_scores_keep_their_ratio(mode):
    lses = torch.tensor([[1e4, 1e30, -1e30, 0.0]]), torch.tensor([[1e4 - 1, -1e30, -1e30, -200.0]])
    partials = [Partial(torch.full((1, 4, 2), float(value)), lse) for value, lse in zip((1, 0), lses, strict=True)]
    out = assemble(simulate(mode, partials)).view(4, 2)[:, 0]
    assert_close(out, torch.tensor([0.7310586, 1.0, 0.5, 1.0]), rtol=1e-6, atol=0)


@modes
@pytest.mark.parametrize("owner", [0, 2])
def test_a_dominating_shard_gives_its_value_exactly(mode, owner):
    values = torch.randn(3, 2, 6, 5)
    lses = [torch.full((2, 6), 200.0 if rank == owner else 0.0) for rank in range(3)]
    results = simulate(mode, [Partial(out, lse) for out, lse in zip(values, lses, strict=True)])
    assert torch.equal(assemble(results), values[owner].flatten(1))


@modes
def test_equal_keys_give_the_mean(mode):
    """Any split of equal scores is the plain mean, to two units in the last place."""
    values = torch.rand(24, dtype=torch.float64) + 1
    cuts = [0, 1, 1, 12, 24]
    shards = [values[a:b] for a, b in itertools.pairwise(cuts)]
    scores = [torch.full((2, len(part)), 3.0, dtype=torch.float64) for part in shards]
    partials = [attend(s, part.view(-1, 1, 1).expand(-1, 2, 1)) for s, part in zip(scores, shards, strict=True)]
    partials = [Partial(out.float()[None], lse.float()[None]) for out, lse in partials]
    out = assemble(simulate(mode, partials))
    assert ((out - values.mean()).abs() <= 2 * torch.finfo(torch.float32).eps * values.mean()).all()


@modes
def test_lses_one_unit_apart(mode):
    lse = torch.tensor([[3.0, 30.0]])
    up = torch.nextafter(lse, torch.tensor(INF))
    partials = [Partial(torch.zeros(1, 2, 1), lse), Partial(torch.ones(1, 2, 1), up)]
    assert_close(assemble(simulate(mode, partials)), torch.full((1, 2), 0.5), rtol=1e-5, atol=0)


@modes
def test_strided_partials_give_the_same_bits(mode):
    partials = shard(make_rows(LENGTHS), 3)
    strided = [Partial(p.out.mT.contiguous().mT, p.lse.T.contiguous().T) for p in partials]
    assert not strided[0].lse.is_contiguous()
    for a, b in zip(simulate(mode, partials), simulate(mode, strided), strict=True):
        assert same_bits(a.out, b.out)
        assert same_bits(a.lse, b.lse)


@rank_counts
def test_gathering_modes_agree_bit_by_bit(num_ranks):
    """All-to-all moves columns of what all-gather moves whole, and both fold in rank order."""
    partials = shard(make_rows(LENGTHS, num_heads=9, head_dim=8), num_ranks)
    whole = simulate("all_gather", partials)
    scattered = simulate("all_to_all", partials)
    assert torch.equal(assemble(scattered), whole[0].out)
    assert all(torch.equal(a.lse, b.lse) for a, b in zip(whole, scattered, strict=True))


@modes
@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(9, 7), (28, 8), (40, 4), (1, 1), (3, 3)])
def test_any_heads_over_any_ranks(mode, num_ranks, num_heads, head_dim):
    rows = make_rows([1, 40, 9], num_heads, head_dim)
    for transport, tolerance in (("float32", T32), ("bfloat16", {"rtol": 0, "atol": 0.2})):
        results = simulate(mode, shard(rows, num_ranks), transport=transport)
        out, lse = truth_of(rows)
        assert_close(assemble(results).double(), out, **tolerance)
        assert_close(results[-1].lse.double(), lse, **T32)
        columns = [result.columns for result in results]
        if MODES[mode].replicated:
            assert columns == [(0, num_heads * head_dim)] * num_ranks
        else:
            assert columns == [column_range(num_heads * head_dim, num_ranks, rank) for rank in range(num_ranks)]


@given(num_columns=st.integers(1, 5000), num_ranks=st.integers(1, 12))
def test_columns_are_disjoint_complete_and_padded(num_columns, num_ranks):
    ranges = [column_range(num_columns, num_ranks, rank) for rank in range(num_ranks)]
    assert [c for start, stop in ranges for c in range(start, stop)] == list(range(num_columns))
    width = padded_columns(num_columns, num_ranks)
    assert width % 16 == 0
    assert all(stop - start <= width for start, stop in ranges)
    assert (width - 16) * num_ranks < num_columns


UNITS = {"bfloat16": 2**-8, "float8_e4m3": 2**-4}
COMPRESSED = [(mode, name) for name in UNITS for mode in sorted(MODES) if name == "bfloat16" or not MODES[mode].reduces]


@pytest.mark.parametrize(("mode", "transport"), COMPRESSED)
@pytest.mark.parametrize("num_ranks", [2, 5, 8])
def test_transports_stay_within_their_stated_error(mode, transport, num_ranks):
    rows = make_rows(LENGTHS, num_heads=16, head_dim=16)
    partials = shard(rows, num_ranks)
    results = simulate(mode, partials, transport=transport)
    largest = max(p.out.abs().max() for p in partials)
    bound = UNITS[transport] * largest * (num_ranks if MODES[mode].reduces else 1)
    error = (assemble(results).double() - truth_of(rows)[0]).abs().max()
    assert error <= bound
    assert error > bound / 50  # it is compressed indeed
    exact = simulate("all_gather", partials)[0].lse
    assert all(torch.equal(result.lse, exact) for result in results)
    if MODES[mode].replicated:
        assert all(torch.equal(result.out, results[0].out) for result in results)


@pytest.mark.parametrize("mode", ["all_gather", "all_to_all"])
def test_8_bits_keep_rows_of_any_size_to_their_own_precision(mode):
    """One scale a row: a row a million times smaller than its neighbour loses nothing by it."""
    generator = torch.Generator().manual_seed(4)
    sizes = torch.tensor([1.0, 1e-6, 1e4, 1e-30]).view(4, 1, 1)
    partials = [Partial(torch.randn(4, 3, 16, generator=generator) * sizes, torch.zeros(4, 3)) for _ in range(3)]
    want = sum(p.out for p in partials) / 3
    got = assemble(simulate(mode, partials, transport="float8_e4m3")).unflatten(1, (3, 16))
    largest = torch.stack([p.out.abs().amax(-1) for p in partials]).amax(0)
    assert ((got - want).abs() <= 2**-4 * largest[..., None]).all()


@pytest.mark.parametrize(("mode", "transport"), COMPRESSED)
def test_compressed_faults_fail_alone_and_empty_shards_are_ignored(mode, transport):
    rows = make_rows([0, 5, 60, 400], num_heads=4, head_dim=8)
    partials = shard(rows, 3, poison=NAN)
    for partial in partials:
        partial.lse[2], partial.out[2] = 1.0, 0.5
    clean = simulate(mode, clone(partials), transport=transport)
    partials[1].out[2, 0, 3] = NAN
    for result, before in zip(simulate(mode, partials, transport=transport), clean, strict=True):
        assert result.out[2].isnan().all() and result.lse[2].isnan().all()
        assert not result.out[0].any() and (result.lse[0] == -INF).all()
        others = [0, 1, 3]
        assert torch.equal(result.out[others], before.out[others])
        assert torch.equal(result.lse[others], before.lse[others])


@pytest.mark.parametrize("mode", ["all_reduce", "reduce_scatter"])
def test_nothing_unwritten_is_sent(mode):
    """Padding columns included: a NaN check on the collectives would stop the job. (Packed messages are bytes.)"""
    partial = shard(make_rows([3, 9], num_heads=3, head_dim=7), 1)[0]
    steps = MODES[mode].program(partial, Place(1, 3, torch.float32))
    asked, _ = advance(steps, None)
    while asked is not None:
        kind, sent = asked
        assert not sent.isnan().any()
        answers = {"gather": sent.expand(3, *sent.shape), "reduce_scatter": sent[0]}
        asked, _ = advance(steps, answers.get(kind, sent))


@modes
def test_a_step_without_tokens_returns_nothing(mode):
    nothing = Partial(torch.empty(0, 6, 5), torch.empty(0, 6))
    for result in simulate(mode, [nothing] * 3, sinks=torch.zeros(6)):
        assert result.out.shape == (0, result.columns[1] - result.columns[0])
        assert result.lse.shape == (0, 6)


@modes
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_out_dtype_is_the_callers_and_inputs_stay_untouched(mode, out_dtype):
    partials = shard(make_rows(LENGTHS), 3, poison=NAN)
    before = clone(partials)
    results = simulate(mode, partials, out_dtype=out_dtype)
    assert all(r.out.dtype == (out_dtype or torch.float32) and r.lse.dtype == torch.float32 for r in results)
    assert all(same_bits(a.out, b.out) and same_bits(a.lse, b.lse) for a, b in zip(partials, before, strict=True))


# ---- properties

cases = st.tuples(st.sampled_from(sorted(MODES)), st.integers(1, 8), st.integers(0, 10**6))


def parts_of(seed, num_ranks):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 60, (3,), generator=generator).tolist()
    rows = make_rows(lengths, num_heads=3, head_dim=4, seed=seed, spread=float(seed % 30))
    return rows, shard(rows, num_ranks, seed, poison=NAN)


def as_partial(results):
    return Partial(assemble(results).unflatten(1, (3, 4)), results[0].lse)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_any_split_equals_the_whole(case):
    mode, num_ranks, seed = case
    rows, partials = parts_of(seed, num_ranks)
    assert_merged(simulate(mode, partials), *truth_of(rows))


@settings(max_examples=40, deadline=None)
@given(cases, st.randoms(use_true_random=False))
def test_merge_ignores_shard_order(case, random):
    mode, num_ranks, seed = case
    rows, partials = parts_of(seed, num_ranks)
    random.shuffle(partials)
    assert_merged(simulate(mode, partials), *truth_of(rows))


@settings(max_examples=40, deadline=None)
@given(cases, st.integers(0, 8))
def test_merge_is_associative_and_empty_is_its_identity(case, cut):
    mode, num_ranks, seed = case
    rows, partials = parts_of(seed, num_ranks)
    empty = Partial(torch.full((3, 3, 4), NAN), torch.full((3, 3), -INF))
    left, right = [empty, *partials[:cut]], [*partials[cut:], empty]
    nested = simulate(mode, [as_partial(simulate(mode, left)), as_partial(simulate(mode, right))])
    assert_merged(nested, *truth_of(rows))
    for results in (simulate(mode, [empty, partials[0]]), simulate(mode, [partials[0], empty, empty])):
        kept = (partials[0].lse > -INF).unsqueeze(-1)
        assert torch.equal(as_partial(results).out, torch.where(kept, partials[0].out, 0.0))
        assert torch.equal(results[0].lse, partials[0].lse)


@settings(max_examples=40, deadline=None)
@given(cases, st.sampled_from([-64.0, 0.25, 32.0]))
def test_shifting_all_scores_shifts_only_the_lse(case, shift):
    mode, num_ranks, seed = case
    rows, _ = parts_of(seed, num_ranks)
    shifted = [(scores + shift, values) for scores, values in rows]
    out, lse = truth_of(rows)
    results = simulate(mode, shard(shifted, num_ranks, seed))
    assert_close(assemble(results).double(), out, rtol=1e-5, atol=5e-5)  # lse of 64 has units of 4e-6 in float32
    assert_close(results[0].lse.double(), lse + shift, rtol=1e-5, atol=1e-5)


# ---- construction


def test_unknown_names_are_refused_with_the_legal_ones():
    with pytest.raises(ValueError, match=r"all_gather.*auto"):
        make_merge("allgather", Mesh.single())
    with pytest.raises(ValueError, match="float32, bfloat16, float8_e4m3"):
        make_merge("auto", Mesh.single(), transport="fp8")


@pytest.mark.parametrize("mode", ["all_reduce", "reduce_scatter"])
def test_8_bits_are_refused_where_sums_travel(mode):
    with pytest.raises(
        ValueError, match=f"all_gather, all_to_all, one_shot, one_shot_scatter or auto, not with {mode}"
    ):
        make_merge(mode, Mesh.single(), transport="float8_e4m3")
    assert choose_mode(True, 4096, 32, 128, 8, "cuda", reductions=False).mode == "all_gather"
    assert choose_mode(False, 4096, 32, 128, 8, "cuda", reductions=False).mode == "all_to_all"


def test_the_error_of_a_transport_is_that_of_a_fixed_sample():
    assert transport_error("all_gather", "float32", 2) == 0.0
    halves = {mode: transport_error(mode, "bfloat16", 3) for mode in MODES}
    assert halves == {mode: transport_error(mode, "bfloat16", 3) for mode in MODES}
    assert all(0 < error <= (3 if MODES[mode].reduces else 1) * 2**-8 for mode, error in halves.items())
    eighths = transport_error("all_to_all", "float8_e4m3", 3)
    assert 4 * halves["all_to_all"] < eighths <= 2**-4


@pytest.mark.parametrize(
    "partial",
    [
        Partial(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.bfloat16)),
        Partial(torch.zeros(2, 3, 4), torch.zeros(3, 2)),
        Partial(torch.zeros(2, 12), torch.zeros(2, 3)),
        Partial(torch.zeros(2, 3, 4, dtype=torch.int32), torch.zeros(2, 3)),
    ],
)
def test_what_is_no_partial_is_refused(partial):
    with pytest.raises(ValueError, match=r"expected out \[T, Hq, Dv\]"):
        make_merge("all_gather", Mesh.single())(partial)


def test_sinks_of_another_shape_are_refused():
    partial = Partial(torch.zeros(2, 3, 4), torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"sinks \[3\]"):
        make_merge("all_gather", Mesh.single())(partial, sinks=torch.zeros(4))


def test_choice_is_a_pure_function_with_a_reason():
    assert choose_mode(True, 8, 32, 128, 2, "cuda").mode == "all_gather"
    assert choose_mode(True, 4096, 32, 128, 8, "cuda").mode == "all_reduce"
    assert choose_mode(False, 8, 32, 128, 4, "cuda").mode == "all_to_all"
    choice = choose_mode(True, 8, 28, 64, 3, "cpu")
    assert choice == choose_mode(True, 8, 28, 64, 3, "cpu")
    told = "replicated output of 8 tokens x 28 heads x 64 over 3 ranks on cpu"
    assert choice.reason.startswith(f"{choice.mode}: estimated all_gather ")
    assert told in choice.reason


def test_received_bytes():
    assert received_bytes("all_gather", 1, 32, 128, 4) == 49536
    assert received_bytes("all_reduce", 2, 4, 8, 2) == 2 * 4 * (32 + 9)
    assert received_bytes("all_to_all", 1, 32, 128, 4) == 4 * (3 * 1024 + 96)


def test_buffers_are_reused_and_outgrown_ones_stay_alive():
    place = Place(0, 2, torch.float32)
    cpu = torch.device("cpu")
    first = place.buffer("sum", (3, 10), torch.float32, cpu)
    assert place.buffer("sum", (4, 8), torch.float32, cpu).data_ptr() == first.data_ptr()
    large = place.buffer("sum", (100, 10), torch.float32, cpu)
    assert large.data_ptr() != first.data_ptr()
    assert place.buffer("sum", (1, 1), torch.float32, cpu).data_ptr() == large.data_ptr()
    kept = [tensor for tensors in place._storage.values() for tensor in tensors]
    assert [tensor.numel() for tensor in kept] == [32, 1024]

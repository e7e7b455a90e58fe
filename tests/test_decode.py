"""Decode against fp64 attention over the whole sequence."""

import math
from dataclasses import replace

import pytest
import torch
from cases import DECODE_CASES, GPU_DECODE_CASES, Case, Inputs, build, case_id, shrink, truth, uniform
from compare import as_good_as_eager, close_partial, nan_filled_empty

from distdec.ops import decode_triton
from distdec.ops.backends import get_backend
from distdec.ops.combine import DecodeWorkspace
from distdec.ops.decode import decode
from distdec.ops.decode_triton import TILE_TOKENS, DecodePlan, DeviceLimits, check_pools, decode_launch_plan
from distdec.ops.spans_triton import with_schedule
from distdec.ops.tables import KVTables
from distdec.ops.whole_tiles_triton import describe_pools

IMPLEMENTATIONS = ["reference", "triton"]


def run(name: str, case: Case, inputs: Inputs, **kwargs):
    """Run one implementation on a case with NaN in every output before it is written."""
    backend = get_backend(name, inputs.q.device)
    if name == "triton":
        kwargs["tile_tokens"] = case.tile_tokens
    with nan_filled_empty():
        return backend.decode(
            inputs.q,
            inputs.k_pool,
            inputs.v_pool,
            inputs.tables,
            inputs.q_positions,
            case.q_lens[0],
            **inputs.options,
            **kwargs,
        )


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", DECODE_CASES, ids=case_id)
def test_decode_equals_attention_over_the_local_keys(name, case):
    inputs = build(case)
    close_partial(run(name, case, inputs), truth(inputs))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", DECODE_CASES[:3] + DECODE_CASES[-3:], ids=case_id)
def test_decode_in_half_precision_is_as_good_as_eager(name, case):
    inputs = build(case, torch.float16)
    as_good_as_eager(run(name, case, inputs), truth(inputs), truth(inputs, torch.float16))


# what the copy engine may load: a head size that is a power of two
WHOLE_CASES = [case for case in DECODE_CASES if case.head_dim == 16]


@pytest.mark.parametrize("case", WHOLE_CASES, ids=case_id)
def test_whole_tiles_without_masks_give_the_same_result(case):
    case = replace(case, tile_tokens=32)
    inputs = build(case)
    plan = DecodePlan(3, 16 if case.num_q_heads < 32 else 128, 16, 8, 3, True)
    close_partial(run("triton", case, inputs, plan=plan), truth(inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    "case",
    [
        uniform("one row", (300,), 1, num_q_heads=71, num_kv_heads=1, max_view=300),
        uniform("two rows", (180, 97), 1, num_q_heads=142, num_kv_heads=2, max_view=64),
        uniform("five tokens", (180, 97), 5, num_q_heads=16, num_kv_heads=1, max_view=64),
        uniform("eight tokens", (180, 97), 8, num_q_heads=32, num_kv_heads=2, max_view=64, window=70),
        uniform("softcap", (180, 97), 1, num_q_heads=71, num_kv_heads=1, max_view=64, softcap=3.0),
    ],
    ids=case_id,
)
def test_wide_groups_read_whole_tiles_alone_by_descriptors(case, dtype, monkeypatch):
    """Views end in the middle of rows, and slots past them hold NaN: one of them read by the copy engine spoils all."""
    inputs, described = build(case, dtype), []
    monkeypatch.setattr(decode_triton, "describe_pools", lambda *a: described.append(a[2]) or describe_pools(*a))
    got = run("triton", case, inputs)
    assert described == ([case.tile_tokens] if dtype == torch.float16 else [])
    if dtype == torch.float16:
        as_good_as_eager(got, truth(inputs), truth(inputs, dtype))
    else:
        close_partial(got, truth(inputs))


@pytest.mark.parametrize("scale", [-10.0, -0.4, 0.0])
def test_scales_that_turn_or_level_the_scores_of_a_wide_group(scale):
    case = uniform("two rows", (180, 97), 1, num_q_heads=71, num_kv_heads=1, max_view=64)
    inputs = build(case, torch.float16)
    inputs.options["scale"] = scale
    as_good_as_eager(run("triton", case, inputs), truth(inputs), truth(inputs, torch.float16))


def test_a_pool_that_starts_off_the_copy_engines_grid_is_read_without_it():
    case = uniform("two rows", (180, 97), 1, num_q_heads=71, num_kv_heads=1, max_view=64)
    inputs = build(case, torch.float16)
    want = run("triton", case, inputs)
    k, v = (torch.cat([pool.new_zeros(1), pool.flatten()])[1:].view_as(pool) for pool in (inputs.k_pool, inputs.v_pool))
    assert k.data_ptr() % 16 == v.data_ptr() % 16 == 2
    got = run("triton", case, inputs._replace(k_pool=k, v_pool=v))
    as_good_as_eager(got, truth(inputs), truth(inputs, torch.float16))
    assert (got.out - want.out).abs().max() < 1e-2


@pytest.mark.parametrize("window", [0, 24])
def test_padding_in_rows_of_a_wide_group_sees_nothing(window):
    case = uniform("short", (83, 41, 90), 4, num_q_heads=20, num_kv_heads=1, max_view=64, window=window)
    inputs = build(case)
    unused = torch.tensor([1, 2, 3, 7])
    inputs.q_positions[unused] = -1
    inputs.q[unused] = math.nan
    got = run("triton", case, inputs, plan=DecodePlan(3, 128, 16, 8, 3, True))
    assert (got.lse[unused] == -math.inf).all()
    assert (got.out[unused] == 0.0).all()
    close_partial(got, truth(inputs))


def test_reference_decode_takes_bfloat16():
    inputs = build(DECODE_CASES[0], torch.bfloat16)
    got = run("reference", DECODE_CASES[0], inputs)
    as_good_as_eager(got, truth(inputs), truth(inputs, torch.bfloat16))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_deterministic_decode_gives_a_row_the_same_bits_in_any_batch(name):
    case = uniform("rows", (200, 33, 90, 5), 2, max_view=48)
    inputs = build(case)
    together = run(name, case, inputs, split_tiles=3)
    close_partial(together, truth(inputs))
    for row in range(4):
        tokens = slice(2 * row, 2 * row + 2)
        begin, end = inputs.tables.tile_ranges[row].tolist()
        tables = inputs.tables._replace(
            tile_ranges=inputs.tables.tile_ranges[row : row + 1],
            cum_tiles=torch.tensor([0, end - begin], dtype=torch.int32, device=inputs.q.device),
        )
        alone = inputs._replace(q=inputs.q[tokens], q_positions=inputs.q_positions[tokens], tables=tables)
        got = run(name, case, alone, split_tiles=3)
        assert torch.equal(got.out, together.out[tokens])
        assert torch.equal(got.lse, together.lse[tokens])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_deterministic_decode_of_five_tokens_has_the_bits_of_one_by_one(name):
    case = uniform("verify", (83, 41), 5, max_view=48)
    inputs = build(case)
    together = run(name, case, inputs, split_tiles=2)
    one = shrink(case, [0, 1])
    for token in range(5):
        pick = torch.tensor([token, 5 + token], device=inputs.q.device)
        single = inputs._replace(q=inputs.q[pick], q_positions=inputs.q_positions[pick])
        got = run(name, uniform("one", one.kv_lens, 1), single, split_tiles=2)
        assert torch.equal(got.out, together.out[pick])
        assert torch.equal(got.lse, together.lse[pick])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_nan_in_one_row_stays_in_that_row(name):
    case = DECODE_CASES[0]
    inputs = build(case)
    inputs.q[2] = math.nan
    got = run(name, case, inputs)
    assert got.out[2].isnan().all() and got.lse[2].isnan().all()
    clean = truth(build(case))
    rest = torch.tensor([0, 1, 3])
    close_partial(type(got)(got.out[rest], got.lse[rest]), type(got)(clean.out[rest], clean.lse[rest]))


def test_an_infinity_in_one_column_marks_the_lse_of_its_rows_and_of_no_other():
    """Whoever joins a row's splits may look at some of its columns only, so the others have to know."""
    case = DECODE_CASES[0]
    inputs = build(case)
    clean = run("triton", case, inputs)
    slot = int(inputs.tables.tile_table[int(inputs.tables.tile_ranges[1, 0]), 0])
    inputs.v_pool[slot, 0, 3] = math.inf
    got = run("triton", case, inputs)
    group = case.num_q_heads // case.num_kv_heads
    failed = torch.zeros_like(got.lse, dtype=torch.bool)
    failed[case.q_lens[0] : 2 * case.q_lens[0], :group] = True
    assert torch.equal(got.lse.isnan(), failed) and torch.equal(got.out.isnan().all(-1), failed)
    assert torch.equal(got.out[~failed], clean.out[~failed])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [0, 24])
def test_tokens_that_only_fill_a_row_up_see_nothing(name, window):
    case = uniform("short", (83, 41, 20), 4, max_view=24, window=window)
    inputs = build(case)
    unused = torch.tensor([1, 2, 3, 7])
    inputs.q_positions[unused] = -1
    inputs.q[unused] = math.nan
    got = run(name, case, inputs)
    assert (got.lse[unused] == -math.inf).all()
    assert (got.out[unused] == 0.0).all()
    close_partial(got, truth(inputs))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_decode_of_huge_scores_neither_overflows_nor_vanishes(name):
    case = uniform("huge", (40, 7), 1)
    inputs = build(case)
    inputs.q.mul_(1e4)
    close_partial(run(name, case, inputs), truth(inputs))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_decode_takes_queries_that_are_not_contiguous(name):
    case = DECODE_CASES[5]
    inputs = build(case)
    strided = inputs.q.transpose(0, 1).contiguous().transpose(0, 1)
    close_partial(run(name, case, inputs._replace(q=strided)), truth(inputs))


def test_reference_decode_reads_the_pool_in_place_and_bounds_its_scores(monkeypatch):
    case = uniform("long", (5000, 2100), 1, num_q_heads=2, num_kv_heads=1, head_dim=8, max_view=512, tile_tokens=512)
    inputs = build(case)
    sizes = []
    bmm = torch.bmm

    def spy(a, b):
        sizes.append(b.shape[-1])
        assert b.untyped_storage().data_ptr() == inputs.k_pool.untyped_storage().data_ptr()
        return bmm(a, b)

    monkeypatch.setattr(torch, "bmm", spy)
    close_partial(run("reference", case, inputs), truth(inputs))
    assert max(sizes) == 512 and len(sizes) >= 14


def test_decode_refuses_shapes_that_do_not_match():
    inputs = build(DECODE_CASES[0])
    args = (inputs.k_pool, inputs.v_pool, inputs.tables, inputs.q_positions)
    with pytest.raises(ValueError, match=r"4 rows of 2 query tokens need 8"):
        decode(inputs.q, *args, 2, scale=1.0)
    with pytest.raises(ValueError, match="q_len must be 1 to 16, got 17"):
        decode(inputs.q, *args, 17, scale=1.0)
    with pytest.raises(ValueError, match="Hq a multiple of Hkv"):
        decode(inputs.q[:, :3], *args, 1, scale=1.0)


@pytest.mark.parametrize("num_spans", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("case", [DECODE_CASES[1], DECODE_CASES[2]], ids=case_id)
def test_any_number_of_spans_gives_the_same_result(case, num_spans):
    inputs = build(case)
    partials = num_spans + len(case.kv_lens) * case.num_kv_heads
    workspace = DecodeWorkspace.for_partials(partials, 2, case.head_dim, "cpu")
    workspace.out.fill_(math.nan)
    workspace.lse2.fill_(math.nan)
    close_partial(run("triton", case, inputs, num_spans=num_spans, workspace=workspace), truth(inputs))


def test_a_workspace_that_is_too_small_is_refused():
    inputs = build(DECODE_CASES[0])
    workspace = DecodeWorkspace.for_partials(10, 2, 16, "cpu")
    with pytest.raises(ValueError, match="11 partials of 2 x 16 need 352 floats and 22 LSEs; the workspace holds 320"):
        run("triton", DECODE_CASES[0], inputs, num_spans=3, workspace=workspace)
    for floats, rows in ((351, 22), (352, 21)):
        with pytest.raises(ValueError, match="11 partials of 2 x 16 need 352 floats and 22 LSEs"):
            run("triton", DECODE_CASES[0], inputs, num_spans=3, workspace=DecodeWorkspace(floats, rows, "cpu"))


def test_pools_whose_heads_are_not_dense_are_refused():
    inputs = build(DECODE_CASES[0])
    wide = torch.zeros(8, 4, 16)[:, ::2]
    with pytest.raises(ValueError, match=r"v_pool .* must have dense heads"):
        check_pools(inputs.k_pool, wide)


def test_no_rows_and_no_tiles_are_legal():
    inputs = build(DECODE_CASES[0])
    none = KVTables(
        torch.zeros(0, 4, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    )
    pools = (inputs.k_pool, inputs.v_pool)
    for name in ("reference", "triton"):
        op = get_backend(name, "cpu").decode
        got = op(inputs.q[:2], *pools, none, inputs.q_positions[:2], 1, scale=1.0)
        assert (got.out == 0).all() and (got.lse == -math.inf).all()
        empty = KVTables(none.tile_table, none.tile_ranges[:0], none.cum_tiles[:1])
        got = op(inputs.q[:0], *pools, empty, inputs.q_positions[:0], 1, scale=1.0)
        assert got.out.shape == (0, 4, 16) and got.lse.shape == (0, 4)


def test_slots_past_two_to_the_31_elements_are_read_and_written(tmp_path):
    # a sparse file: 2**27 slots of 32 numbers take up address space only
    slots, far = 2**27 + 64, 2**27 + 3
    pool = torch.from_file(str(tmp_path / "pool"), shared=True, size=slots * 32, dtype=torch.float16)
    pool = pool.view(slots, 2, 16)
    case = uniform("far", (20, 9), 1)
    inputs = build(case, torch.float16)
    triton = get_backend("triton", "cpu")
    used = inputs.k_pool.shape[0]
    mapping = torch.arange(far, far + used)
    # keys serve as values too, so that one file is enough
    triton.store_kv(inputs.k_pool, inputs.k_pool, mapping, pool, pool)
    assert torch.equal(pool[far : far + used].isnan(), inputs.k_pool.isnan())
    near = inputs._replace(v_pool=inputs.k_pool)
    indptr = torch.tensor([0, 1, 2], dtype=torch.int32)
    table = inputs.tables.tile_table.clone()
    table[:, 0] += far
    tables = inputs.tables._replace(tile_table=table)
    got = run("triton", case, near._replace(k_pool=pool, v_pool=pool, tables=tables))
    want = run("triton", case, near)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    options = {"tile_tokens": 16, **inputs.options}
    got, want = (
        triton.prefill(inputs.q, p, p, t, inputs.q_positions, indptr, 1, **options)
        for p, t in ((pool, tables), (inputs.k_pool, inputs.tables))
    )
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


HOPPER, AMPERE = DeviceLimits(132, 227 * 1024, True), DeviceLimits(108, 163 * 1024, False)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 16, 33, 256])
@pytest.mark.parametrize(
    ("packed", "dim", "size"), [(1, 64, 2), (8, 128, 2), (71, 128, 2), (128, 256, 4), (1136, 80, 2)]
)
def test_launch_plans_are_legal_and_fill_the_device(rows, packed, dim, size, deterministic):
    for device in (HOPPER, AMPERE):
        plan = decode_launch_plan(rows, 8, packed, dim, size, 10**6, device, deterministic=deterministic)
        assert TILE_TOKENS % plan.block_n == 0 and plan.block_n >= 16
        assert plan.block_m in (16, 32, 64, 128) and plan.num_warps in (4, 8)
        assert 0.9 * device.multiprocessors <= plan.num_spans <= 6 * device.multiprocessors
        if deterministic:
            assert plan[1:] == decode_launch_plan(1, 8, 1, dim, size, 10, device, deterministic=True)[1:]


def test_the_fitted_launches_are_those_that_were_measured_best():
    def plan(rows, packed=4, q_len=1):
        return decode_launch_plan(rows, 8, packed, 128, 2, 10**6, HOPPER, q_len=q_len)

    assert plan(1) == (256, 16, 64, 4, 3, False)
    assert plan(8) == plan(16) == plan(32) == (256, 16, 64, 8, 3, False)
    assert plan(1, 64, 8) == (256, 64, 64, 4, 3, False)
    assert plan(1, 71) == plan(1, 128, 8) == (132, 128, 128, 8, 3, True)
    # 3 rows: no power of two fills the device; 64 rows: two units a span; 40 rows: spans cross units
    assert plan(3).num_spans == 264
    assert plan(64).num_spans == 256
    assert plan(40).num_spans == 264
    # a table of three tiles cannot feed more than three programs a head
    assert decode_launch_plan(1, 8, 4, 128, 2, 3, HOPPER).num_spans == 24


@pytest.mark.parametrize("q_len", [1, 2, 16])
@pytest.mark.parametrize("group", [1, 4, 16, 71])
def test_the_number_of_spans_depends_on_query_heads_only_where_a_program_fills_a_multiprocessor(q_len, group):
    for rows in (1, 8, 16, 40):
        for size, device in ((2, HOPPER), (4, HOPPER), (2, AMPERE)):
            plan = decode_launch_plan(rows, 8, q_len * group, 128, size, 10**6, device, q_len=q_len)
            few = decode_launch_plan(rows, 8, 1, 128, size, 10**6, device).num_spans
            assert plan.descriptors == (q_len * group > 64 and size == 2 and device is HOPPER)
            assert plan.num_spans == (132 if plan.descriptors else few)


def test_a_schedule_of_the_step_is_used_and_another_one_is_not():
    case = DECODE_CASES[0]
    inputs = build(case)
    want = run("triton", case, inputs, num_spans=3)
    own = with_schedule(inputs.tables, 2, 3)
    ranges = own.tile_ranges.clone()
    # what the schedule says counts, not the ranges that it was derived from
    own.tile_ranges.zero_()
    got = run("triton", case, inputs._replace(tables=own))
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    for other in (with_schedule(own, 1, 3), with_schedule(own, 2, 3, 4)):
        other.tile_ranges.copy_(ranges)
        got = run("triton", case, inputs._replace(tables=other), num_spans=3)
        assert torch.equal(got.out, want.out)


@pytest.mark.gpu
@pytest.mark.parametrize("case", DECODE_CASES + GPU_DECODE_CASES, ids=case_id)
def test_decode_on_a_gpu_in_bfloat16_is_as_good_as_eager(case):
    inputs = build(case, torch.bfloat16, "cuda")
    as_good_as_eager(run("triton", case, inputs), truth(inputs), truth(inputs, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("case", DECODE_CASES + GPU_DECODE_CASES[:2], ids=case_id)
def test_decode_on_a_gpu_in_float32(case):
    inputs = build(case, torch.float32, "cuda")
    close_partial(run("triton", case, inputs), truth(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_DECODE_CASES, ids=case_id)
def test_deterministic_decode_on_a_gpu_gives_a_row_the_same_bits_in_any_batch(case):
    inputs = build(case, torch.bfloat16, "cuda")
    q_len = case.q_lens[0]
    together = run("triton", case, inputs, split_tiles=8)
    as_good_as_eager(together, truth(inputs), truth(inputs, torch.bfloat16))
    for row in range(len(case.kv_lens)):
        tokens = slice(q_len * row, q_len * (row + 1))
        begin, end = inputs.tables.tile_ranges[row].tolist()
        cum = torch.tensor([0, end - begin], dtype=torch.int32, device="cuda")
        tables = inputs.tables._replace(tile_ranges=inputs.tables.tile_ranges[row : row + 1], cum_tiles=cum)
        alone = inputs._replace(q=inputs.q[tokens], q_positions=inputs.q_positions[tokens], tables=tables)
        got = run("triton", case, alone, split_tiles=8)
        assert torch.equal(got.out, together.out[tokens]) and torch.equal(got.lse, together.lse[tokens])

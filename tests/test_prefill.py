"""Prefill against fp64 attention over the whole sequence."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from cases import GPU_PREFILL_CASES, PREFILL_CASES, Case, Inputs, build, case_id, truth
from compare import as_good_as_eager, close_partial, nan_filled_empty

from distdec.ops.backends import get_backend
from distdec.ops.combine import DecodeWorkspace
from distdec.ops.decode_triton import TILE_TOKENS, DeviceLimits
from distdec.ops.prefill import prefill
from distdec.ops.prefill_triton import PrefillPlan, prefill_launch_plan
from distdec.ops.whole_tiles_triton import describable, stretch_end

IMPLEMENTATIONS = ["reference", "triton"]


def run(name: str, case: Case, inputs: Inputs, **kwargs):
    """Run one implementation on a case with NaN in every output before it is written."""
    backend = get_backend(name, inputs.q.device)
    if name == "triton":
        kwargs["tile_tokens"] = case.tile_tokens
    with nan_filled_empty():
        return backend.prefill(
            inputs.q,
            inputs.k_pool,
            inputs.v_pool,
            inputs.tables,
            inputs.q_positions,
            inputs.q_indptr,
            max(case.q_lens),
            **inputs.options,
            **kwargs,
        )


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", PREFILL_CASES, ids=case_id)
def test_prefill_equals_attention_over_the_local_keys(name, case):
    inputs = build(case)
    close_partial(run(name, case, inputs), truth(inputs))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", PREFILL_CASES[:3] + PREFILL_CASES[-3:], ids=case_id)
def test_prefill_in_half_precision_is_as_good_as_eager(name, case):
    inputs = build(case, torch.float16)
    as_good_as_eager(run(name, case, inputs), truth(inputs), truth(inputs, torch.float16))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_tokens_past_the_last_row_are_padding(name):
    case = PREFILL_CASES[0]
    inputs = build(case)
    want = truth(inputs)
    more = inputs._replace(
        q=torch.cat([inputs.q, torch.full_like(inputs.q[:5], torch.nan)]),
        q_positions=torch.cat([inputs.q_positions, torch.full_like(inputs.q_positions[:5], -1)]),
    )
    got = run(name, case, more)
    assert (got.out[-5:] == 0).all() and (got.lse[-5:] == -torch.inf).all()
    close_partial(type(got)(got.out[:-5], got.lse[:-5]), want)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("real", [3, 0], ids=["beside rows", "alone"])
def test_rows_without_tokens_and_tokens_without_row_change_nothing(name, real):
    """A captured step: rows and tokens up to fixed numbers, which bound the longest row too."""
    case = PREFILL_CASES[0]
    inputs = build(case)
    held = int(inputs.q_indptr[real])
    q = torch.cat([inputs.q[:held], torch.full_like(inputs.q[:1], torch.nan).repeat(128 - held, 1, 1)])
    positions = torch.cat([inputs.q_positions[:held], torch.full((128 - held,), -1, dtype=torch.int32)])
    empty = 5 - real
    tables = inputs.tables._replace(
        tile_ranges=torch.cat([inputs.tables.tile_ranges[:real], torch.zeros(empty, 2, dtype=torch.int32)]),
        cum_tiles=torch.cat([inputs.tables.cum_tiles[: real + 1], inputs.tables.cum_tiles[real].repeat(empty)]),
    )
    indptr = torch.cat([inputs.q_indptr[: real + 1], inputs.q_indptr[real].repeat(empty)])
    options = inputs.options | ({"tile_tokens": case.tile_tokens} if name == "triton" else {})
    with nan_filled_empty():
        got = get_backend(name, "cpu").prefill(
            q, inputs.k_pool, inputs.v_pool, tables, positions, indptr, 128, **options
        )
    assert (got.out[held:] == 0).all()
    assert (got.lse[held:] == -torch.inf).all()
    if held:
        close_partial(type(got)(got.out[:held], got.lse[:held]), truth(inputs))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_padding_tokens_inside_a_row_see_nothing(name):
    case = PREFILL_CASES[0]
    inputs = build(case)
    inputs.q_positions[[38, 39, 60]] = -1
    inputs.q[[38, 39, 60]] = torch.nan
    got, want = run(name, case, inputs), truth(inputs)
    assert (got.lse[[38, 39, 60]] == -torch.inf).all()
    close_partial(got, want)


def test_prefill_refuses_shapes_that_do_not_match():
    inputs = build(PREFILL_CASES[0])
    with pytest.raises(ValueError, match="3 rows of 61 query tokens need 4 row pointers"):
        prefill(
            inputs.q, inputs.k_pool, inputs.v_pool, inputs.tables, inputs.q_positions, inputs.q_indptr[:3], 1, scale=1.0
        )


@pytest.mark.parametrize("case", [PREFILL_CASES[3], PREFILL_CASES[13]], ids=case_id)
def test_prefill_split_over_the_keys_gives_the_same_result(case):
    inputs, num_splits = build(case), 3
    heads = sum(case.q_lens) * case.num_q_heads
    workspace = DecodeWorkspace.for_partials(num_splits, heads, case.head_dim, "cpu")
    workspace.out.fill_(torch.nan)
    workspace.lse2.fill_(torch.nan)
    plan = PrefillPlan(block_m=16, block_n=16, num_splits=num_splits, num_warps=4, num_stages=2)
    close_partial(run("triton", case, inputs, plan=plan, workspace=workspace), truth(inputs))


def test_blocks_smaller_than_a_tile_cover_it():
    case = Case("tiles of 64", (150, 61), (9, 30), max_view=100, tile_tokens=64)
    inputs = build(case)
    plan = PrefillPlan(block_m=32, block_n=16, num_splits=1, num_warps=4, num_stages=2)
    close_partial(run("triton", case, inputs, plan=plan), truth(inputs))


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("number", [0, 2, 4, 11, 12, 13, 14])
def test_blocks_without_masks_give_the_same_result(number, descriptors):
    # queries far from the start, so that most tiles are full and seen by all of them
    case = replace(PREFILL_CASES[number], kv_lens=(150, 90), q_lens=(20, 33), num_q_heads=4, num_kv_heads=2)
    for block_n, tile_tokens in ((16, 32), (32, 32)):
        inputs = build(replace(case, tile_tokens=tile_tokens))
        plan = PrefillPlan(32, block_n, 1, 4, 3, descriptors=descriptors)
        close_partial(run("triton", replace(case, tile_tokens=tile_tokens), inputs, plan=plan), truth(inputs))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("scale", [-0.4, 0.0])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_scales_that_turn_or_level_the_scores(name, scale, softcap):
    case = replace(PREFILL_CASES[2], softcap=softcap)
    inputs = build(case)
    inputs.options["scale"] = scale
    close_partial(run(name, case, inputs), truth(inputs))


def test_the_copy_engine_is_left_out_where_it_cannot_read():
    pool = torch.zeros(6, 2, 16, dtype=torch.float16)
    assert describable(pool)
    assert not describable(torch.zeros(6, 2, 80, dtype=torch.float16))
    odd = torch.zeros(6 * 33, dtype=torch.float16).as_strided((6, 2, 16), (33, 16, 1))
    assert not describable(odd)
    shifted = torch.zeros(6 * 32 + 1, dtype=torch.float16)[1:].view(6, 2, 16)
    assert not describable(shifted)
    assert not describable(pool[:0])


@triton.jit
def stretches_kernel(p_tiles, p_ends, end, oldest, newest, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Write the ends of the stretches in turn: of whole tiles, of others, and so on."""
    at = 0
    while at < end:
        at = stretch_end(p_tiles, at, end, oldest, newest, True, TILE, WINDOW, 4)
        tl.store(p_ends, at)
        at = stretch_end(p_tiles, at, end, oldest, newest, False, TILE, WINDOW, 4)
        tl.store(p_ends + 1, at)
        p_ends += 2


@pytest.mark.parametrize(
    ("newest", "window", "lengths", "ends"),
    [
        (200, 0, [8] * 9, [9, 9]),
        (200, 0, [8] * 8, [8, 8]),
        (200, 0, [3, 8, 8, 7, 7, 8, 8, 8, 8, 1], [0, 1, 3, 5, 9, 10]),
        # the last two tiles end after the oldest query, at 55
        (60, 0, [8] * 9, [7, 9]),
        # the window hides tokens up to 20 from the newest query, in tiles 0, 1 and 2
        (60, 40, [8] * 7, [0, 3, 7, 7]),
    ],
)
def test_stretches_of_tiles_that_need_no_mask(newest, window, lengths, ends):
    tiles = torch.tensor([[0, n, 8 * i, 0] for i, n in enumerate(lengths)], dtype=torch.int32)
    got = torch.full((len(ends) + 2,), -1, dtype=torch.int32)
    stretches_kernel[(1,)](tiles, got, len(lengths), 55 if newest == 60 else 190, newest, 8, window)
    assert got.tolist() == [*ends, -1, -1]


def test_no_tokens_give_an_empty_partial():
    inputs = build(PREFILL_CASES[0])
    for name in IMPLEMENTATIONS:
        got = get_backend(name, "cpu").prefill(
            inputs.q[:0],
            inputs.k_pool,
            inputs.v_pool,
            inputs.tables,
            inputs.q_positions[:0],
            torch.zeros(4, dtype=torch.int32),
            0,
            scale=1.0,
        )
        assert got.out.shape == (0, 4, 16) and got.lse.shape == (0, 4)


@pytest.mark.parametrize("max_q_len", [1, 17, 4096])
@pytest.mark.parametrize(("group", "dim", "size"), [(1, 64, 2), (4, 128, 2), (71, 256, 2), (8, 128, 4)])
def test_launch_plans_are_legal(max_q_len, group, dim, size):
    for device in (DeviceLimits(132, 227 * 1024, True), DeviceLimits(108, 163 * 1024, False)):
        plan = prefill_launch_plan(3 * max_q_len, 3, max_q_len, 8, group, dim, size, 1000, device)
        assert plan.block_m in (16, 32, 64, 128) and plan.num_warps in (4, 8)
        assert TILE_TOKENS % plan.block_n == 0 and plan.block_n >= 16
        assert 1 <= plan.num_splits <= 16
        assert not plan.descriptors or (device.warp_group_products and size == 2)
        held = plan.num_stages * 2 * plan.block_n * triton.next_power_of_2(dim) * size
        assert held + plan.block_m * triton.next_power_of_2(dim) * size < device.shared_bytes
    # many query tiles need no split, few do
    assert prefill_launch_plan(4096, 1, 4096, 8, 4, 128, 2, 1000, device).num_splits == 1
    assert prefill_launch_plan(32, 1, 32, 8, 4, 128, 2, 1000, device).num_splits > 1


@pytest.mark.parametrize(("tokens", "splits"), [(512, 1), (256, 2), (128, 4), (32, 16)])
def test_splits_fill_the_last_wave(tokens, splits):
    # 128, 64, 32 and 8 query tiles times heads on 132 multiprocessors: all make 128 programs, never 136 or 192
    device = DeviceLimits(132, 227 * 1024, True)
    assert prefill_launch_plan(tokens, 1, tokens, 8, 4, 128, 2, 1000, device).num_splits == splits


@pytest.mark.gpu
@pytest.mark.parametrize("case", PREFILL_CASES + GPU_PREFILL_CASES, ids=case_id)
def test_prefill_on_a_gpu_in_bfloat16_is_as_good_as_eager(case):
    inputs = build(case, torch.bfloat16, "cuda")
    as_good_as_eager(run("triton", case, inputs), truth(inputs), truth(inputs, torch.bfloat16))

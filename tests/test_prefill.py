"""Prefill against fp64 attention over the whole sequence."""

import pytest
import torch
from cases import GPU_PREFILL_CASES, PREFILL_CASES, Case, Inputs, build, case_id, truth
from compare import as_good_as_eager, close_partial, nan_filled_empty

from distdec.ops.backends import get_backend
from distdec.ops.combine import DecodeWorkspace
from distdec.ops.decode_triton import TILE_TOKENS, DeviceLimits
from distdec.ops.prefill import prefill
from distdec.ops.prefill_triton import PrefillPlan, prefill_launch_plan

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
def test_padding_tokens_inside_a_row_see_nothing(name):
    case = PREFILL_CASES[0]
    inputs = build(case)
    inputs.q_positions[[38, 39, 60]] = -1
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
    # many query tiles need no split, few do
    assert prefill_launch_plan(4096, 1, 4096, 8, 4, 128, 2, 1000, device).num_splits == 1
    assert prefill_launch_plan(32, 1, 32, 8, 4, 128, 2, 1000, device).num_splits > 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", PREFILL_CASES + GPU_PREFILL_CASES, ids=case_id)
def test_prefill_on_a_gpu_in_bfloat16_is_as_good_as_eager(case):
    inputs = build(case, torch.bfloat16, "cuda")
    as_good_as_eager(run("triton", case, inputs), truth(inputs), truth(inputs, torch.bfloat16))

"""Prefill against fp64 attention over the whole sequence."""

import pytest
import torch
from cases import PREFILL_CASES, Case, Inputs, build, case_id, truth
from compare import as_good_as_eager, close_partial, nan_filled_empty

from distdec.ops.backends import get_backend
from distdec.ops.prefill import prefill

IMPLEMENTATIONS = ["reference"]


def run(name: str, case: Case, inputs: Inputs, **kwargs):
    """Run one implementation on a case with NaN in every output before it is written."""
    backend = get_backend(name, inputs.q.device)
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


@pytest.mark.gpu
@pytest.mark.parametrize("case", PREFILL_CASES, ids=case_id)
def test_prefill_on_a_gpu_in_bfloat16_is_as_good_as_eager(case):
    inputs = build(case, torch.bfloat16, "cuda")
    as_good_as_eager(run("triton", case, inputs), truth(inputs), truth(inputs, torch.bfloat16))

"""Decode against fp64 attention over the whole sequence."""

import math

import pytest
import torch
from cases import DECODE_CASES, Case, Inputs, build, case_id, shrink, truth, uniform
from compare import as_good_as_eager, close_partial, nan_filled_empty

from distdec.ops.backends import get_backend
from distdec.ops.decode import decode

IMPLEMENTATIONS = ["reference"]


def run(name: str, case: Case, inputs: Inputs, **kwargs):
    """Run one implementation on a case with NaN in every output before it is written."""
    backend = get_backend(name, inputs.q.device)
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


@pytest.mark.gpu
@pytest.mark.parametrize("case", DECODE_CASES, ids=case_id)
def test_decode_on_a_gpu_in_bfloat16_is_as_good_as_eager(case):
    inputs = build(case, torch.bfloat16, "cuda")
    as_good_as_eager(run("triton", case, inputs), truth(inputs), truth(inputs, torch.bfloat16))

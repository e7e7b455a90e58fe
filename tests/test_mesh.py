"""The layout of ranks, without any process group."""

import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distdec.degrees import across_hosts, legal_layouts, validate_layout
from distdec.mesh import MAX_AGREED, Mesh

small = st.integers(min_value=1, max_value=16)


@given(num_ranks=small, num_kv_heads=small, group_size=st.integers(1, 9))
def test_validator_and_list_of_legal_layouts_agree(num_ranks, num_kv_heads, group_size):
    num_q_heads = num_kv_heads * group_size
    legal = legal_layouts(num_ranks, num_q_heads, num_kv_heads)
    assert (num_ranks, 1) in legal
    for kvp in range(1, 17):
        for tp in range(1, 17):
            if (kvp, tp) in legal:
                validate_layout(num_ranks, kvp, tp, num_q_heads, num_kv_heads)
            else:
                with pytest.raises(ValueError, match="illegal layout") as error:
                    validate_layout(num_ranks, kvp, tp, num_q_heads, num_kv_heads)
                assert pairs_in(str(error.value)) == legal


def pairs_in(message):
    told = message.split("legal (kvp, tp): ")[1]
    return [(int(a), int(b)) for a, b in re.findall(r"\((\d+), (\d+)\)", told)]


@pytest.mark.parametrize(
    ("num_ranks", "num_q_heads", "num_kv_heads", "legal"),
    [
        (8, 32, 8, [(8, 1), (4, 2), (2, 4), (1, 8)]),
        (8, 32, 2, [(8, 1), (4, 2)]),
        (6, 28, 4, [(6, 1), (3, 2)]),
        (5, 40, 8, [(5, 1)]),
        (3, 71, 1, [(3, 1)]),
        (6, 9, 3, [(6, 1), (2, 3)]),
        (4, 9, 4, []),
    ],
)
def test_legal_layouts(num_ranks, num_q_heads, num_kv_heads, legal):
    assert legal_layouts(num_ranks, num_q_heads, num_kv_heads) == legal


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((8, 4, 8, 32, 8), "kvp x tp = 4 x 8 = 32 is not the number of ranks, 8"),
        ((8, 1, 8, 32, 2), "tp = 8 does not divide the 2 KV heads; give the surplus ranks to kvp"),
        ((4, 2, 2, 9, 4), "9 is not a multiple of 4"),
        ((4, 0, 4, 8, 4), "at least 1"),
    ],
)
def test_the_refusal_has_every_number(numbers, told):
    with pytest.raises(ValueError) as error:
        validate_layout(*numbers)
    ranks, kvp, tp, q_heads, kv_heads = numbers
    every = f"(ranks={ranks}, kvp={kvp}, tp={tp}, num_q_heads={q_heads}, num_kv_heads={kv_heads})"
    assert told in str(error.value)
    assert every in str(error.value)


def test_groups_across_hosts_are_found():
    assert across_hosts(range(8), 4, 4) == []
    assert across_hosts(range(8), 8, 4) == [list(range(8))]
    assert across_hosts(range(6), 2, 3) == [[2, 3]]
    # a mesh over a part of the world
    assert across_hosts([1, 3, 4, 6], 2, 4) == []
    assert across_hosts([1, 3, 6, 9], 2, 8) == [[6, 9]]


def test_single_mesh_needs_no_process_group():
    with Mesh.single() as mesh:
        assert (mesh.rank, mesh.world_size, mesh.kvp_size, mesh.tp_size, mesh.is_leader) == (0, 1, 1, 1, True)
        assert mesh.device == torch.device("cpu")
        assert mesh.agree([3, -1, 1 << 62]) == [3, -1, 1 << 62]
        mesh.check_same("anything", b"x")
        mesh.barrier()
        assert not dist.is_initialized()
    mesh.close()


def test_create_without_a_launcher_is_a_mesh_of_one():
    mesh = Mesh.create(device="cpu")
    assert (mesh.world_size, dist.is_initialized()) == (1, False)
    with pytest.raises(ValueError, match=r"2 x 1 = 2 is not the number of ranks, 1 .*legal \(kvp, tp\): \(1, 1\)"):
        Mesh.create(kvp=2, device="cpu")
    with pytest.raises(ValueError, match="ascending world ranks from 0 to 0"):
        Mesh.create(ranks=[0, 1], device="cpu")


@pytest.mark.parametrize("values", [[1.5], ["1"], [1 << 63], None, range(MAX_AGREED + 1)])
def test_agree_takes_only_integers_of_64_bits(values):
    with pytest.raises(ValueError, match="integers of 64 bits"):
        Mesh.single().agree(values)


@pytest.mark.parametrize("seconds", [0.5, -1, float("nan"), True, "5", 1e9])
def test_a_limit_of_a_wait_that_is_none_is_refused(seconds):
    with pytest.raises(ValueError, match="timeout_s must be"):
        Mesh.create(device="cpu", timeout_s=seconds)

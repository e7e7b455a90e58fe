"""Storing new keys and values into the pool."""

import pytest
import torch

from distdec.ops.backends import get_backend
from distdec.ops.store_kv import store_kv

IMPLEMENTATIONS = ["reference", "triton"]


def check(name: str, device: str, dtype: torch.dtype, heads: int, dim: int, v_dim: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    k = torch.randn(7, heads, dim, generator=generator).to(device, dtype)
    # values as a slice of a wider projection: rows are not dense
    v = torch.randn(7, 2 * heads, v_dim, generator=generator).to(device, dtype)[:, heads:]
    # one more slot in front, where slot -1 would land
    k_wide = torch.full((21, heads, dim), torch.nan, dtype=dtype, device=device)
    v_wide = torch.full((21, heads, v_dim), torch.nan, dtype=dtype, device=device)
    k_pool, v_pool = k_wide[1:], v_wide[1:]
    slots = [19, -1, 0, 5, 4, -1, 11]
    mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    get_backend(name, device).store_kv(k, v, mapping, k_pool, v_pool)
    for token, slot in enumerate(slots):
        if slot >= 0:
            assert torch.equal(k_pool[slot], k[token])
            assert torch.equal(v_pool[slot], v[token])
    untouched = [s for s in range(20) if s not in slots]
    assert k_pool[untouched].isnan().all() and v_pool[untouched].isnan().all()
    assert k_wide[0].isnan().all() and v_wide[0].isnan().all()


SHAPES = [(2, 16, 16), (3, 80, 80), (1, 24, 40), (8, 128, 128)]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "dim", "v_dim"), SHAPES)
def test_every_token_lands_in_its_slot_and_others_stay(name, heads, dim, v_dim):
    check(name, "cpu", torch.float32, heads, dim, v_dim)
    check(name, "cpu", torch.float16, heads, dim, v_dim)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_no_tokens_store_nothing(name):
    pool = torch.full((3, 2, 8), torch.nan)
    empty = torch.zeros(0, 2, 8)
    get_backend(name, "cpu").store_kv(empty, empty, torch.zeros(0, dtype=torch.int64), pool, pool)
    assert pool.isnan().all()


def test_store_refuses_shapes_that_do_not_match():
    pool = torch.zeros(3, 2, 8)
    slots = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"k \[4, 1, 8\] does not fit a pool"):
        store_kv(torch.zeros(4, 1, 8), torch.zeros(4, 2, 8), slots, pool, pool)
    with pytest.raises(ValueError, match="one slot a token"):
        store_kv(torch.zeros(3, 2, 8), torch.zeros(3, 2, 8), slots, pool, pool)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim", "v_dim"), SHAPES)
def test_store_on_a_gpu(heads, dim, v_dim):
    check("triton", "cuda", torch.bfloat16, heads, dim, v_dim)

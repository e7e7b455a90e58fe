"""Programs that ask for what is read next: each piece once, beside an exchange that they leave as it is."""

import math

import pytest
import torch
import triton.language as tl
from one_shot_inputs import as_splits, random_partials, truth
from slab_ranks import SimulatedSlabs

from distdec.ops import one_shot_sum_triton, one_shot_triton
from distdec.ops.fetch_triton import NOTHING, Fetch, fetch_of, fetchable, sized
from distdec.ops.splits import Splits


@pytest.fixture
def asked(monkeypatch):
    """Addresses that fetching programs ask for: the interpreter has no assembly."""
    addresses = []

    def ask(assembly, constraints, args, **how):
        address, wanted = (argument.handle.data for argument in args)
        size = 1024 if "bulk" in assembly.value else 128
        addresses.extend((int(a), size) for a, w in zip(address, wanted, strict=True) if w)

    monkeypatch.setattr(tl, "inline_asm_elementwise", ask)
    return addresses


class Ranks(SimulatedSlabs):
    """Ranks that sum or merge, and read `following` next."""

    def __init__(self, following, kind):
        super().__init__(2, channels=16)
        self.following, self.kind = following, kind

    def launch(self, rank, mine, *, push=True, merge=True):
        how = {"spin_limit": self.spin_limit, "following": self.following, "push": push, "merge": merge}
        if self.kind == "sum":
            out = torch.full_like(mine, math.nan)
            one_shot_sum_triton.one_shot_sum(self.slabs[rank], mine, out, **how)
            return out
        out, lse = torch.full((3, 40), math.nan), torch.full((3, 2), math.nan)
        splits = as_splits(mine) if self.kind == "words" else Splits.of(mine)
        one_shot_triton.one_shot(self.slabs[rank], splits, out, lse, payload=torch.float32, **how)
        return out, lse


@pytest.mark.parametrize("kind", ["sum", "merge", "words"])
@pytest.mark.parametrize(("num_bytes", "bulk"), [(700 * 1024 + 100, True), (600 * 128 + 100, False), (100, True)])
def test_every_whole_piece_is_asked_for_once_and_the_exchange_is_as_it_was(monkeypatch, asked, kind, num_bytes, bulk):
    following = torch.zeros(num_bytes, dtype=torch.uint8)
    made = []

    def cpu(following, slab, num_programs):
        made.append(sized(following.nbytes, bulk, slab, num_programs))
        return made[-1]

    for module in (one_shot_sum_triton, one_shot_triton):
        monkeypatch.setattr(module, "fetch_of", cpu)
    ranks = Ranks(following, kind)
    if kind == "sum":
        parts = [torch.arange(700.0) * (rank + 1) for rank in range(2)]
        assert all(torch.equal(got, parts[0] + parts[1]) for got in ranks.step(parts))
    else:
        partials = random_partials(2, 3, 2, 20)
        out, lse = truth(partials)
        for got, got_lse in ranks.step(partials):
            torch.testing.assert_close(got.double(), out.flatten(1), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got_lse.double(), lse, rtol=1e-5, atol=1e-5)
    piece = 1024 if bulk else 128
    # pushes and merges of two ranks are a launch each
    wanted = [(following.data_ptr() + i * piece, piece) for i in range(num_bytes // piece) for _ in range(4)]
    assert sorted(asked) == wanted
    assert [fetch.num_programs for fetch in made] == [4 if num_bytes > 1024 else 0] * 4


def test_fetching_programs_come_where_the_exchange_leaves_room():
    slab = SimulatedSlabs(2, channels=528).slabs[0]
    assert sized(16 << 20, True, slab, 32) == Fetch(128, 16384, True)
    assert sized(64 << 20, True, slab, 32) == Fetch(132, 65536, True)
    assert sized(64 << 20, False, slab, 512) == Fetch(16, 524288, False)
    assert sized(64 << 20, True, slab, 528).num_programs == 0
    assert sized(1000, True, slab, 4).num_programs == 0


def test_nothing_is_fetched_where_there_is_no_cache_to_fill_or_no_run_of_memory():
    slab = SimulatedSlabs(2).slabs[0]
    weight = torch.zeros(64, 64)
    assert fetch_of(None, slab, 1) == fetch_of(weight, slab, 1) == NOTHING
    assert fetchable(weight)
    assert not fetchable(weight.T[:, 1:])
    assert not fetchable(weight.view(-1)[1:])


@pytest.mark.gpu
def test_fetching_on_a_gpu_is_bounded_by_its_cache():
    slab = SimulatedSlabs(2, channels=528).slabs[0]
    weight = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    properties = torch.cuda.get_device_properties(0)
    fetch = fetch_of(weight, slab, 4)
    piece = 1024 if properties.major >= 9 else 128
    assert fetch == Fetch(132, properties.L2_cache_size // 2 // piece, properties.major >= 9)

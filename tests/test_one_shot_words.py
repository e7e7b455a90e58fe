"""The one_shot merge of few rows: numbers that carry the epoch, alone and in turns with flags on the same slab."""

import os
import tempfile
import threading

import pytest
import torch
from one_shot_inputs import Workspace, as_splits, random_partials, truth
from one_shot_ranks import Simulation, check
from slab_ranks import shared_slabs

from distdec.mesh import Mesh
from distdec.one_shot import OneShotMerge
from distdec.ops.one_shot_words_triton import WORD_BYTES, word_width
from distdec.ops.slab_triton import Slab
from distdec.ops.splits import Splits


def words_of(sim, rank):
    """The words of a rank's slab: [channel, parity, source, word]."""
    slab = sim.slabs[rank]
    words = sim.memory[rank][slab.words_offset :].view(torch.int64)
    return words.view(slab.channels, 2, slab.num_ranks, -1)


@pytest.mark.parametrize(("num_ranks", "scatter"), [(2, False), (3, True), (5, False)])
def test_rows_in_parts_merge_to_the_whole_without_a_flag(num_ranks, scatter):
    g = torch.Generator().manual_seed(3)
    sim = Simulation(num_ranks, words=True)
    # columns of ranks cut through parts, a last part may be narrow; units without a split, on some ranks or on all
    tiles = [[7, 0], [1, 0], [3, 0], [0, 0], [4, 0]][:num_ranks]
    for step, (q_len, heads, group, dim) in enumerate([(1, 1, 3, 80), (1, 1, 2, 20), (2, 1, 1, 64), (1, 2, 1, 40)]):
        spaces = [Workspace(row, 4 + step, q_len, heads, group, dim, g) for row in tiles]
        check(sim.step(spaces, scatter=scatter), truth([s.partial for s in spaces]), scatter=scatter)
    # rows of 3 heads of 3 parts, of 2 of 1, of 2 of 2, of 2 of 2
    assert sim.slabs[0].state.tolist() == [4] * 4 + [3] * 4 + [1] * 10 + [0] * 15
    for memory, slab in zip(sim.memory, sim.slabs, strict=True):
        flags = 4 * slab.channels * num_ranks
        assert (memory[: slab.flags_offset] == 0xFF).all()
        assert not memory[slab.flags_offset :][:flags].any()


def test_more_rows_come_in_wider_parts():
    partials = random_partials(2, 1, 2, 128)
    # two rows of four parts, of two, and of one part that is too wide
    for channels, width in ((8, 32), (7, 64), (4, 64), (3, 0)):
        sim = Simulation(2, channels=channels)
        assert word_width(sim.slabs[0], as_splits(partials[0]), torch.float32, 0) == width
        check(sim.step([as_splits(p) for p in partials]), truth(partials))


def test_what_travels_as_words_follows_from_shapes_alone():
    def width(tokens, heads, dim, *, ranks=2, payload=torch.float32, columns=0, words=WORD_BYTES, **changes):
        slab = Slab(torch.empty(0), torch.empty(0), 0, ranks, 528, 15872, words)
        splits = Splits(torch.empty(0, 4, dim), None, torch.empty(0), tokens, heads // 4, 1, 4, 256)
        return word_width(slab, splits._replace(**changes), payload, columns)

    assert [width(tokens, 32, 128) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 32, 32, 64, 64, 0]
    assert [width(tokens, 32, 64) for tokens in (8, 9, 16, 17)] == [32, 64, 64, 0]
    # words to seven peers take the link for longer than a flag would
    assert [width(tokens, 32, 128, ranks=8) for tokens in (4, 5)] == [32, 0]
    assert width(8, 32, 128, ranks=8, columns=512) == 64
    assert width(1, 32, 128, payload=torch.bfloat16) == 0
    assert width(1, 32, 128, ranges=None) == 0
    assert width(1, 32, 128, split_tiles=4) == 0
    assert width(1, 32, 128, words=0) == 0


@pytest.mark.parametrize(("num_ranks", "first_epoch"), [(2, 2**31 - 4), (3, 0)])
def test_words_and_flags_take_turns_amid_leftovers(num_ranks, first_epoch):
    sim = Simulation(num_ranks, channels=6, first_epoch=first_epoch)
    g = torch.Generator().manual_seed(8)
    # ages up to the largest, which look like epochs to come; slots themselves hold NaN
    ages = torch.tensor([0, 1, 2, 7, 2**16, 2**31 - 1, 2**31, 2**31 + 5, 2**32 - 30])
    for rank in range(num_ranks):
        words = words_of(sim, rank)
        epochs = first_epoch - ages[torch.randint(len(ages), words.shape, generator=g)]
        words.copy_((epochs << 32) + torch.randint(2**32, words.shape, generator=g))
    turns = "wwffwwbwfw"
    for step, turn in enumerate(turns):
        tokens, heads, dim = [(1, 3, 64), (1, 1, 128), (3, 2, 20), (2, 1, 80)][step % 4]
        partials = random_partials(num_ranks, tokens, heads, dim, seed=step)
        if turn == "b":
            # in a type that words do not take
            sim.step([as_splits(p) for p in partials], payload=torch.bfloat16)
            continue
        inputs = [as_splits(p) for p in partials] if turn == "w" else partials
        scatter = step % 3 == 1
        before = [words_of(sim, rank).clone() for rank in range(num_ranks)]
        check(sim.step(inputs, scatter=scatter), truth(partials), scatter=scatter)
        for rank in range(num_ranks):
            assert torch.equal(words_of(sim, rank), before[rank]) == (turn == "f")
    assert [slab.state[-1].item() for slab in sim.slabs] == [0] * num_ranks


def put_later(memory, stale, fresh, pieces):
    """Put bytes that a peer has sent back to what they were, and let them arrive again meanwhile, piece by piece."""
    memory.copy_(stale)

    def arrive(left):
        memory[left[0]] = fresh[left[0]]
        if left[1:]:
            later(left[1:])

    def later(left):
        timer = threading.Timer(0.02, arrive, [left])
        timer.start()

    later(pieces)


@pytest.mark.parametrize("last", [0, 7])
@pytest.mark.parametrize("age", [2, 2**31, 2**31 + 2, 2**32 - 2])
def test_words_may_arrive_one_after_the_other_amid_words_of_any_age(age, last):
    sim = Simulation(2, words=True, spin_limit=10**6)
    partials = random_partials(2, 1, 1, 40)
    for rank in (0, 1):
        sim.launch(rank, partials[rank], merge=False)
    # use 1: parity 1, source 1; an LSE, which is word 0, or a column comes after all the others
    words = words_of(sim, 0)[:, 1, 1]
    fresh, old = words.clone(), torch.full_like(words, (((1 - age + 2**31) % 2**32 - 2**31) << 32) + 0x40000000)
    others = [i for i in range(words.shape[1]) if i != last]
    put_later(words, old, fresh, [(slice(None), others[:3]), (slice(None), others), slice(None)])
    first = sim.launch(0, partials[0], push=False)
    check([first, sim.launch(1, partials[1], push=False)], truth(partials))


@pytest.mark.parametrize("age", [2, 2**31 - 2, 2**31 + 2, 2**32 - 3])
def test_a_flag_of_any_age_is_waited_for(age):
    """Uses by words raise no flag, so that the last one may be from very long ago."""
    sim = Simulation(2, spin_limit=10**6)
    partials = random_partials(2, 2, 2, 8)
    for rank in (0, 1):
        sim.launch(rank, partials[rank], merge=False)
    flags = sim.memory[0][sim.slabs[0].flags_offset : sim.slabs[0].words_offset].view(torch.int32)
    fresh = flags.clone()
    old = (fresh.to(torch.int64) - age).to(torch.int32)
    put_later(flags, old, fresh, [slice(0, 4), slice(None)])
    first = sim.launch(0, partials[0], push=False)
    check([first, sim.launch(1, partials[1], push=False)], truth(partials))


def test_a_column_that_is_not_finite_fails_its_row_in_every_part():
    g = torch.Generator().manual_seed(5)
    spaces = [Workspace([3, 2], 4, 1, 1, 2, 80, g) for _ in range(2)]
    bad = spaces[1].ranges[1, 0]
    spaces[1].out[bad, 1, 70], spaces[1].lse2[bad, 1] = torch.nan, torch.nan
    out, lse = truth([s.partial for s in spaces])
    out[1, 1], lse[1, 1] = torch.nan, torch.nan
    check(Simulation(2, words=True).step(spaces), (out, lse))


def take_turns_between_processes(path, scatter):
    """Four channels: one token of three heads travels as words, more rows or joined ones do not."""
    with Mesh.create() as mesh:
        merge = OneShotMerge(mesh, scatter=scatter, capacity_bytes=4096, map_slabs=shared_slabs(path), timeout_s=5.0)
        results = []
        for step in range(12):
            mine = random_partials(mesh.kvp_size, 1 + step % 3 // 2, 3, 32, seed=step)[mesh.kvp_rank]
            results.append(merge(mine) if step % 4 == 3 else merge.merge_splits(as_splits(mine)))
        merge.check()
        used = merge._slabs._memory[mesh.kvp_rank][merge._slab.words_offset :].any().item()
        merge.close()
        return [(m.out, m.lse) for m in results], used


@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "scatter"), [(2, False), (3, True)])
def test_ranks_in_processes_send_words_and_flags_in_turns(ranks, num_ranks, scatter):
    with tempfile.TemporaryDirectory() as directory:
        outcomes = ranks(num_ranks).run(take_turns_between_processes, os.path.join(directory, "slab"), scatter)
    assert all(used for _, used in outcomes)
    for step in range(12):
        partials = random_partials(num_ranks, 1 + step % 3 // 2, 3, 32, seed=step)
        check([results[step] for results, _ in outcomes], truth(partials), scatter=scatter)

"""A row's new token, attended to apart from the older ones: the same attention, and stored by whoever joins."""

import importlib
import math

import pytest
import torch
from compare import close, close_partial, nan_filled_empty
from one_shot_inputs import NEG_INF, Workspace, truth
from slab_ranks import SimulatedSlabs

from distdec.batch import StepBuffers
from distdec.cache.kv_cache import KVCache
from distdec.cache.layout import CacheLayout
from distdec.ops.backends import get_backend
from distdec.ops.one_shot_words_triton import word_width
from distdec.ops.own import OwnTokens, add_own
from distdec.ops.partial import Partial

# values are cut into two parts where kernels work on parts of a row
TOKENS, KV_HEADS, GROUP, DIM, V_DIM = 4, 2, 3, 20, 36
HEADS = KV_HEADS * GROUP


def own_tokens(generator, slots, *, softcap=0.0, dtype=torch.float32):
    """New tokens with strides of a packed projection; the pools hold NaN."""
    packed = torch.randn(TOKENS, HEADS * DIM + KV_HEADS * (DIM + V_DIM), generator=generator).to(dtype)
    q, k, v = packed.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * V_DIM], 1)
    pools = tuple(torch.full((9, KV_HEADS, dim), math.nan, dtype=dtype) for dim in (DIM, V_DIM))
    q, k, v = (x.unflatten(1, (heads, -1)) for x, heads in ((q, HEADS), (k, KV_HEADS), (v, KV_HEADS)))
    return OwnTokens.of(q, k, v, torch.tensor(slots), pools, 0.3, softcap)


def as_a_partial(own):
    """The own tokens alone, in float64: what one more rank would send that held nothing else."""
    k, v = (x.double().repeat_interleave(GROUP, 1) for x in (own.k, own.v))
    score = (own.q.double() * k).sum(-1) * own.scale
    if own.softcap:
        score = own.softcap * torch.tanh(score / own.softcap)
    return Partial(v.clone(), score.masked_fill((own.slots < 0)[:, None], NEG_INF))


def check_stored(own):
    """Own tokens lie in their slots, rounded as the pool is, and every other slot is as it was."""
    for pool, new in ((own.k_pool, own.k), (own.v_pool, own.v)):
        want = torch.full_like(pool, math.nan)
        for token, slot in enumerate(own.slots.tolist()):
            if slot >= 0:
                want[slot] = new[token].to(pool.dtype)
        torch.testing.assert_close(pool, want, rtol=0, atol=0, equal_nan=True)


def some_partials(seed):
    """Partials of four tokens: none of the older keys of token 1 is here, its out is garbage."""
    g = torch.Generator().manual_seed(seed)
    partial = Partial(torch.randn(TOKENS, HEADS, V_DIM, generator=g), torch.randn(TOKENS, HEADS, generator=g) * 3)
    partial.out[1], partial.lse[1] = math.nan, NEG_INF
    return partial, g


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_own_tokens_count_as_one_more_key_where_they_are(softcap):
    partial, g = some_partials(1)
    own = own_tokens(g, [3, 7, -1, 0], softcap=softcap)
    own.v[2, 1, 4] = math.nan
    got = add_own(partial, own)
    close_partial(got, Partial(*truth([partial, as_a_partial(own)])))
    # a row without any key stays one
    nothing = add_own(partial, own._replace(slots=torch.full((TOKENS,), -1)))
    close_partial(nothing, Partial(partial.out.masked_fill((partial.lse == NEG_INF)[..., None], 0.0), partial.lse))


class Space(Workspace):
    """Splits of four rows, with their own tokens."""

    def __init__(self, tiles, slots, generator, **options):
        super().__init__(tiles, 5, 1, KV_HEADS, GROUP, V_DIM, generator)
        self.own = own_tokens(generator, slots, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
@pytest.mark.parametrize("finish", [False, True])
def test_the_combine_adds_them_and_stores_them(finish, options, dtype):
    g = torch.Generator().manual_seed(2)
    # the second row's only key is its own, the last one has none
    space = Space([7, 0, 3, 0], [3, 7, -1, -1], g, dtype=dtype, **options)
    sinks = torch.randn(HEADS, generator=g) if finish else None
    combine = importlib.import_module("distdec.ops.combine_triton").combine_splits
    with nan_filled_empty():
        got = combine(space.splits, own=space.own, finish=finish, sinks=sinks)
    close_partial(got, Partial(*truth([space.partial, as_a_partial(space.own)], sinks)))
    check_stored(space.own)


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_nan_in_an_own_token_fails_its_rows_and_no_other(where):
    g = torch.Generator().manual_seed(3)
    space = Space([7, 0, 3, 0], [3, 7, -1, -1], g)
    for token in (0, 2):
        # the third token lies on another rank: here its numbers mean nothing
        getattr(space.own, where)[token, 1, 5] = math.nan
    combine = importlib.import_module("distdec.ops.combine_triton").combine_splits
    got = combine(space.splits, own=space.own, finish=True)
    failed = torch.zeros(TOKENS, HEADS, dtype=torch.bool)
    failed[0, [1] if where == "q" else [3, 4, 5]] = True
    assert torch.equal(got.lse.isnan(), failed)
    assert torch.equal(got.out.isnan(), failed[..., None].expand(got.out.shape))


class Ranks(SimulatedSlabs):
    """Ranks of the merge whose splits leave own tokens out."""

    def launch(self, rank, space, *, scatter=False, sinks=None, push=True, merge=True):
        from distdec.merge import column_range, padded_columns
        from distdec.ops.one_shot_triton import one_shot

        size, width = len(self.slabs), HEADS * V_DIM
        start, stop = column_range(width, size, rank) if scatter else (0, width)
        out, lse = torch.full((TOKENS, stop - start), math.nan), torch.full((TOKENS, HEADS), math.nan)
        columns = padded_columns(width, size) if scatter else 0
        how = {"payload": torch.float32, "spin_limit": self.spin_limit, "columns": columns, "sinks": sinks}
        one_shot(self.slabs[rank], space.splits, out, lse, own=space.own, push=push, merge=merge, **how)
        return out, lse


# on 48 channels each part of a row is a program, and numbers carry the epoch
@pytest.mark.parametrize(
    ("scatter", "softcap", "channels"), [(False, 0.0, 5), (True, 0.0, 5), (False, 2.0, 5), (True, 2.0, 48)]
)
def test_the_merge_of_all_ranks_adds_each_token_once(scatter, softcap, channels):
    tiles, slots = ([7, 1, 3, 0], [0, 12, 0, 0], [2, 0, 0, 0]), ([3, -1, -1, -1], [-1, 7, 1, -1], [-1] * 4)
    # all ranks have the same q, k and v
    spaces = [
        Space(t, s, torch.Generator().manual_seed(5 + rank), softcap=softcap)
        for rank, (t, s) in enumerate(zip(tiles, slots, strict=True))
    ]
    for space in spaces[1:]:
        space.own = space.own._replace(q=spaces[0].own.q, k=spaces[0].own.k, v=spaces[0].own.v)
    sinks = torch.randn(HEADS)
    want, want_lse = truth([x for s in spaces for x in (s.partial, as_a_partial(s.own))], sinks)
    ranks = Ranks(3, channels=channels)
    for rank, (out, lse) in enumerate(ranks.step(spaces, scatter=scatter, sinks=sinks)):
        flat, width = want.flatten(1), 80
        close(out, flat[:, rank * width : (rank + 1) * width] if scatter else flat)
        close(lse, want_lse)
        check_stored(spaces[rank].own)
    assert word_width(ranks.slabs[0], spaces[0].splits, torch.float32, width) == (32 if channels == 48 else 0)


def buffers(kv, rank, **options):
    return StepBuffers(kv, rank, get_backend("reference", "cpu"), windows=(1, 3, 6), **options)


def keys_of(tables):
    """(row, slot, position) of every token that the tables hold."""
    return {
        (row, slot + i, position + i)
        for row, (begin, end) in enumerate(tables.tile_ranges.tolist())
        for slot, length, position, _ in tables.tile_table[begin:end].tolist()
        for i in range(length)
    }


def test_the_tables_of_a_step_leave_out_new_tokens_and_nothing_else():
    kv = KVCache(CacheLayout(num_frames=(40,) * 3, min_chunk=2, max_chunk=4, page_size=2))
    apart, plain = ([buffers(kv, rank, own_apart=flag) for rank in range(3)] for flag in (True, False))
    for seq, length in enumerate((0, 5, 9)):
        kv.add(seq)
        kv.extend(seq, length)
    held = 0
    for _ in range(20):
        for seq in range(3):
            kv.extend(seq, 1)
        rows = [(seq, 1) for seq in range(3)]
        for rank in range(3):
            got, want = apart[rank].fill(rows), plain[rank].fill(rows)
            assert got.own_apart and not want.own_apart
            assert torch.equal(got.slot_mapping, want.slot_mapping)
            assert torch.equal(got.q_positions, want.q_positions)
            new = {(row, slot, kv.length(row) - 1) for row, slot in enumerate(want.slot_mapping.tolist()) if slot >= 0}
            held += len(new)
            assert keys_of(got.tables("decode", 0)) == keys_of(want.tables("decode", 0)) - new
            for window in (1, 3, 6):
                first = [kv.length(row) - window for row in range(3)]
                mine, whole = (
                    {key for key in keys_of(batch.tables("decode", window)) if key[2] >= first[key[0]]}
                    for batch in (got, want)
                )
                assert mine == whole - new
    assert held == 60
    # rows of several tokens, or beside a prompt's, are in the tables whole
    for rows in ([(0, 2), (1, 2)], [(0, 1), (1, 3)], [(0, 1), (1, 0)]):
        for seq, count in rows:
            kv.extend(seq, count)
        got, want = apart[0].fill(rows), plain[0].fill(rows)
        assert not got.own_apart
        for section in ("decode", "prefill"):
            assert keys_of(got.tables(section, 0)) == keys_of(want.tables(section, 0))

"""The importable layer over ranks: every step's output is attention over the whole sequence, whatever the sharding."""

import pytest
import torch
from compare import FLOAT32, same_specials

from distdec.attention import DistributedAttention
from distdec.merge import CollectiveMerge
from distdec.mesh import Mesh
from distdec.sharded_cache import ShardedCache

HEADS = {"small": (8, 2, 16), "odd": (15, 3, 10), "one": (7, 1, 8)}
# (new tokens of sequence 0, 1, 2) a step: first slices, decode, a slice beside decode rows, an idle sequence, verify
# fewer of them, for Triton's interpreter
FEW_STEPS = [(6, 1, 9), (1, 1, 1), (1, 1, 1), (1, 1, 3)]
STEPS = [(70, 1, 33), (1, 1, 1), (1, 1, 40), (0, 1, 1), (5, 5, 5), (1, 1, 1)]


def full_attention(q, k, v, positions, *, window=0, softcap=0.0, sinks=None, scale=None):
    """Attention in float64 over a whole sequence. q [n, Hq, D] at `positions`, k [L, Hkv, D], v [L, Hkv, Dv]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    keys = torch.arange(len(k))
    hidden = keys > positions[:, None]
    if window:
        hidden |= keys <= positions[:, None] - window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sink], -1)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    lse = scores.logsumexp(-1)
    return torch.einsum("hnl,lhd->nhd", (scores - lse[..., None]).exp(), v), lse.T


def run_steps(kvp, mode, heads, options, layout, steps=STEPS):
    """Run the steps on this rank; return the largest errors of out and lse, and what the rank holds."""
    num_q, num_kv, dim = heads
    with Mesh.create(kvp) as mesh:
        cache = ShardedCache(mesh, num_layers=2, num_kv_heads=num_kv, head_dim=dim, max_tokens=900, **layout)
        cache.pool.k.fill_(torch.nan)
        cache.pool.v.fill_(torch.nan)
        attention = DistributedAttention(mesh, cache, merge=mode)
        generator = torch.Generator().manual_seed(7)
        kept = [[(torch.zeros(0, num_kv, dim), torch.zeros(0, num_kv, dim)) for _ in range(3)] for _ in range(2)]
        sinks = torch.randn(num_q, generator=generator) if options.get("sinks") else None
        call = {name: value for name, value in options.items() if name != "sinks"}
        for seq in range(3):
            cache.kv.add(seq)
        worst, calls = [0.0, 0.0], []
        for counts in steps:
            order = sorted(range(3), key=lambda s: counts[s] > 5 or counts[s] == 0)
            rows = [(seq, counts[seq]) for seq in order]
            batch = cache.begin_step(rows)
            assert batch.own_apart == (layout.get("own_apart", False) and set(counts) == {1})
            total = sum(counts)
            for layer in range(2):
                q = torch.randn(total, num_q, dim, generator=generator)
                k, v = (torch.randn(total, num_kv, dim, generator=generator) for _ in range(2))
                before = attention.merge.calls
                got = attention(q, k, v, batch, layer, sinks=sinks, **call)
                calls.append(attention.merge.calls - before)
                at = 0
                for seq, n in rows:
                    old_k, old_v = kept[layer][seq]
                    kept[layer][seq] = (torch.cat([old_k, k[at : at + n]]), torch.cat([old_v, v[at : at + n]]))
                    positions = torch.arange(len(old_k), len(old_k) + n)
                    out, lse = full_attention(q[at : at + n], *kept[layer][seq], positions, sinks=sinks, **call)
                    start, stop = got.columns
                    mine = got.out[at : at + n].double()
                    same_specials(mine, out.reshape(n, num_q * dim)[:, start:stop].contiguous())
                    if n:
                        worst[0] = max(
                            worst[0],
                            (mine - out.reshape(n, -1)[:, start:stop]).abs().max().item() if stop > start else 0.0,
                        )
                        worst[1] = max(worst[1], (got.lse[at : at + n].double() - lse).abs().max().item())
                    at += n
        return worst, got.columns, calls, [cache.kv.local_length(s, mesh.kvp_rank) for s in range(3)]


SMALL_CHUNKS = {"min_chunk": 4, "max_chunk": 16, "page_size": 4}


def check(results, heads, kvp, steps=STEPS):
    columns = sorted({r[1] for r in results})
    num_q, _, dim = heads
    covered = sorted({c for start, stop in columns for c in range(start, stop)})
    assert covered == list(range(num_q * dim))
    for worst, _, calls, _ in results:
        assert max(worst) <= 2 * FLOAT32["atol"], worst
        assert len(set(calls)) == 1
    held = [r[3] for r in results]
    assert [sum(column) for column in zip(*held, strict=True)] == [sum(n) for n in zip(*steps, strict=True)]


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("kvp", [1, 2, 3, 4])
def test_steps_equal_attention_over_the_whole_sequence(ranks, kvp, mode):
    check(ranks(kvp).run(run_steps, kvp, mode, HEADS["small"], {}, SMALL_CHUNKS), HEADS["small"], kvp)


@pytest.mark.dist
@pytest.mark.parametrize("heads", ["odd", "one"])
@pytest.mark.parametrize("mode", ["all_gather", "all_to_all"])
def test_heads_that_no_number_of_ranks_divides(ranks, heads, mode):
    check(ranks(3).run(run_steps, 3, mode, HEADS[heads], {}, SMALL_CHUNKS), HEADS[heads], 3)


@pytest.mark.dist
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(
    ("kvp", "mode", "options"),
    [
        (1, "all_gather", {"softcap": 2.0, "sinks": True}),
        (2, "all_gather", {"window": 1}),
        (3, "all_reduce", {"window": 9, "softcap": 3.0, "sinks": True, "scale": 0.4}),
        (3, "all_to_all", {}),
    ],
)
def test_new_tokens_attended_to_apart_count_once_whatever_the_sharding(ranks, kvp, mode, options, backend):
    layout = {"windows": (options.get("window", 0),), "weights": (1, 4, 2)[:kvp], "backend": backend}
    layout |= {**SMALL_CHUNKS, "own_apart": True}
    steps = FEW_STEPS if backend == "triton" else STEPS
    results = ranks(kvp).run(run_steps, kvp, mode, HEADS["small"], options, layout, steps, timeout_s=60.0)
    check(results, HEADS["small"], kvp, steps)


@pytest.mark.dist
@pytest.mark.parametrize(
    "options",
    [
        {"window": 9},
        {"window": 50},
        {"softcap": 2.0},
        {"sinks": True},
        {"window": 9, "softcap": 3.0, "sinks": True, "scale": 0.4},
    ],
)
def test_masks_softcap_and_sinks_are_those_of_the_whole_sequence(ranks, options):
    layout = {**SMALL_CHUNKS, "windows": (options.get("window", 0),)}
    check(ranks(3).run(run_steps, 3, "all_reduce", HEADS["small"], options, layout), HEADS["small"], 3)


@pytest.mark.dist
def test_an_uneven_layout_gives_the_same_answer(ranks):
    layout = {**SMALL_CHUNKS, "weights": (5, 1)}
    results = ranks(2).run(run_steps, 2, "all_gather", HEADS["small"], {}, layout)
    check(results, HEADS["small"], 2)
    assert results[0][3][0] > 3 * results[1][3][0]


@pytest.mark.dist
@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_an_interleaved_layout_gives_the_same_answer(ranks, interleave):
    results = ranks(4).run(run_interleaved, interleave)
    check(results, HEADS["small"], 4)
    for rank, (_, _, _, held) in enumerate(results):
        for length, mine in zip((78, 10, 81), held, strict=True):
            assert mine == sum((p // interleave) % 4 == rank for p in range(length))


def run_interleaved(interleave):
    layout = {"min_chunk": 1, "max_chunk": 16, "page_size": 1, "placement": lambda _seq, p: (p // interleave) % 4}
    return run_steps(4, "all_reduce", HEADS["small"], {}, layout)


def drop_a_shard():
    with Mesh.create(2) as mesh:
        cache = ShardedCache(mesh, num_layers=1, num_kv_heads=2, head_dim=16, max_tokens=400, **SMALL_CHUNKS)
        attention = DistributedAttention(mesh, cache, merge="all_gather")
        cache.kv.add(0)
        cache.kv.add(1)
        generator = torch.Generator().manual_seed(3)
        tensors = [torch.randn(47, h, 16, generator=generator) for h in (8, 2, 2)]
        batch = cache.begin_step([(0, 40), (1, 7)])
        whole = attention(*tensors, batch, 0).out.clone()
        again = attention(*tensors, batch, 0).out.clone()
        if mesh.kvp_rank == 1:
            # negative control: this rank's keys count for nothing
            batch.prefill_tables[0].tile_ranges[:, 1] = batch.prefill_tables[0].tile_ranges[:, 0]
        dropped = attention(*tensors, batch, 0).out
        return torch.equal(whole, again), (whole - dropped).abs().max().item()


@pytest.mark.dist
def test_dropping_one_ranks_shard_changes_the_output(ranks):
    for same, change in ranks(2).run(drop_a_shard):
        assert same
        assert change > 0.1


def overwrite_each_chunk():
    with Mesh.create(2) as mesh:
        cache = ShardedCache(mesh, num_layers=1, num_kv_heads=2, head_dim=16, max_tokens=400, **SMALL_CHUNKS)
        attention = DistributedAttention(mesh, cache, merge="all_gather")
        cache.kv.add(0)
        generator = torch.Generator().manual_seed(3)
        tensors = [torch.randn(60, h, 16, generator=generator) for h in (8, 2, 2)]
        attention(*tensors, cache.begin_step([(0, 60)]), 0)
        last = [torch.randn(1, h, 16, generator=generator) for h in (8, 2, 2)]
        batch = cache.begin_step([(0, 1)])
        whole = attention(*last, batch, 0).out.clone()
        changes = []
        for view in cache.kv.views(0):
            slot = view.chunk * cache.layout.min_chunk + view.offset
            mine = view.kvp_rank == mesh.kvp_rank
            if mine:
                saved = cache.pool.v[0, slot : slot + view.length].clone()
                cache.pool.v[0, slot : slot + view.length] += 10.0
            changes.append((attention(*last, batch, 0).out - whole).abs().max().item())
            if mine:
                cache.pool.v[0, slot : slot + view.length] = saved
        return changes, (attention(*last, batch, 0).out - whole).abs().max().item()


@pytest.mark.dist
def test_overwriting_any_live_chunk_changes_the_output(ranks):
    for changes, restored in ranks(2).run(overwrite_each_chunk):
        assert len(changes) > 5
        assert min(changes) > 1e-3
        assert restored == 0.0


def wrong_shapes():
    with Mesh.single() as mesh:
        cache = ShardedCache(mesh, num_layers=1, num_kv_heads=2, head_dim=16, max_tokens=100)
        attention = DistributedAttention(mesh, cache)
        cache.kv.add(0)
        batch = cache.begin_step([(0, 3)])
        kv = torch.zeros(3, 2, 16)
        with pytest.raises(ValueError, match=r"k \(3, 2, 16\)"):
            attention(torch.zeros(3, 8, 16), torch.zeros(3, 4, 16), kv, batch, 0)
        with pytest.raises(ValueError, match="multiple of 2 heads"):
            attention(torch.zeros(3, 7, 16), kv, kv, batch, 0)


def test_shapes_that_do_not_match_the_pool_are_refused():
    wrong_shapes()


def test_either_max_tokens_or_num_frames_is_needed():
    with pytest.raises(ValueError, match="max_tokens"):
        ShardedCache(Mesh.single(), num_layers=1, num_kv_heads=1, head_dim=8)


class NeverCalled(CollectiveMerge):
    """What takes the place of one rank's merge where no merge may run."""

    def __call__(self, *args, **kwargs):
        raise AssertionError("a merge ran")


@pytest.mark.parametrize("with_sinks", [False, True])
def test_one_rank_with_kernels_needs_no_merge(monkeypatch, with_sinks):
    """The kernels' own finish against the reference ops and the merge of one rank, over steps of a growing cache."""
    generator = torch.Generator().manual_seed(11)
    sinks = torch.randn(6, generator=generator) if with_sinks else None
    layers = []
    for backend in ("reference", "triton"):
        mesh = Mesh.single()
        cache = ShardedCache(
            mesh, num_layers=1, num_kv_heads=2, head_dim=16, max_tokens=200, windows=(10,), backend=backend
        )
        cache.pool.k.fill_(torch.nan)
        cache.pool.v.fill_(torch.nan)
        layers.append(DistributedAttention(mesh, cache, out_dtype=torch.float16))
        for seq in range(3):
            cache.kv.add(seq)
    monkeypatch.setattr(layers[1].merge, "__class__", NeverCalled)
    monkeypatch.setattr("distdec.attention.CollectiveMerge", NeverCalled)
    for rows in ([(0, 20), (1, 1), (2, 33)], [(1, 1), (2, 1), (0, 9)], [(0, 1), (1, 1), (2, 1)], [(2, 4), (0, 4)]):
        tokens = sum(n for _, n in rows)
        q, k, v = (torch.randn(tokens, heads, 16, generator=generator) for heads in (6, 2, 2))
        q[-1, 3, 5] = torch.nan
        batches = [layer.cache.begin_step(rows) for layer in layers]
        for window in (0, 10):
            want, got = (
                layer(q, k, v, batch, 0, window=window, sinks=sinks)
                for layer, batch in zip(layers, batches, strict=True)
            )
            assert got.columns == want.columns and got.out.dtype == want.out.dtype == torch.float16
            # the reference's merge fails all heads of the token, the kernels the row of the head
            assert got.out[-1].view(6, 16)[3].isnan().all() and got.lse[-1, 3].isnan()
            assert got.out[-1].isnan().sum() == 16 and want.out[-1].isnan().all()
            torch.testing.assert_close(got.out[:-1], want.out[:-1], rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(got.lse[:-1], want.lse[:-1], rtol=1e-5, atol=1e-5)


def test_sinks_of_another_number_of_heads_are_refused_on_one_rank():
    mesh = Mesh.single()
    cache = ShardedCache(mesh, num_layers=1, num_kv_heads=2, head_dim=16, max_tokens=100, backend="triton")
    cache.kv.add(0)
    kv = torch.zeros(1, 2, 16)
    with pytest.raises(ValueError, match=r"expected sinks \[4\]"):
        attention = DistributedAttention(mesh, cache)
        attention(torch.zeros(1, 4, 16), kv, kv, cache.begin_step([(0, 1)]), 0, sinks=torch.zeros(3))


def test_a_cache_that_knows_of_a_wide_group_takes_fewer_programs_for_the_same_result():
    mesh, found = Mesh.single(), []
    for group_size, spans in ((1, 8), (71, 4)):
        how = {"head_dim": 16, "max_tokens": 400, "dtype": torch.float16, "backend": "triton"}
        cache = ShardedCache(mesh, num_layers=1, num_kv_heads=1, group_size=group_size, **how)
        generator = torch.Generator().manual_seed(3)
        for pool in (cache.pool.k, cache.pool.v):
            pool.normal_(generator=generator)
        q, k, v = (torch.randn(2, heads, 16, generator=generator).half() for heads in (71, 1, 1))
        for row, length in enumerate((299, 40)):
            cache.kv.add(row)
            cache.begin_step([(row, length)])
        batch = cache.begin_step([(0, 1), (1, 1)])
        assert batch.decode_tables[0].schedule.num_spans == spans
        found.append(DistributedAttention(mesh, cache)(q, k, v, batch, 0))
    torch.testing.assert_close(found[0].out, found[1].out, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(found[0].lse, found[1].lse, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="group_size"):
        ShardedCache(mesh, num_layers=1, num_kv_heads=1, group_size=0, **how)

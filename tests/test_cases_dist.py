"""Situations in which sharded attention went wrong elsewhere: each is tried here and has to come out right.

Lengths around shard borders, layouts that interleave, windows by global position, long prefixes before a short suffix,
more ranks than blocks, heads that no rank count divides, errors that must not grow with the context.
"""

import pytest
import torch
from test_attention_dist import full_attention

from distdec.attention import DistributedAttention
from distdec.mesh import Mesh
from distdec.sharded_cache import ShardedCache

HQ, HKV, DIM = 8, 2, 16


def interleaved(interleave, ranks):
    """Token `p` of every sequence on rank `(p // interleave) % ranks`, in chunks of at most `interleave` tokens."""
    return {
        "min_chunk": 1,
        "max_chunk": interleave,
        "page_size": 1,
        "placement": lambda _seq, p: (p // interleave) % ranks,
    }


def contiguous(borders):
    """Tokens up to the first border on rank 0, up to the second on rank 1, and so on."""
    return {
        "min_chunk": 1,
        "max_chunk": 1024,
        "page_size": 1,
        "placement": lambda _seq, p: sum(p >= border for border in borders),
    }


class Problem:
    """Sequences filled with random keys and values through the layer, then attended to by new tokens."""

    def __init__(self, mesh, layout, *, heads=(HQ, HKV, DIM), max_tokens=20000, seed=0, mode="all_gather", **call):
        self.heads, self.call = heads, call
        cache_options = {"windows": (call.get("window", 0),), **layout}
        self.cache = ShardedCache(
            mesh, num_layers=1, num_kv_heads=heads[1], head_dim=heads[2], max_tokens=max_tokens, **cache_options
        )
        self.cache.pool.k.fill_(torch.nan)
        self.cache.pool.v.fill_(torch.nan)
        self.attention = DistributedAttention(mesh, self.cache, merge=mode)
        self.generator = torch.Generator().manual_seed(seed)
        self.kept = {}

    def fill(self, seq, n):
        """Store n random tokens without attending with them: the cheap way to a long context."""
        _, num_kv, dim = self.heads
        self.cache.kv.add(seq)
        self.kept[seq] = tuple(torch.randn(n, num_kv, dim, generator=self.generator) for _ in range(2))
        batch = self.cache.begin_step([(seq, n)])
        self.cache.backend.store_kv(*self.kept[seq], batch.slot_mapping, *self.cache.pool.layer(0))

    def step(self, rows):
        """Run one step; return the largest errors of out and LSE over its rows."""
        num_q, num_kv, dim = self.heads
        for seq, _ in rows:
            if seq not in self.kept:
                self.cache.kv.add(seq)
                self.kept[seq] = (torch.zeros(0, num_kv, dim), torch.zeros(0, num_kv, dim))
        total = sum(n for _, n in rows)
        q = torch.randn(total, num_q, dim, generator=self.generator)
        k, v = (torch.randn(total, num_kv, dim, generator=self.generator) for _ in range(2))
        got = self.attention(q, k, v, self.cache.begin_step(rows), 0, **self.call)
        start, stop = got.columns
        at, worst = 0, 0.0
        for seq, n in rows:
            old_k, old_v = self.kept[seq]
            self.kept[seq] = (torch.cat([old_k, k[at : at + n]]), torch.cat([old_v, v[at : at + n]]))
            picked = torch.arange(n) if n <= 8 else torch.tensor([0, 1, n // 2, n - 1])
            out, lse = full_attention(q[at + picked], *self.kept[seq], len(old_k) + picked, **self.call)
            mine = got.out[at + picked].double()
            assert not mine.isnan().any()
            error = (mine - out.reshape(len(picked), -1)[:, start:stop]).abs()
            worst = max(worst, error.max().item() if error.numel() else 0.0)
            worst = max(worst, (got.lse[at + picked].double() - lse).abs().max().item() if n else 0.0)
            at += n
        return worst


def fill_then_decode(kvp, layout, lens, tail, options):
    with Mesh.create(kvp) as mesh:
        problem = Problem(mesh, layout(kvp), **options)
        first = problem.step([(seq, n) for seq, n in enumerate(lens)])
        return first, problem.step([(seq, tail) for seq in range(len(lens))])


def by_one(ranks):
    return interleaved(1, ranks)


def by_four(ranks):
    return interleaved(4, ranks)


def by_sixteen(ranks):
    return interleaved(16, ranks)


def by_sixty_four(ranks):
    return interleaved(64, ranks)


def very_uneven(ranks):
    return contiguous([4000, 4090, 4096][: ranks - 1])


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "window"),
    [(by_four, 1000), *((la, w) for la in (by_sixteen, by_sixty_four, very_uneven) for w in (128, 1000, 1024))],
)
def test_windows_count_global_positions_in_decode_and_verify(ranks, layout, window):
    for tail in (1, 5):
        for errors in ranks(4).run(fill_then_decode, 4, layout, [4097, 33], tail, {"window": window}):
            assert max(errors) < 2e-5


@pytest.mark.dist
def test_contiguous_shards_of_very_uneven_length(ranks):
    for errors in ranks(4).run(fill_then_decode, 4, very_uneven, [4096, 130, 17, 3], 1, {"mode": "all_reduce"}):
        assert max(errors) < 2e-5


def suffix_after(prefix):
    with Mesh.create(2) as mesh:
        problem = Problem(mesh, by_sixty_four(2), mode="all_reduce")
        problem.fill(0, prefix)
        return problem.step([(0, 64), (1, 40)]), problem.step([(0, 1), (1, 1)])


@pytest.mark.dist
@pytest.mark.parametrize("prefix", [64, 3072, 16384])
def test_a_suffix_after_a_long_prefix_keeps_its_weight(ranks, prefix):
    for errors in ranks(2).run(suffix_after, prefix):
        assert max(errors) < 2e-5


def every_length_up_to(limit, interleave):
    with Mesh.create(4) as mesh:
        problem = Problem(mesh, interleaved(interleave, 4))
        lens = list(range(1, limit + 1))
        return max(problem.step(list(enumerate(lens))), problem.step([(seq, 1) for seq in range(len(lens))]))


@pytest.mark.dist
def test_sequences_shorter_than_one_block_a_rank(ranks):
    assert max(ranks(4).run(every_length_up_to, 49, 16)) < 2e-5


@pytest.mark.dist
@pytest.mark.parametrize("layout", [by_one, by_four, by_sixteen])
def test_context_in_several_slices_then_more_tokens(ranks, layout):
    for errors in ranks(3).run(slices_then_more, layout):
        assert max(errors) < 2e-5


def slices_then_more(layout):
    with Mesh.create(3) as mesh:
        problem = Problem(mesh, layout(3))
        errors = [problem.step([(0, 37), (1, 1)]), problem.step([(0, 5), (1, 5)])]
        errors += [problem.step([(1, 1), (0, n)]) for n in (1000, 24, 1)]
        return errors


def error_by_context(kvp):
    with Mesh.create(kvp) as mesh:
        problem = Problem(mesh, {"min_chunk": 128, "max_chunk": 1024}, heads=(4, 1, 16), max_tokens=36000)
        errors = {}
        for seq, length in enumerate((1000, 4000, 12000, 16000)):
            problem.fill(seq, length - 200)
            problem.step([(seq, 200)])
            errors[length] = max(problem.step([(seq, 1)]) for _ in range(4))
        return errors


@pytest.mark.dist
@pytest.mark.parametrize("kvp", [1, 2, 4])
def test_the_error_does_not_grow_with_the_context(ranks, kvp):
    for errors in ranks(kvp).run(error_by_context, kvp):
        assert max(errors.values()) < 5e-6
        assert errors[16000] < 4 * errors[1000] + 1e-7


@pytest.mark.dist
@pytest.mark.parametrize("kvp", [3, 5])
def test_twenty_eight_heads_on_rank_counts_that_do_not_divide_them(ranks, kvp):
    options = {"heads": (28, 4, 8), "mode": "all_to_all"}
    for errors in ranks(kvp).run(fill_then_decode, kvp, by_four, [130, 17], 1, options):
        assert max(errors) < 2e-5


def first_slice_of_requests_without_context():
    with Mesh.create(4) as mesh:
        problem = Problem(mesh, {"min_chunk": 128, "max_chunk": 128}, mode="all_reduce")
        # ranks without a key of the new requests beside a long one, three merges in a row
        return [
            problem.step([(0, 2415), (1, 64), (2, 3)]),
            problem.step([(0, 1), (1, 1), (3, 64)]),
            problem.step([(3, 1)]),
        ]


@pytest.mark.dist
def test_first_slices_attend_to_their_own_tokens_alone(ranks):
    for errors in ranks(4).run(first_slice_of_requests_without_context):
        assert max(errors) < 2e-5


def wear_out_the_pool():
    """Allocate and free until far more tokens have passed through than a rank has slots; canaries stand beside."""
    with Mesh.create(4) as mesh:
        problem = Problem(mesh, {"min_chunk": 4, "max_chunk": 16, "page_size": 4}, max_tokens=200)
        errors = [problem.step([(0, 9)])]
        slots = 4 * sum(problem.cache.layout.num_frames)
        passed, seq = 0, 1
        while passed < 6 * slots:
            errors.append(problem.step([(seq, 37 + seq % 5)]))
            errors.append(problem.step([(seq, 1), (0, 1)]))
            passed += problem.cache.kv.length(seq)
            problem.cache.kv.free(seq)
            seq += 1
        problem.cache.kv.check_integrity()
        return errors, seq


@pytest.mark.dist
def test_slots_are_local_however_many_tokens_have_passed(ranks):
    for errors, rounds in ranks(4).run(wear_out_the_pool):
        assert rounds > 20
        assert max(errors) < 2e-5


def heads_and_tokens(kvp, tp):
    with Mesh.create(kvp, tp) as mesh:
        num_q, num_kv = HQ // tp, HKV // tp
        cache = ShardedCache(
            mesh, num_layers=1, num_kv_heads=num_kv, head_dim=DIM, max_tokens=400, **interleaved(4, kvp)
        )
        attention = DistributedAttention(mesh, cache, merge="all_gather")
        generator = torch.Generator().manual_seed(5)
        q, k, v = (torch.randn(70, h, DIM, generator=generator) for h in (HQ, HKV, HKV))
        t = mesh.tp_rank
        q_mine = q[:, t * num_q : (t + 1) * num_q]
        k_mine, v_mine = (x[:, t * num_kv : (t + 1) * num_kv] for x in (k, v))
        cache.kv.add(0)
        got = attention(q_mine, k_mine, v_mine, cache.begin_step([(0, 70)]), 0)
        out, _ = full_attention(q, k, v, torch.arange(70))
        want = out[:, t * num_q : (t + 1) * num_q].reshape(70, -1)
        held = cache.pool.bytes
        positions = [p for p in range(70) if cache.kv.slots(0, p, p + 1, mesh.kvp_rank)[0] >= 0]
        return (got.out.double() - want).abs().max().item(), (mesh.kvp_rank, t), positions, held


@pytest.mark.dist
@pytest.mark.parametrize(("kvp", "tp"), [(4, 1), (2, 2), (3, 1), (3, 2)])
def test_every_member_of_a_group_holds_the_groups_heads_and_its_own_tokens(ranks, kvp, tp):
    results = ranks(kvp * tp).run(heads_and_tokens, kvp, tp)
    for rank, (error, place, positions, _) in enumerate(results):
        assert error < 2e-5
        assert place == (rank % kvp, rank // kvp)
        assert positions == [p for p in range(70) if (p // 4) % kvp == rank % kvp]

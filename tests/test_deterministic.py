"""Deterministic rows: the same bits alone, among others, beside a prompt, and whatever the pool was used for before."""

import random

import pytest
import torch

from distdec.attention import DistributedAttention
from distdec.cache.kv_cache import KVCache
from distdec.cache.layout import CacheLayout
from distdec.config import BackendConfig, CacheConfig, Config, ParallelConfig, SchedulerConfig
from distdec.engine import Engine
from distdec.graphs import GraphKey, StepGraphs
from distdec.merge import make_merge
from distdec.merge_choice import deterministic_mode
from distdec.mesh import Mesh
from distdec.ops.backends import register_backend
from distdec.ops.combine_triton import _prepare_combine
from distdec.ops.decode import decode
from distdec.ops.prefill import prefill
from distdec.ops.splits import Splits
from distdec.request import SamplingParams
from distdec.row_tables import NO_PADDING, Padding
from distdec.runner import Runner
from distdec.sharded_cache import ShardedCache
from launch.parity import load_reference, reference_tokens

SMALL = {"min_chunk": 8, "max_chunk": 64, "page_size": 2, "max_tokens": 1600}
HEADS = (2, 1, 16)
# three pieces of 16 tiles of 8 tokens on one rank, and some
LENGTH = 403
WINDOW = 150
TARGET = 1000
PLACES = ("alone", "batch", "padded", "mixed", "broken pool", "prefix")


class Bench:
    """A layer over a cache in which sequence `TARGET` holds the same keys and values whatever is done around it."""

    def __init__(self, mesh, heads=HEADS, dtype=torch.float32, merge="all_gather", length=LENGTH, **layout):
        self.mesh, self.heads, self.dtype, self.length = mesh, heads, dtype, length
        num_q, num_kv, dim = heads
        self.cache = ShardedCache(
            mesh, num_layers=1, num_kv_heads=num_kv, head_dim=dim, dtype=dtype, windows=(WINDOW,), **layout
        )
        self.cache.pool.k.fill_(torch.nan)
        self.cache.pool.v.fill_(torch.nan)
        self.layer = DistributedAttention(mesh, self.cache, merge=merge)
        generator = torch.Generator().manual_seed(3)
        self.own = [
            torch.randn(length, h, dim, generator=generator).to(mesh.device, dtype) for h in (num_q, num_kv, num_kv)
        ]
        self.sinks = torch.randn(num_q, generator=generator).to(mesh.device)

    def noise(self, tokens, seed):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(tokens, h, self.heads[2], generator=generator).to(self.own[0]) for h in self.shape]

    @property
    def shape(self):
        return self.heads[0], self.heads[1], self.heads[1]

    def hold(self, seq, k, v, count):
        """Store the next `count` keys and values of a sequence without attending."""
        at = self.cache.kv.length(seq)
        slots = self.cache.begin_step([(seq, count)], q_len=1, derive=False).slot_mapping
        mine = slots >= 0
        for pool, new in ((self.cache.pool.k, k), (self.cache.pool.v, v)):
            pool[0][slots[mine]] = new[at : at + count][mine]

    def fill(self, seq, tokens):
        self.cache.kv.add(seq)
        self.hold(seq, *self.noise(tokens, seed=seq)[1:], tokens)

    def target(self, count, prefix=()):
        self.cache.kv.add(TARGET, prefix or None)
        self.hold(TARGET, *self.own[1:], self.length - count - self.cache.kv.length(TARGET))

    def attend(self, others, count, *, slices=0, pad=NO_PADDING, place=0):
        """Run a step of `TARGET` at a place among other decode rows; return its (out, lse), with a window too."""
        rows = [(seq, count) for seq in others]
        rows.insert(place, (TARGET, count))
        num_decode = len(rows)
        if slices:
            self.cache.kv.add(5000)
            rows.append((5000, slices))
        batch = self.cache.begin_step(rows, q_len=count, num_decode=num_decode, pad=pad)
        q, k, v = self.noise(batch.num_tokens, seed=1)
        mine = slice(place * count, (place + 1) * count)
        for x, own in zip((q, k, v), self.own, strict=True):
            x[mine] = own[-count:]
        got = [self.layer(q, k, v, batch, 0)]
        got.append(self.layer(q, k, v, batch, 0, window=WINDOW, softcap=5.0, sinks=self.sinks))
        return [x[mine].cpu().clone() for merged in got for x in (merged.out, merged.lse)]


def at_place(place, count, mesh, num_others=31, short=9, slices=20, **options):
    """Attend with the last `count` tokens of `TARGET` in one of the surroundings."""
    bench = Bench(mesh, **options)
    kv = bench.cache.kv
    if place == "broken pool":
        # frames of all others are free again, each beside one that is not
        size = bench.cache.layout.min_chunk
        for seq in range(min(bench.cache.layout.num_frames) - 1):
            bench.fill(seq, size * mesh.kvp_size)
        for seq in range(0, len(kv.sequences()), 2):
            kv.free(seq)
    others, prefix = [], ()
    if place in ("batch", "padded", "mixed"):
        others = list(range(3 if place == "mixed" else num_others))
        for seq in others:
            bench.fill(seq, 1 + seq * 277 % short)
    if place == "prefix":
        prefix = list(range(bench.length - count))
        bench.cache.kv.add(1, prefix)
        bench.hold(1, *bench.own[1:], len(prefix) - 53)
        kv.commit_pages(1, prefix[:-53])
        bench.fill(2, 30)
        prefix = tuple(prefix)
    bench.target(count, prefix)
    if place == "prefix":
        assert kv.stats().prefix_hits > 0
    pad = Padding(num_others + 9, q_len=count) if place == "padded" else NO_PADDING
    where = len(others) // 2
    got = bench.attend(others, count, slices=slices if place == "mixed" else 0, pad=pad, place=where)
    return got, [(view.kvp_rank, view.length) for view in kv.views(TARGET)]


def everywhere(kvp, backend, deterministic, count=1, places=PLACES, num_others=31):
    """Attend at all places; `own_apart` is asked for, as an engine does."""
    with Mesh.create(kvp, device="cpu") as mesh:
        options = {**SMALL, "backend": backend, "deterministic": deterministic, "own_apart": True}
        return {place: at_place(place, count, mesh, num_others, **options) for place in places}


def runs(views):
    """(rank, tokens) where neighbouring views of a rank count as one."""
    found = []
    for rank, length in views:
        if found and found[-1][0] == rank:
            found[-1] = (rank, found[-1][1] + length)
        else:
            found.append((rank, length))
    return found


def differing(results):
    """Places at which any bit is another one than alone."""
    want = results["alone"][0]
    return {place for place, (got, _) in results.items() if not all(map(torch.equal, got, want))}


# Triton's interpreter takes some seconds for 32 rows
FEW = ("alone", "mixed", "broken pool")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kvp", "backend", "places", "num_others"),
    [
        (1, "reference", PLACES, 31),
        (2, "reference", PLACES, 31),
        (3, "reference", PLACES, 31),
        (1, "triton", ("alone", "batch", "mixed", "broken pool"), 31),
        (2, "triton", FEW, 3),
    ],
    ids=["reference, 1 rank", "reference, 2 ranks", "reference, 3 ranks", "triton, 1 rank", "triton, 2 ranks"],
)
def test_a_row_has_the_same_bits_alone_among_others_beside_a_prompt_and_in_any_pool(
    ranks, kvp, backend, places, num_others
):
    arguments = (kvp, backend, True, 1, places, num_others)
    for results in ranks(kvp).run(everywhere, *arguments, timeout_s=200.0):
        assert differing(results) == set()
        assert all(x.isfinite().all() for x in results["alone"][0])
        # the pool had only frames left, and ranks hold the same tokens nevertheless
        views = {place: views for place, (_, views) in results.items()}
        assert len(views["broken pool"]) > len(views["alone"])
        assert all(runs(views[place]) == runs(views["alone"]) for place in places)


@pytest.mark.dist
@pytest.mark.parametrize(("kvp", "backend"), [(1, "reference"), (2, "reference"), (1, "triton")])
def test_without_the_option_bits_follow_the_surroundings(ranks, kvp, backend):
    """What the test above compares can differ: cuts, tiles, ranks, the new token apart or not."""
    for results in ranks(kvp).run(everywhere, kvp, backend, False, 1, FEW, 3, timeout_s=200.0):
        assert differing(results) == {"mixed", "broken pool"}


@pytest.mark.dist
@pytest.mark.parametrize(("kvp", "backend", "places"), [(2, "reference", PLACES), (1, "triton", ("alone", "mixed"))])
def test_rows_of_three_tokens_have_the_same_bits_in_any_surroundings(ranks, kvp, backend, places):
    for results in ranks(kvp).run(everywhere, kvp, backend, True, 3, places, 3, timeout_s=200.0):
        assert differing(results) == set()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_three_tokens_at_once_have_the_bits_of_one_by_one(backend):
    """Without a window, whose first tile follows the row's first token."""
    options = {**SMALL, "backend": backend, "deterministic": True}
    together = at_place("alone", 3, Mesh.single(), **options)[0][:2]
    bench = Bench(Mesh.single(), **options)
    bench.target(3)
    for token in range(3):
        batch = bench.cache.begin_step([(TARGET, 1)])
        at = slice(LENGTH - 3 + token, LENGTH - 2 + token)
        merged = bench.layer(*(x[at] for x in bench.own), batch, 0)
        assert torch.equal(merged.out, together[0][token : token + 1])
        assert torch.equal(merged.lse, together[1][token : token + 1])


def ranks_of(kv, seq):
    """The rank of each token, and whether views begin at frames."""
    views = kv.views(seq)
    return [view.kvp_rank for view in views for _ in range(view.length)], [view.token_start % 4 for view in views]


@pytest.mark.parametrize("weights", [None, (1, 3, 2)])
@pytest.mark.parametrize(("home", "drafts"), [(0, False), (22, True), (0, True)])
def test_ranks_follow_from_positions_while_no_pool_is_full(weights, home, drafts):
    """Prompts of shared prefixes, or drafts of which some are dropped; not both, see `Config`."""
    layout = CacheLayout(
        (280,) * 3, min_chunk=4, max_chunk=32, page_size=2, weights=weights, shard_min_tokens=home, deterministic=True
    )
    alone = KVCache(layout)
    alone.add(0)
    alone.extend(0, 400)
    want, _ = ranks_of(alone, 0)
    assert len(set(want)) == 3 and set(want[: layout.home_tokens]) <= {0}
    kv, generator = KVCache(layout), random.Random(5)
    # every second frame is taken, so that there are no longer chunks
    for rank in range(3):
        taken = [kv._ledger.allocator.allocate(rank, 1) for _ in range(280)]
        for chunk in taken[::2]:
            kv._ledger.allocator.release(chunk)
    broken = hits = 0
    for seq in range(250):
        while kv.sequences() and min(kv.stats().free_frames) < 50:
            kv.free(generator.choice(kv.sequences()))
        prompt = [generator.randrange(2), *range(generator.choice((3, 30, 250)))]
        hits += kv.add(seq, prompt)
        kv.extend(seq, len(prompt) - kv.length(seq))
        if not drafts:
            kv.commit_pages(seq, prompt)
        for grown in generator.sample(kv.sequences(), min(4, len(kv.sequences()))):
            count = generator.randrange(1, 9)
            if kv.length(grown) + count <= len(want):
                kv.extend(grown, count)
                kv.truncate(grown, kv.length(grown) - drafts * generator.randrange(count))
        for held in kv.sequences():
            ranks, starts = ranks_of(kv, held)
            assert ranks == want[: len(ranks)] and not any(starts)
            broken += len(kv.views(held)) > len([view for view in alone.views(0) if view.token_start < len(ranks)])
    assert broken > 10
    assert (hits > 1000) != drafts


@pytest.mark.parametrize("mode", ["all_reduce", "reduce_scatter", "one_shot", "one_shot_scatter"])
def test_a_merge_that_follows_the_size_of_a_step_is_refused(mode):
    mesh = Mesh.single()
    cache = ShardedCache(mesh, num_layers=1, num_kv_heads=1, head_dim=16, deterministic=True, **SMALL)
    for merge in (mode, make_merge(mode, mesh)):
        with pytest.raises(ValueError, match=f"goes with merge all_gather, all_to_all or auto, got '{mode}'"):
            DistributedAttention(mesh, cache, merge=merge)
    with pytest.raises(ValueError, match=f"goes with parallel.merge auto, all_gather, all_to_all, got '{mode}'"):
        Config(parallel=ParallelConfig(merge=mode), backend=BackendConfig(deterministic=True))
    assert DistributedAttention(mesh, cache).merge.mode == "all_gather"
    assert deterministic_mode("auto", replicated=False) == "all_to_all"


def test_foreign_ops_without_fixed_splits_are_refused():
    foreign = register_backend("foreign", decode=decode, prefill=prefill)
    with pytest.raises(ValueError, match="need a backend with fixed splits; 'foreign' has none"):
        ShardedCache(
            Mesh.single(), num_layers=1, num_kv_heads=1, head_dim=16, backend=foreign, deterministic=True, **SMALL
        )


def test_drafts_beside_shared_prefixes_are_refused():
    """Dropped from a chunk that another row has begun to share, they leave a view that begins inside a tile."""
    drafts, fixed = SchedulerConfig(num_draft_tokens=3), BackendConfig(deterministic=True)
    with pytest.raises(ValueError, match=r"num_draft_tokens=3 needs cache\.prefix_caching=false"):
        Config(scheduler=drafts, backend=fixed)
    assert Config(scheduler=drafts, backend=fixed, cache=CacheConfig(prefix_caching=False)).scheduler == drafts


def test_what_is_no_switch_is_refused():
    with pytest.raises(ValueError, match="deterministic must be true or false, got 1"):
        BackendConfig(deterministic=1)


def test_joins_of_fixed_splits_are_cut_alike_whatever_their_number():
    """A sum over partials follows the layout of the tile that it is made of."""

    def cut(rows, split_tiles):
        out, lse, ranges = torch.empty(1, 4, 128), torch.empty(1, 4), torch.empty(rows * 8, 2, dtype=torch.int32)
        launch = _prepare_combine(Splits(out, lse, ranges, rows, 8, 1, 4, 256, split_tiles), False, False, None)
        return launch._grid[1], launch._constants[4:6], launch._options

    assert cut(1, 16) == cut(32, 16) == cut(64, 16)
    assert cut(1, 0) != cut(64, 0)


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_the_engines_option_reaches_attention_in_every_step(folder, monkeypatch, graphs):
    config = Config(
        cache=CacheConfig(max_tokens=400, min_chunk=4, max_chunk=16, page_size=2),
        scheduler=SchedulerConfig(prefill_slice=16, token_budget=40, max_rows=3, decode_deadline_ms=0),
        backend=BackendConfig(deterministic=True, graphs=graphs),
    )
    seen, section = [], DistributedAttention._section

    def noting(self, op, name, q, pools, batch, options):
        def op_noting(*args, **how):
            seen.append((name, how.get("split_tiles", 0), batch.own_apart))
            return op(*args, **how)

        return section(self, op_noting, name, q, pools, batch, options)

    monkeypatch.setattr(DistributedAttention, "_section", noting)
    engine = Engine(Runner.load(folder, Mesh.single(), config), config.scheduler)
    prompts = [list(range(length)) for length in (5, 37, 21)]
    done = engine.generate([(prompt, SamplingParams(max_new_tokens=9, ignore_eos=True)) for prompt in prompts])
    engine.close()
    model = load_reference(folder, "float32", "cpu")
    assert [list(one.token_ids) for one in done] == [reference_tokens(model, prompt, 9) for prompt in prompts]
    assert set(seen) == {("decode", 16, False), ("prefill", 0, False)}
    assert config.digests()["backend.deterministic"] != Config().digests()["backend.deterministic"]


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 4])
def test_a_row_of_8k_has_the_same_bits_alone_among_31_and_beside_a_prompt_on_a_gpu(count):
    options = {
        "heads": (32, 8, 128), "dtype": torch.bfloat16, "length": 8192 + 77, "backend": "triton", "max_tokens": 120_000,
        "short": 4000, "slices": 512, "own_apart": True,
    }  # fmt: skip
    mesh = Mesh.single("cuda")
    assert differing({place: at_place(place, count, mesh, deterministic=True, **options) for place in PLACES}) == set()
    free = {place: at_place(place, count, mesh, **options) for place in PLACES}
    assert differing(free), "what is compared can differ"


@pytest.mark.gpu
def test_a_captured_step_of_a_deterministic_row_has_the_bits_of_an_eager_one_alone():
    """Eager and alone, then replayed between rows of padding and others, as the row grows across a tile."""
    replay_beside_others(
        Mesh.single("cuda"), 77, heads=(32, 8, 128), dtype=torch.bfloat16, length=8192 + 77, max_tokens=120_000
    )


def test_a_padded_step_over_buffers_that_stay_has_the_bits_of_a_row_alone():
    """The test above without a GPU: what would be captured is called."""
    replay_beside_others(Mesh.single(), 2, **{**SMALL, "length": 130, "backend": "reference"})


def replay_beside_others(mesh, steps, backend="triton", **options):
    eager, graphed = (Bench(mesh, backend=backend, deterministic=True, **options) for _ in range(2))
    others, pad = list(range(19)), Padding(32)
    for seq in others:
        graphed.fill(seq, 1 + graphed.length * seq // 18)
    for bench in (eager, graphed):
        bench.target(steps)
    inputs = graphed.noise(32, seed=0)
    buffers = graphed.cache.buffers
    buffers.reserve(tokens=32, rows=32, views=4096)
    batch = buffers.fill([], q_len=1, pad=pad)
    step = lambda *tensors: (buffers.derive(batch), graphed.layer(*tensors, batch, 0))[1]  # noqa: E731
    graphs = StepGraphs(mesh.device, moved=lambda: buffers.generation, keep=[graphed])
    graphs.capture({GraphKey(32): (step, tuple(inputs))})
    rows = [*((seq, 1) for seq in others[:7]), (TARGET, 1), *((seq, 1) for seq in others[7:])]
    for token in range(graphed.length - steps, graphed.length):
        own = [x[token : token + 1] for x in eager.own]
        want = eager.layer(*own, eager.cache.begin_step([(TARGET, 1)]), 0)
        graphed.cache.begin_step(rows, q_len=1, pad=pad, derive=False)
        now = graphed.noise(32, seed=token)
        for x, mine in zip(now, own, strict=True):
            x[7:8] = mine
        got = graphs.replay(GraphKey(32), *now)
        assert torch.equal(got.out[7:8], want.out) and torch.equal(got.lse[7:8], want.lse)

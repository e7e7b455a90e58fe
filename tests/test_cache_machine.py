"""Random histories of the cache against a model: found by hypothesis, and a long soak."""

import random
from unittest import mock

import pytest
from cache_model import CacheModel
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from distdec.cache import CacheCorrupt, CacheLayout, ChunkAllocator
from distdec.cache.ledger import ChunkLedger
from distdec.cache.placement import Placer
from distdec.cache.prefix import PrefixIndex
from distdec.cache.sequence import ViewTable

# two prompts that share their first half; every prompt is a beginning of one of them
PROMPTS = [[7, 1, 7, 2] * 5 + [3] * 20, [7, 1, 7, 2] * 5 + [4, 5] * 10]

layouts = st.builds(
    lambda frames, weights, min_chunk, ratio, page_size, home: CacheLayout(
        tuple(frames),
        min_chunk=min_chunk,
        max_chunk=min_chunk * ratio,
        page_size=page_size,
        weights=tuple(weights[: len(frames)]),
        shard_min_tokens=home,
    ),
    st.lists(st.sampled_from([9, 16, 5, 0]), min_size=1, max_size=4),
    st.lists(st.integers(1, 3), min_size=4, max_size=4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([8, 2, 1]),
    st.sampled_from([1, 3, 4]),
    st.sampled_from([0, 0, 5]),
)
tokens = st.lists(st.integers(0, 1), max_size=12)
pick = st.integers(0, 20)


class CacheMachine(RuleBasedStateMachine):
    """Every operation in any order on a small cache, so that running out of frames is common."""

    @initialize(layout=layouts)
    def start(self, layout):
        self.model = CacheModel(layout)
        self.next_id = 0

    def any(self, number):
        ids = list(self.model.tokens)
        return ids[number % len(ids)]

    def admit(self, seq_id, text, salt):
        hit = self.model.add(seq_id, text, salt)
        if not self.model.extend(seq_id, text[hit:]):
            self.model.free(seq_id)

    @rule(prompt=st.sampled_from(PROMPTS), length=st.integers(0, 40), salt=st.sampled_from([0, 0, 1]))
    def add(self, prompt, length, salt):
        self.admit(self.next_id, prompt[:length], salt)
        self.next_id += 1

    @precondition(lambda self: self.model.tokens)
    @rule(number=pick, length=st.integers(1, 40), salt=st.booleans())
    def add_the_same_again(self, number, length, salt):
        seq_id = self.any(number)
        self.model.commit(seq_id, len(self.model.tokens[seq_id]))
        self.admit(self.next_id, self.model.tokens[seq_id][:length], self.model.salts[seq_id] ^ salt)
        self.next_id += 1

    @precondition(lambda self: self.model.tokens)
    @rule(number=pick, more=tokens, commit=st.booleans())
    def extend(self, number, more, commit):
        seq_id = self.any(number)
        if self.model.extend(seq_id, more) and commit:
            self.model.commit(seq_id, len(self.model.tokens[seq_id]))

    @precondition(lambda self: self.model.tokens)
    @rule(number=pick, back=st.integers(0, 15), more=tokens)
    def truncate_and_write_again(self, number, back, more):
        seq_id = self.any(number)
        self.model.truncate(seq_id, max(0, len(self.model.tokens[seq_id]) - back))
        self.model.check()
        self.model.extend(seq_id, more)

    @precondition(lambda self: self.model.tokens)
    @rule(number=pick, first=tokens, second=tokens)
    def fork(self, number, first, second):
        seq_id = self.any(number)
        self.model.fork(seq_id, self.next_id)
        self.model.extend(seq_id, first)
        self.model.extend(self.next_id, second)
        self.next_id += 1

    @precondition(lambda self: len(self.model.tokens) > 1)
    @rule(number=pick, again=st.booleans())
    def free(self, number, again):
        seq_id = self.any(number)
        text, salt = [*self.model.tokens[seq_id], 1], self.model.salts[seq_id]
        self.model.free(seq_id)
        if again:
            self.model.add(seq_id, text, salt)

    @precondition(lambda self: self.model.tokens)
    @rule(number=pick, short=st.integers(0, 5))
    def commit(self, number, short):
        seq_id = self.any(number)
        self.model.commit(seq_id, max(0, len(self.model.tokens[seq_id]) - short))

    @precondition(lambda self: self.model.tokens)
    @rule(rows=st.lists(st.tuples(pick, st.integers(0, 9)), min_size=1, max_size=4))
    def plan_a_step(self, rows):
        self.model.step_fits_exactly([(self.any(number), count) for number, count in rows])

    @invariant()
    def everything_adds_up(self):
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self):
        if hasattr(self, "model"):
            self.model.drain()


CacheMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = CacheMachine.TestCase


def seal_forgets_to_end_ownership(ledger, state):
    ledger._trim(state)


def share_forgets_the_reference(ledger, state):
    if not state.views:
        del ledger._cached[state.chunk.kvp_rank][state.chunk.frame]
        ledger.cached_frames[state.chunk.kvp_rank] -= state.chunk.num_frames
        ledger.stored_tokens[state.chunk.kvp_rank] += state.filled
    state.views += 1


def shrink_keeps_the_pages(ledger, state, filled):
    state.page_end = 0
    original_shrink(ledger, state, filled)


original_shrink = ChunkLedger.shrink


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (ChunkLedger, "seal", seal_forgets_to_end_ownership),
        (ChunkLedger, "share", share_forgets_the_reference),
        (ChunkLedger, "shrink", shrink_keeps_the_pages),
        (ChunkAllocator, "release", lambda allocator, chunk: False),
        (Placer, "_room", lambda placer, seq: 1),
        (PrefixIndex, "root", staticmethod(lambda salt: b"")),
        (ViewTable, "drop_last", lambda table, last: None),
    ],
)
def test_random_histories_find_a_planted_bug(owner, name, bug):
    with mock.patch.object(owner, name, bug), pytest.raises((CacheCorrupt, AssertionError, ValueError)):
        soak(5_000, 5, seed=11)


def random_operation(model, rng, next_id):
    """Do one operation; small steps, so that a million of them take a minute."""
    ids = list(model.tokens)
    choice = rng.random()
    if not ids or (choice < 0.05 and len(ids) < 12):
        text, salt = rng.choice(PROMPTS)[: rng.randrange(40)], rng.randrange(2)
        if ids and choice < 0.025:
            like = rng.choice(ids)
            text, salt = model.tokens[like][:60], model.salts[like]
        hit = model.add(next_id, text, salt)
        model.extend(next_id, text[hit:])
        return
    seq_id = ids[rng.randrange(len(ids))]
    length = len(model.tokens[seq_id])
    if choice < 0.70:
        model.extend(seq_id, [rng.randrange(2)] * (1 if choice < 0.6 else rng.randrange(9)))
    elif choice < 0.80:
        model.truncate(seq_id, max(0, length - rng.randrange(8)))
    elif choice < 0.88:
        model.commit(seq_id, length)
    elif choice < 0.91 and len(ids) < 12:
        model.fork(seq_id, next_id)
    elif choice < 0.94:
        model.free(seq_id)
    elif choice < 0.9403:
        model.step_fits_exactly([(i, rng.randrange(9)) for i in ids[:4]])


def soak(operations, every, seed):
    """Do random operations: the counters are added up often, everything is recounted `every` so many."""
    rng = random.Random(seed)
    layout = CacheLayout((40, 29, 35), min_chunk=4, max_chunk=32, page_size=4, weights=(4, 3, 4), shard_min_tokens=10)
    model = CacheModel(layout, twin=False)
    for number in range(operations):
        random_operation(model, rng, number)
        if number % 50 == 0:
            stats = model.cache.stats()
            held = zip(stats.free_frames, stats.cached_frames, stats.spare_frames, stats.used_frames, strict=True)
            assert tuple(sum(parts) for parts in held) == layout.num_frames
        if number % every == 0:
            model.check()
    model.check()
    assert model.cache.stats().evicted_chunks > operations // 1000
    model.drain()


def test_short_soak():
    soak(10_000, 100, seed=3)


@pytest.mark.slow
def test_soak_of_a_million_operations():
    soak(1_000_000, 1000, seed=4)

"""A model of the cache that knows only what tokens each sequence has, and what was written into each slot.

Each token is given a stamp that depends on all tokens before it, as its keys and values do. The stamps are written into
a shadow of the pools wherever the cache says that a new token goes. If a live view ever shows another stamp than its
own, then a shared chunk was written, a prefix was hit that is not the same, or a slot has two owners.
"""

import copy

import numpy as np

from distdec.cache import CacheFull, KVCache

MASK = 2**61 - 1


def extend_stamps(stamps, tokens, root):
    """Append the stamps of more tokens."""
    stamp = stamps[-1] if stamps else root
    for token in tokens:
        stamp = (stamp * 6364136223846793005 + token + 1) & MASK
        stamps.append(stamp)


class CacheModel:
    """Drive a cache, and a second one fed the same calls, beside a plain dict of token lists."""

    def __init__(self, layout, placement=None, twin=True):
        self.layout = layout
        self.cache = KVCache(layout, placement=placement)
        self.twin = KVCache(layout, placement=placement) if twin else None
        self.tokens = {}
        self.stamps = {}
        self.salts = {}
        self.shadow = [np.zeros(layout.num_slots(rank), np.int64) for rank in range(layout.num_ranks)]

    def both(self, name, *args):
        """Make the same call on both caches; they must answer the same."""
        try:
            result = getattr(self.cache, name)(*args)
        except CacheFull as error:
            if self.twin is not None:
                try:
                    getattr(self.twin, name)(*args)
                except CacheFull as other:
                    assert str(other) == str(error)
                else:
                    raise AssertionError("the twin has room") from error
            raise
        if self.twin is not None:
            assert getattr(self.twin, name)(*args) == result
        return result

    def add(self, seq_id, tokens=None, salt=0):
        """Register a sequence; with tokens, look its prompt up."""
        hit = self.both("add", seq_id, tokens, salt)
        known = [] if tokens is None else tokens[:hit]
        assert len(known) == hit
        assert hit == 0 or hit < len(tokens)
        assert hit % self.layout.page_size == 0
        self.tokens[seq_id] = list(known)
        self.salts[seq_id] = salt
        self.stamps[seq_id] = []
        extend_stamps(self.stamps[seq_id], known, salt)
        return hit

    def extend(self, seq_id, tokens):
        """Reserve and write; a refusal must leave everything as it was. Returns whether there was room."""
        allowed = self.cache.can_extend([(seq_id, len(tokens))])
        start = len(self.tokens[seq_id])
        before = None if allowed else (self.cache.stats(), self.cache.views(seq_id))
        held = [self.cache.local_length(seq_id, rank) for rank in range(self.layout.num_ranks)]
        try:
            self.both("extend", seq_id, len(tokens))
        except CacheFull as error:
            assert not allowed
            assert before == (self.cache.stats(), self.cache.views(seq_id))
            assert error.needed > error.available
            return False
        assert allowed
        self.tokens[seq_id] += tokens
        extend_stamps(self.stamps[seq_id], tokens, self.salts[seq_id])
        fresh = np.array(self.stamps[seq_id][start:], np.int64)
        owners = np.zeros(len(tokens), np.int64)
        for rank, shadow in enumerate(self.shadow):
            if self.cache.local_length(seq_id, rank) == held[rank]:
                continue
            slots = self.cache.slots(seq_id, start, start + len(tokens), rank)
            mine = slots >= 0
            shadow[slots[mine]] = fresh[mine]
            owners += mine
        assert (owners == 1).all(), "a token without a rank, or with two"
        return True

    def truncate(self, seq_id, length):
        """Drop tokens."""
        self.both("truncate", seq_id, length)
        del self.tokens[seq_id][length:]
        del self.stamps[seq_id][length:]

    def fork(self, src, dst):
        """Copy a sequence; no frame may be taken for it."""
        used = self.cache.stats().used_frames
        self.both("fork", src, dst)
        assert self.cache.stats().used_frames == used
        self.tokens[dst] = list(self.tokens[src])
        self.stamps[dst] = list(self.stamps[src])
        self.salts[dst] = self.salts[src]

    def free(self, seq_id):
        """Forget a sequence."""
        self.both("free", seq_id)
        del self.tokens[seq_id], self.stamps[seq_id], self.salts[seq_id]

    def commit(self, seq_id, length):
        """Publish the full pages among the first `length` tokens."""
        self.both("commit_pages", seq_id, self.tokens[seq_id][:length])

    def step_fits_exactly(self, rows):
        """Check `can_extend` for a whole step against doing it, in this order and the reverse, on copies."""
        answer = self.both("can_extend", rows)
        for order in (rows, rows[::-1]):
            trial = copy.deepcopy(self.cache)
            for seq in trial._sequences.values():
                # a copied array is no longer a window on the copied buffer
                seq.tables.clear()
            done = True
            try:
                for seq_id, count in order:
                    trial.extend(seq_id, count)
            except CacheFull:
                done = False
            assert done == answer, f"{rows}: can_extend says {answer}, doing it says {done}"
            trial.check_integrity()
        return answer

    def check(self):
        """Recount everything from the view tables alone."""
        layout, cache = self.layout, self.cache
        cache.check_integrity()
        frames = [set() for _ in self.shadow]
        tokens = [0] * layout.num_ranks
        assert cache.sequences() == list(self.tokens)
        for seq_id, stamps in self.stamps.items():
            stamps = np.array(stamps, np.int64)
            assert cache.length(seq_id) == len(stamps)
            seen = np.zeros(len(stamps), np.int64)
            for rank, shadow in enumerate(self.shadow):
                table = cache.local_view_table(seq_id, rank)
                assert table.dtype == np.int32
                assert not table.flags.writeable
                assert cache.local_length(seq_id, rank) == table[:, 1].sum()
                tokens[rank] += int(table[:, 1].sum())
                for slot, length, start in table.tolist():
                    assert length >= 1
                    found = shadow[slot : slot + length]
                    assert np.array_equal(found, stamps[start : start + length]), f"sequence {seq_id} reads another's"
                    seen[start : start + length] += 1
                    frames[rank].update(range(slot // layout.min_chunk, (slot + length - 1) // layout.min_chunk + 1))
            assert (seen == 1).all(), "a token on no rank, or on two"
        stats = cache.stats()
        assert stats.tokens == tuple(tokens)
        for rank, total in enumerate(layout.num_frames):
            parts = stats.free_frames[rank], stats.cached_frames[rank], stats.spare_frames[rank]
            assert sum(parts) + stats.used_frames[rank] == total
            assert len(frames[rank]) <= stats.used_frames[rank]
        if self.twin is not None:
            assert all(self.twin.views(seq_id) == cache.views(seq_id) for seq_id in self.tokens)

    def drain(self):
        """Free all: every frame must be available again."""
        for seq_id in list(self.tokens):
            self.free(seq_id)
        self.cache.check_integrity()
        stats = self.cache.stats()
        for rank, total in enumerate(self.layout.num_frames):
            assert stats.free_frames[rank] + stats.cached_frames[rank] == total
        assert sum(stats.tokens) == sum(stats.stored_tokens) == sum(stats.spare_frames) == 0

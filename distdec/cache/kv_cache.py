"""The integer KV cache: which slot of which rank holds which token of which sequence.

Every rank holds one `KVCache` that knows the chunks of ALL ranks. It is deterministic integer code: fed the same calls
it gives the same views everywhere, so ranks agree without communication.
"""

import operator
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any, NoReturn

import numpy as np

from distdec.cache.allocator import require
from distdec.cache.layout import MAX_INDEX, CacheLayout, View
from distdec.cache.ledger import ChunkLedger
from distdec.cache.placement import Placer
from distdec.cache.prefix import ChunkState, Match, PrefixIndex, token_bytes
from distdec.cache.sequence import Int32Array, Int64Array, Origin, Sequence, ViewTable, fragments
from distdec.cache.stats import CacheStats

TokenIds = SequenceOf[int] | np.ndarray[Any, Any]


class CacheFull(RuntimeError):
    """The frames do not suffice; nothing was changed.

    Attributes:
        needed: frames needed.
        available: frames to be had: free, cached, or spare.
    """

    def __init__(self, message: str, needed: int, available: int) -> None:
        """Keep the two numbers for the caller."""
        super().__init__(message)
        self.needed = needed
        self.available = available


class KVCache:
    """Reserve, share and free the slots of many sequences over the pools of all ranks.

    A new chunk goes to the rank on which its sequence has the least weighted load; ties go by the rank's total weighted
    load (tokens that live sequences hold there), then by rank; a rank without an available frame is skipped. While no
    rank is full, rank r holds at most `w_r * length + max(max_chunk, shard_min_tokens)` tokens of any sequence.

    Args:
        layout: the frozen shape.
        placement: test-only hook `(seq_id, token_position) -> kvp_rank` that replaces the rule above. Each run of
            tokens on one rank becomes a view of its own.
    """

    def __init__(self, layout: CacheLayout, *, placement: Callable[[int, int], int] | None = None) -> None:
        """Start empty."""
        self.layout = layout
        self._ledger = ChunkLedger(layout)
        self._placer = Placer(layout, self._ledger, placement)
        self._sequences: dict[int, Sequence] = {}
        self._prefix_queries = 0
        self._prefix_hits = 0

    def add(self, seq_id: int, token_ids: TokenIds | None = None, salt: int = 0) -> int:
        """Register a sequence; with `token_ids`, its prompt, start it on the cached pages of its longest known prefix.

        At least one token is always left to compute, as its logits are wanted. A hit is page-granular, whatever the
        number of ranks, and may end inside a chunk: the next token then opens a new one.

        Returns:
            Number of tokens hit: the length of the sequence now.

        Raises:
            ValueError: the sequence is there already, or `token_ids` is not one row of integers.
        """
        key = b""
        if token_ids is not None and len(token_ids):
            key = self.match(token_ids, salt).key
            self._prefix_queries += len(token_ids)
        self._prefix_hits += self.adopt(seq_id, key, salt)
        return self.length(seq_id)

    def match(self, token_ids: TokenIds, salt: int = 0) -> Match:
        """Look up the cached pages of the longest known prefix of a prompt, all but its last token; changes nothing."""
        index, data = self._ledger.index, token_bytes(token_ids)
        key, begin = b"", 0
        states: set[ChunkState] = set()
        while begin + index.page_bytes < len(data):
            found = index.find(key or index.root(salt), data[begin : begin + index.page_bytes])
            if found is None:
                break
            key = found[0]
            states.update(state for state, _, _ in found[1].fragments if not state.views)
            begin += index.page_bytes
        return Match(begin // 8, key, sum(state.chunk.num_frames for state in states))

    def adopt(self, seq_id: int, key: bytes = b"", salt: int = 0) -> int:
        """Register a sequence that starts on the pages up to `key`, which `match` found here or on another rank.

        Returns:
            Its length now.

        Raises:
            ValueError: the sequence is there already, or no page has this key.
        """
        if seq_id in self._sequences:
            raise ValueError(f"sequence {seq_id} is in the cache already")
        seq = self._empty(seq_id, salt)
        for found, page in self._ledger.index.chain(key, seq.root):
            seq.keys.append(found)
            for state, offset, length in page.fragments:
                self._append_shared(seq, state, offset, length)
        self._sequences[seq_id] = seq
        return seq.length

    def extend(self, seq_id: int, num_tokens: int) -> None:
        """Reserve slots for `num_tokens` more tokens: all of them, or none.

        Raises:
            CacheFull: with the frames needed and available; nothing was changed.
            ValueError: a negative number, or a sequence longer than 2**31 - 1 tokens.

        Notes:
            O(1) amortised for one token; O(chunks opened) for many.
        """
        self.extend_all([(seq_id, operator.index(num_tokens))])

    def extend_all(self, rows: SequenceOf[tuple[int, int]]) -> None:
        """Reserve slots for the tokens of all `(seq_id, num_tokens)`, or for none; otherwise as `extend`."""
        seqs, counts = self._all([seq_id for seq_id, _ in rows]), [operator.index(count) for _, count in rows]
        if rows and (min(counts) < 0 or max(counts) + max([seq.length for seq in seqs]) > MAX_INDEX):
            for left, count in [(MAX_INDEX - seq.length, n) for seq, n in zip(seqs, counts, strict=True)]:
                if not 0 <= count <= left:
                    raise ValueError(
                        f"num_tokens must be from 0 to {left} for a sequence of {MAX_INDEX - left} tokens, got {count}"
                    )
        if not self.can_extend(rows):
            self.raise_full(rows)
        self._placer.grow(seqs, counts)

    def can_extend(self, rows: Iterable[tuple[int, int]], reserved: int = 0) -> bool:
        """Say whether all of `(seq_id, num_tokens)` can be extended, in any order; exact, and changes nothing.

        Cached and spare frames count as free, but for `reserved` of them (the frames of a `match`). A sequence that is
        not in the cache holds nothing yet, so that admission can ask before it adds.
        """
        rows = list(rows)
        if self._placer.plenty([count for _, count in rows], reserved):
            return True
        seqs = [(self._sequences.get(seq_id) or self._empty(seq_id), count) for seq_id, count in rows]
        needed, available = self._placer.demand(seqs)
        return needed + reserved <= available

    def raise_full(self, rows: Iterable[tuple[int, int]]) -> NoReturn:
        """Raise CacheFull with the numbers of a step that does not fit."""
        rows, ledger = list(rows), self._ledger
        needed, available = self._placer.demand((self._get(seq_id), count) for seq_id, count in rows)
        ranks = ", ".join(
            f"rank {rank}: {ledger.allocator.free_frames(rank)} free, {ledger.cached_frames[rank]} cached, "
            f"{ledger.spare_frames[rank]} spare of {total}"
            for rank, total in enumerate(self.layout.num_frames)
        )
        raise CacheFull(
            f"{sum(count for _, count in rows)} more tokens for {len(rows)} sequence(s) need {needed} frames of "
            f"{self.layout.min_chunk} tokens, {available} are available ({ranks})",
            needed,
            available,
        )

    def truncate(self, seq_id: int, length: int) -> None:
        """Drop the tokens from position `length` on.

        Raises:
            ValueError: `length` is negative or above the current length.
        """
        seq, length = self._get(seq_id), operator.index(length)
        if not 0 <= length <= seq.length:
            raise ValueError(f"length must be from 0 to {seq.length}, got {length}")
        while seq.length > length:
            span = seq.spans[-1]
            tokens = min(span.length, seq.length - length)
            self._placer.tokens[span.rank] -= tokens
            seq.cut(tokens)
            state = span.state
            if not span.length:
                self._ledger.drop(state, seq)
            elif state.owner is seq and state.views == 1:
                # nobody else sees the slots behind: they may be written again
                self._ledger.shrink(state, span.offset + span.length)
        del seq.keys[length // self.layout.page_size :]

    def fork(self, src: int, dst: int) -> None:
        """Start `dst` as a copy of `src` that shares all its chunks; the next token of either opens a new chunk.

        Raises:
            ValueError: `dst` is in the cache already.
        """
        parent = self._get(src)
        if dst in self._sequences:
            raise ValueError(f"sequence {dst} is in the cache already")
        seq = Sequence(dst, self.layout.num_ranks, self.layout.min_chunk, parent.root)
        if parent.spans:
            self._ledger.seal(parent.spans[-1].state)
        for span in parent.spans:
            self._append_shared(seq, span.state, span.offset, span.length)
        seq.keys = list(parent.keys)
        self._sequences[dst] = seq

    def free(self, seq_id: int, withdraw: bool = False) -> None:
        """Forget a sequence. Its published pages stay cached until their frames are needed.

        Args:
            withdraw: its pages can be found no more, shared ones included: what they hold is not to be trusted.
        """
        for key in self._get(seq_id).keys if withdraw else ():
            self._ledger.withdraw(key)
        # from the tail, so that the least recently used chunk is the one whose pages depend on the others
        self.truncate(seq_id, 0)
        del self._sequences[seq_id]

    def origin(self, seq_id: int) -> Origin:
        """Return what `place` needs to give a sequence's tokens to the same ranks again."""
        seq = self._get(seq_id)
        return Origin(seq.root, tuple(seq.keys), seq.runs())

    def can_place(self, origin: Origin, more: int, rows: SequenceOf[tuple[int, int]] = ()) -> bool:
        """Say whether `place` and `more` tokens behind fit beside `rows`, as `can_extend` has them; changes nothing."""
        frames, needs = self._placer.frames_of(origin.runs, more)
        return all(need <= self._ledger.available(rank) for rank, need in needs.items()) and self.can_extend(
            rows, frames
        )

    def place(self, seq_id: int, origin: Origin) -> None:
        """Register a sequence again: as many tokens on the same ranks in the same order, in slots still to be written.

        Raises:
            CacheFull: a rank has too few frames; nothing was changed.
            ValueError: the sequence is in the cache already.
        """
        if seq_id in self._sequences:
            raise ValueError(f"sequence {seq_id} is in the cache already")
        for rank, need in self._placer.frames_of(origin.runs)[1].items():
            if need > (available := self._ledger.available(rank)):
                raise CacheFull(f"{need} frames of rank {rank} are needed, {available} available", need, available)
        seq = Sequence(seq_id, self.layout.num_ranks, self.layout.min_chunk, origin.root)
        seq.keys = list(origin.keys)
        self._sequences[seq_id] = seq
        self._placer.put(seq, origin.runs)

    def commit_pages(self, seq_id: int, token_ids: TokenIds, start: int = 0) -> None:
        """Publish the full pages among a sequence's tokens from position `start` on, whose KV is now written.

        Pages published before are not looked at again: the cost is that of the new pages.

        Raises:
            ValueError: more tokens than the sequence holds, or a `start` behind the first page not yet published.
        """
        seq, size = self._get(seq_id), self.layout.page_size
        first, last = len(seq.keys), (start + len(token_ids)) // size
        if start + len(token_ids) > seq.length:
            raise ValueError(
                f"token_ids must have at most the {seq.length} tokens reserved, got {len(token_ids)} from {start} on"
            )
        if not 0 <= start <= first * size:
            raise ValueError(f"start must be from 0 to {first * size}, the end of the published pages, got {start}")
        if first >= last:
            return
        index = self._ledger.index
        data = token_bytes(token_ids[first * size - start : last * size - start])
        where = fragments(seq, first * size, size)
        for page in range(last - first):
            parent = seq.keys[-1] if seq.keys else seq.root
            tokens = data[page * index.page_bytes : (page + 1) * index.page_bytes]
            key = PrefixIndex.key(parent, tokens)
            self._ledger.publish(key, parent, tokens, next(where))
            seq.keys.append(key)

    def held_tokens(self, kvp_rank: int) -> int:
        """Return the tokens that live sequences hold on one rank, shared ones once for each sequence."""
        return self._placer.tokens[kvp_rank]

    def length(self, seq_id: int) -> int:
        """Return the number of tokens of a sequence, over all ranks."""
        return self._get(seq_id).length

    def local_length(self, seq_id: int, kvp_rank: int) -> int:
        """Return the number of tokens of a sequence on one rank."""
        return self._get(seq_id).loads[kvp_rank]

    def views(self, seq_id: int) -> list[View]:
        """Return the views of a sequence in token order, over all ranks."""
        return self._get(seq_id).views()

    def sequences(self) -> list[int]:
        """Return the ids of the live sequences, oldest first."""
        return list(self._sequences)

    def local_view_table(self, seq_id: int, kvp_rank: int) -> Int32Array:
        """Return one rank's views of a sequence, kept from step to step.

        Shapes:
            [C, 3] int32: slot of the first token, number of tokens, position of the first token; ascending positions.

        Notes:
            Read-only, without a copy: a window on rows that later calls change. O(1) but for the first call.
        """
        return self._get(seq_id).table(kvp_rank).rows

    def local_rows(self, seq_ids: Iterable[int], kvp_rank: int) -> tuple[list[int], list[ViewTable]]:
        """Return the lengths of sequences, over all ranks, and one rank's tables of them, kept from step to step."""
        seqs = self._all(seq_ids)
        return [seq.length for seq in seqs], [seq.tables.get(kvp_rank) or seq.table(kvp_rank) for seq in seqs]

    def slots(self, seq_id: int, start: int, stop: int, kvp_rank: int) -> Int64Array:
        """Return the slots of tokens `[start, stop)` on one rank, -1 where a token lies on another.

        Shapes:
            [stop - start] int64.

        Raises:
            ValueError: not `0 <= start <= stop <= length`.

        Notes:
            O(stop - start + log views).
        """
        seq = self._get(seq_id)
        if not 0 <= start <= stop <= seq.length:
            raise ValueError(f"start and stop must be ordered and from 0 to {seq.length}, got {start} and {stop}")
        return seq.table(kvp_rank).slots(start, stop)

    def stats(self) -> CacheStats:
        """Return where the frames are; O(ranks)."""
        ledger, ranks = self._ledger, range(self.layout.num_ranks)
        parts = [ledger.allocator.fragmentation(rank) for rank in ranks]
        free = tuple(part.free_frames for part in parts)
        used = tuple(total - ledger.available(rank) for rank, total in enumerate(self.layout.num_frames))
        slots = sum(used) * self.layout.min_chunk
        frames = sum(free)
        return CacheStats(
            free_frames=free,
            cached_frames=tuple(ledger.cached_frames),
            spare_frames=tuple(ledger.spare_frames),
            used_frames=used,
            tokens=tuple(self._placer.tokens),
            stored_tokens=tuple(ledger.stored_tokens),
            internal_waste=1.0 - sum(ledger.stored_tokens) / slots if slots else 0.0,
            external_fragmentation=sum(p.external * p.free_frames for p in parts) / frames if frames else 0.0,
            num_sequences=len(self._sequences),
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            published_pages=len(ledger.index.pages),
            evicted_chunks=ledger.evicted_chunks,
        )

    def check_integrity(self) -> None:
        """Check that all books agree; O(frames + views). For idle moments and tests.

        Raises:
            CacheCorrupt: naming what does not add up.
        """
        views: dict[ChunkState, int] = {}
        totals = [0] * self.layout.num_ranks
        for seq_id, seq in self._sequences.items():
            require(seq.seq_id == seq_id, f"sequence {seq.seq_id} is filed under {seq_id}")
            require(len(seq.keys) * self.layout.page_size <= seq.length, f"sequence {seq_id}: too many pages")
            seq.check_integrity()
            totals = [total + load for total, load in zip(totals, seq.loads, strict=True)]
            for span in seq.spans:
                views[span.state] = views.get(span.state, 0) + 1
        require(totals == self._placer.tokens, f"tokens per rank are {totals}, {self._placer.tokens} said")
        for state in views:
            owner = state.owner
            gone = isinstance(owner, Sequence) and self._sequences.get(owner.seq_id) is not owner
            require(not gone, f"{state.chunk} is owned by a sequence that is gone")
        self._ledger.check_integrity(views)

    def _empty(self, seq_id: int, salt: int = 0) -> Sequence:
        """Return a sequence without tokens that is not in the cache."""
        return Sequence(seq_id, self.layout.num_ranks, self.layout.min_chunk, self._ledger.index.root(salt))

    def _get(self, seq_id: int) -> Sequence:
        """Return a live sequence."""
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise KeyError(f"sequence {seq_id} is not in the cache") from None

    def _all(self, seq_ids: Iterable[int]) -> list[Sequence]:
        """Return live sequences."""
        sequences = self._sequences
        try:
            return [sequences[seq_id] for seq_id in seq_ids]
        except KeyError as missing:
            raise KeyError(f"sequence {missing.args[0]} is not in the cache") from None

    def _append_shared(self, seq: Sequence, state: ChunkState, offset: int, length: int) -> None:
        """Append tokens that are in the cache already; a view holds one reference to its chunk."""
        spans = len(seq.spans)
        seq.append(state, offset, length)
        if len(seq.spans) > spans:
            self._ledger.share(state)
        self._placer.tokens[state.chunk.kvp_rank] += length

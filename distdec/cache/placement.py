"""Decide on which rank a sequence goes on, and whether a step fits."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as ListOf

from distdec.cache.allocator import require
from distdec.cache.layout import CacheLayout
from distdec.cache.ledger import ChunkLedger
from distdec.cache.sequence import Sequence


class Placer:
    """Grow sequences over the ranks.

    Attributes:
        tokens: tokens that live sequences hold on each rank, shared ones once for each sequence.
    """

    def __init__(self, layout: CacheLayout, ledger: ChunkLedger, hook: Callable[[int, int], int] | None) -> None:
        """Take the rule (`hook` None), or a hook `(seq_id, position) -> kvp_rank` in its place."""
        self.tokens = [0] * layout.num_ranks
        self._layout = layout
        self._ledger = ledger
        self._hook = hook
        self._home = 0 if hook else layout.home_tokens
        self._weights = layout.rank_weights
        self._fixed = layout.deterministic
        self._min_chunk = layout.min_chunk

    def demand(self, rows: Iterable[tuple[Sequence, int]]) -> tuple[int, int]:
        """Return frames needed and frames available for all rows together.

        Exact: the rows fit, in any order, if and only if `needed <= available`. By rule any rank's frame will do; a
        hook asks for frames of certain ranks, so the numbers are then those of the rank that falls short the most.
        """
        counts: dict[Sequence, int] = {}
        for seq, count in rows:
            counts[seq] = counts.get(seq, 0) + count
        ranks = range(self._layout.num_ranks)
        have = [self._ledger.available(rank) for rank in ranks]
        if self._hook is None:
            return sum(self._frames(seq, count) for seq, count in counts.items()), sum(have)
        needs = [0 for _ in ranks]
        for seq, count in counts.items():
            for rank, run, room in self._runs(seq, count):
                needs[rank] += -(-max(0, run - room) // self._layout.min_chunk)
        return max(zip(needs, have, strict=True), key=lambda pair: pair[0] - pair[1])

    def plenty(self, counts: ListOf[int], reserved: int = 0) -> bool:
        """Say whether any sequences can be extended by these counts, with `reserved` frames left.

        A row asks for its tokens in whole frames at most, twice rounded up where it leaves its home rank. So no
        sequence has to be looked at, most of the time; where the answer is no, `demand` knows.
        """
        if self._hook is not None:
            return False
        most = sum(counts) // self._min_chunk + len(counts) * (2 if self._home else 1)
        return most + reserved <= sum(map(self._ledger.available, range(self._layout.num_ranks)))

    def grow(self, seqs: ListOf[Sequence], counts: ListOf[int]) -> None:
        """Extend sequences for which there is room.

        Nearly all rows of a step stay inside the frame in which they end. No other frame is begun there, so that only
        tokens are counted.
        """
        stored, tokens, size, home = self._ledger.stored_tokens, self.tokens, self._min_chunk, self._home
        for seq, count in zip(seqs, counts, strict=True):
            if self._hook is not None:
                for rank, run, _ in list(self._runs(seq, count)):
                    self._fill(seq, run, rank)
                continue
            if seq.length > home:
                span = seq.spans[-1]
                state = span.state
                filled = state.filled
                if state.owner is seq and span.offset + span.length == filled and count <= -filled % size:
                    rank = span.rank
                    state.filled = filled + count
                    stored[rank] += count
                    tokens[rank] += count
                    # as `seq.append` into the last view
                    span.length += count
                    seq.length += count
                    seq.loads[rank] += count
                    continue
            self._fill(seq, count, None)

    def put(self, seq: Sequence, runs: Iterable[tuple[int, int]]) -> None:
        """Grow a sequence without tokens by runs of (rank, tokens) for which the ranks have room."""
        for rank, count in runs:
            self._fill(seq, count, rank)

    def frames_of(self, runs: Iterable[tuple[int, int]], more: int = 0) -> tuple[int, dict[int, int]]:
        """Return the frames that runs take with `more` tokens behind them, and those that they take of each rank.

        Exact, where neighbouring runs lie on different ranks: each then begins a frame, as does the home boundary.

        Example: frames of 16, runs (0, 20), (1, 30), (0, 4) and 13 more: 2 + 2 + 2 frames; 3 of rank 0 and 2 of rank 1.
        """
        needs: dict[int, int] = {}
        start = stop = total = last = 0
        for rank, count in runs:
            start, stop = stop, stop + count
            last = self._frames_between(start, stop)
            needs[rank] = needs.get(rank, 0) + last
            total += last
        return total - last + self._frames_between(start, stop + more), needs

    def _frames_between(self, start: int, stop: int) -> int:
        """Return the frames of tokens `[start, stop)`, the first of which begins one."""
        home, size = min(max(self._home, start), stop), self._min_chunk
        return -(-(home - start) // size) + -(-(stop - home) // size)

    def _fill(self, seq: Sequence, count: int, hooked: int | None) -> None:
        """Fill the last chunk, then new ones; all on rank `hooked` if given."""
        ledger = self._ledger
        while count:
            if self._may_write(seq) and (hooked is None or seq.spans[-1].rank == hooked):
                state = seq.spans[-1].state
            else:
                self._leave(seq)
                rank = self._rank(seq) if hooked is None else hooked
                state = ledger.open(rank, self._layout.frames_at(seq.length), seq)
            rank, _, num_frames = state.chunk
            taken = min(count, num_frames * self._layout.min_chunk - state.filled)
            if seq.length < self._home:
                taken = min(taken, self._home - seq.length)
            offset = state.filled
            ledger.grow(state, taken)
            seq.append(state, offset, taken)
            self.tokens[rank] += taken
            count -= taken

    def _leave(self, seq: Sequence) -> None:
        """Seal the last chunk if it is left before it is full: its tail would be of no use to anybody.

        A full chunk stays owned, so that a sequence cut back into it can go on in place.
        """
        state = seq.spans[-1].state if seq.spans else None
        if state and state.owner is seq and state.filled < state.chunk.num_frames * self._layout.min_chunk:
            self._ledger.seal(state)

    def _may_write(self, seq: Sequence) -> bool:
        """Say whether the next token can go into the last chunk."""
        if not seq.spans:
            return False
        span = seq.spans[-1]
        state = span.state
        return (
            state.owner is seq
            and span.offset + span.length == state.filled
            and state.filled < state.chunk.num_frames * self._layout.min_chunk
            # a sequence that outgrows its home rank is dealt from there on
            and (not self._home or seq.length != self._home)
        )

    def _room(self, seq: Sequence) -> int:
        """Return the tokens that fit into the frame in which the sequence ends."""
        return -seq.spans[-1].state.filled % self._layout.min_chunk if self._may_write(seq) else 0

    def _frames(self, seq: Sequence, count: int) -> int:
        """Return the frames that `count` more tokens need beyond the frame in which the sequence ends."""
        size = self._layout.min_chunk
        # frames are counted afresh from the home boundary on
        head = min(count, self._home - seq.length) if seq.length < self._home else count
        return -(-max(0, head - self._room(seq)) // size) + -(-(count - head) // size)

    def _rank(self, seq: Sequence) -> int:
        """Return the rank for the next chunk: home, or least weighted load of the sequence, of all, lowest rank.

        In a deterministic layout a run that was begun goes on where it is, and the load of all does not count.
        Weighted loads `a / v` and `b / w` are compared as `a * w` and `b * v`: no rounding, the same on every machine.
        """
        available = self._ledger.available
        stays = seq.length < self._home or (self._fixed and self._within_run(seq.length))
        if seq.spans and stays and available(seq.spans[-1].rank):
            return seq.spans[-1].rank
        loads, tokens, weights = seq.loads, self.tokens, self._weights
        best = -1
        for rank, weight in enumerate(weights):
            if best >= 0:
                ours, theirs = loads[rank] * weights[best], loads[best] * weight
                tied = self._fixed or tokens[rank] * weights[best] >= tokens[best] * weight
                if ours > theirs or (ours == theirs and tied):
                    continue
            if available(rank):
                best = rank
        require(best >= 0, "a chunk was asked for, and no rank has an available frame")
        return best

    def _within_run(self, position: int) -> bool:
        """Say whether a run is under way at `position`; a sequence that leaves its home begins one."""
        frames = position // self._min_chunk
        return position != self._home and frames % self._layout.run_frames(position) != 0

    def _runs(self, seq: Sequence, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield (rank, tokens, room in the frame that they continue) for each run of tokens hooked to one rank."""
        assert self._hook is not None
        position, stop = seq.length, seq.length + count
        room, last = self._room(seq), seq.spans[-1].rank if seq.spans else -1
        while position < stop:
            begin = position
            rank = self._hook(seq.seq_id, begin)
            if not 0 <= rank < self._layout.num_ranks:
                raise ValueError(f"placement must give a rank from 0 to {self._layout.num_ranks - 1}, got {rank}")
            while position < stop and self._hook(seq.seq_id, position) == rank:
                position += 1
            yield rank, position - begin, room if rank == last else 0
            room, last = 0, -1

"""Know who holds each chunk, how full it is, and which frames can be taken back when they are needed."""

from collections import OrderedDict

from distdec.cache.allocator import ChunkAllocator, require
from distdec.cache.layout import CacheLayout
from distdec.cache.prefix import ChunkState, Fragment, Page, PrefixIndex


class ChunkLedger:
    """Open, fill, share and drop chunks.

    Frames of a rank are free, cached, spare or used:

        free    in no chunk
        cached  in a chunk without views that still has published pages; evicted least recently used first
        spare   the untouched tail of a chunk that its owner has not filled yet; cut off when nothing else is left
        used    hold tokens that a live sequence sees

    The first three are available: any of them serves any sequence, frame by frame. That is what makes a capacity check
    a comparison of two integers, and a refusal mean that the frames have run out.

    A chunk has one writer, the sequence that opened it, which writes at `filled` and nowhere else. `seal` ends that for
    good. So no slot that a second view can see is ever written again, and no chunk has two writers.
    """

    def __init__(self, layout: CacheLayout) -> None:
        """Start with all frames free."""
        ranks = range(layout.num_ranks)
        self.layout = layout
        self.allocator = ChunkAllocator(layout)
        self.index = PrefixIndex(layout.page_size)
        self.states: list[dict[int, ChunkState]] = [{} for _ in ranks]
        self.cached_frames = [0 for _ in ranks]
        self.spare_frames = [0 for _ in ranks]
        # tokens in chunks that have views, each slot once
        self.stored_tokens = [0 for _ in ranks]
        self.evicted_chunks = 0
        self._cached: list[OrderedDict[int, ChunkState]] = [OrderedDict() for _ in ranks]
        self._spare: list[dict[int, ChunkState]] = [{} for _ in ranks]

    def available(self, kvp_rank: int) -> int:
        """Return the frames of one rank that are free, cached or spare."""
        return self.allocator.free_frames(kvp_rank) + self.cached_frames[kvp_rank] + self.spare_frames[kvp_rank]

    def open(self, kvp_rank: int, frames: int, owner: object) -> ChunkState:
        """Take a chunk of at most `frames` frames of a rank that has one available; it has one view."""
        while not self.allocator.free_frames(kvp_rank):
            if self._cached[kvp_rank]:
                self._evict(next(iter(self._cached[kvp_rank].values())))
            else:
                # the youngest has the most to give
                self._trim(next(reversed(self._spare[kvp_rank].values())))
        state = ChunkState(self.allocator.allocate(kvp_rank, frames), owner)
        frame = state.chunk.frame
        self.states[kvp_rank][frame] = state
        self._spare[kvp_rank][frame] = state
        self.spare_frames[kvp_rank] += state.chunk.num_frames
        return state

    def grow(self, state: ChunkState, tokens: int) -> None:
        """Let the owner write `tokens` more tokens; O(1)."""
        rank, frame, num_frames = state.chunk
        size = self.layout.min_chunk
        before = -(-state.filled // size)
        state.filled += tokens
        after = -(-state.filled // size)
        self.stored_tokens[rank] += tokens
        if after != before:
            self.spare_frames[rank] -= after - before
            if after == num_frames:
                del self._spare[rank][frame]

    def shrink(self, state: ChunkState, filled: int) -> None:
        """Take back the tokens from `filled` on, which only the owner sees, and the pages published of them."""
        rank, frame, _ = state.chunk
        if state.page_end > filled:
            for key in list(state.pages):
                if any(s is state and o + n > filled for s, o, n in self.index.pages[key].fragments):
                    self._unpublish(key)
            state.page_end = min(state.page_end, filled)
        size = self.layout.min_chunk
        gained = -(-state.filled // size) - -(-filled // size)
        self.stored_tokens[rank] -= state.filled - filled
        state.filled = filled
        if gained:
            self.spare_frames[rank] += gained
            self._spare[rank][frame] = state

    def seal(self, state: ChunkState) -> None:
        """End the writing into a chunk and give back its untouched tail."""
        if state.owner is not None:
            self._trim(state)
            state.owner = None

    def share(self, state: ChunkState) -> None:
        """Add a view."""
        rank, frame, num_frames = state.chunk
        self.allocator.retain(state.chunk)
        if not state.views:
            del self._cached[rank][frame]
            self.cached_frames[rank] -= num_frames
            self.stored_tokens[rank] += state.filled
        state.views += 1

    def drop(self, state: ChunkState, holder: object) -> None:
        """Remove a view of `holder`; a chunk without views is free, or cached while it has pages."""
        if state.owner is holder:
            self.seal(state)
        rank, frame, num_frames = state.chunk
        state.views -= 1
        if not state.views:
            self.stored_tokens[rank] -= state.filled
            if state.pages:
                self._cached[rank][frame] = state
                self.cached_frames[rank] += num_frames
            else:
                del self.states[rank][frame]
        self.allocator.release(state.chunk)

    def publish(self, key: bytes, parent: bytes, tokens: bytes, fragments: tuple[Fragment, ...]) -> None:
        """Let other sequences find a page, unless one of the same content is there already."""
        if key not in self.index.pages:
            for state in self.index.insert(key, Page(parent, tokens, fragments)):
                # the index holds one reference for all pages of a chunk
                self.allocator.retain(state.chunk)

    def withdraw(self, key: bytes) -> None:
        """Let nobody find a page any more; harmless if it is gone."""
        if key in self.index.pages:
            self._unpublish(key)

    def check_integrity(self, views: dict[ChunkState, int]) -> None:
        """Check the books against the views that the sequences hold.

        Raises:
            CacheCorrupt: naming the chunk.
        """
        self.allocator.check_integrity()
        size = self.layout.min_chunk
        for rank, states in enumerate(self.states):
            spare = stored = cached = used = 0
            for frame, state in states.items():
                place = state.chunk
                require((place.kvp_rank, place.frame) == (rank, frame), f"{place} is filed under {(rank, frame)}")
                require(state.views == views.get(state, 0), f"{place}: {state.views} views said, {views.get(state, 0)}")
                held = state.views + bool(state.pages)
                require(self.allocator.references(place) == held, f"{place}: {held} references expected")
                require(0 < state.filled <= place.num_frames * size, f"{place}: {state.filled} tokens")
                tail = place.num_frames - -(-state.filled // size)
                require(state.owner is not None or not tail, f"{place}: sealed with {tail} untouched frames")
                require((frame in self._spare[rank]) == (tail > 0), f"{place}: its spare frames are not listed")
                require((frame in self._cached[rank]) == (not state.views), f"{place}: cached and seen, or neither")
                spare += tail
                stored += state.filled if state.views else 0
                cached += 0 if state.views else place.num_frames
                used += place.num_frames
            require(spare == self.spare_frames[rank], f"rank {rank}: {spare} spare, {self.spare_frames[rank]} said")
            require(stored == self.stored_tokens[rank], f"rank {rank}: {stored} stored tokens")
            require(cached == self.cached_frames[rank], f"rank {rank}: {cached} cached frames")
            free = self.allocator.free_frames(rank)
            require(free + used == self.layout.num_frames[rank], f"rank {rank}: free {free} + held {used} frames")
            require(len(self._cached[rank]) + len(self._spare[rank]) <= len(states), f"rank {rank}: stale lists")
        known = {state for states in self.states for state in states.values()}
        require(views.keys() <= known, "a sequence sees a chunk that is not held")
        self.index.check_integrity(known)

    def _trim(self, state: ChunkState) -> None:
        """Give back the untouched tail of a chunk."""
        rank, frame, num_frames = state.chunk
        used = -(-state.filled // self.layout.min_chunk)
        if used < num_frames:
            self.spare_frames[rank] -= num_frames - used
            del self._spare[rank][frame]
            state.chunk = self.allocator.trim(state.chunk, used)

    def _evict(self, state: ChunkState) -> None:
        """Forget the pages of a cached chunk, and with the last one the chunk."""
        self.evicted_chunks += 1
        for key in list(state.pages):
            self._unpublish(key)

    def _unpublish(self, key: bytes) -> None:
        """Forget a page, and the cached chunks that held nothing else."""
        for state in self.index.remove(key):
            if not state.views:
                rank, frame, num_frames = state.chunk
                del self._cached[rank][frame]
                self.cached_frames[rank] -= num_frames
                del self.states[rank][frame]
            self.allocator.release(state.chunk)

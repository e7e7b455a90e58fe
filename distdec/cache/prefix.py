"""Find pages of tokens whose keys and values are already in the cache, by content."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from distdec.cache.allocator import require
from distdec.cache.layout import Chunk


class ChunkState:
    """What is known of one held chunk.

    Attributes:
        chunk: where it lies.
        views: number of views of live sequences on it.
        filled: tokens written from its first slot on; no view reaches further.
        owner: the one sequence that may write more into it, or None for good.
        pages: keys of the published pages that lie in it, wholly or in part.
        page_end: no published page reaches further into the chunk.
    """

    __slots__ = ("chunk", "filled", "owner", "page_end", "pages", "views")

    def __init__(self, chunk: Chunk, owner: object) -> None:
        """Start empty, with one view to come."""
        self.chunk = chunk
        self.views = 1
        self.filled = 0
        self.owner: object | None = owner
        self.pages: dict[bytes, None] = {}
        self.page_end = 0


# (chunk, offset, length): a page lies in one chunk, or in several where a chunk ended inside it
Fragment = tuple[ChunkState, int, int]


class Page:
    """A published page: its tokens, the key of the page before it, and where its tokens lie."""

    __slots__ = ("fragments", "parent", "tokens")

    def __init__(self, parent: bytes, tokens: bytes, fragments: tuple[Fragment, ...]) -> None:
        """Keep the tokens themselves: a hit compares them."""
        self.parent = parent
        self.tokens = tokens
        self.fragments = fragments


class Match(NamedTuple):
    """What a prompt would find: tokens, the key of the last page (empty without a hit), cached frames it would pin."""

    num_tokens: int
    key: bytes
    frames: int


def token_bytes(token_ids: "Sequence[int] | np.ndarray[Any, Any]") -> bytes:
    """Return token ids as little-endian int64, the form that is hashed, the same on every machine.

    Raises:
        ValueError: ids that are not integers, or more than one row of them.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"token_ids must be one row of integers, got {ids.dtype} of shape {ids.shape}")
    return ids.astype("<i8").tobytes()


class PrefixIndex:
    """Pages by the SHA-256 of their tokens, all tokens before them, and the salt.

    `key(i) = sha256(key(i - 1) + tokens of page i)`, `key(-1)` is a hash of the salt: equal pages after different
    prefixes, or of tenants with different salts, never meet. A hit also compares the page's tokens and its parent, so
    by induction over the pages a hash collision cannot hand out another prompt's keys.
    """

    def __init__(self, page_size: int) -> None:
        """Start empty."""
        self.page_bytes = 8 * page_size
        self.pages: dict[bytes, Page] = {}

    @staticmethod
    def root(salt: int) -> bytes:
        """Return the key that stands before the first page."""
        return hashlib.sha256(b"salt %d" % salt).digest()

    @staticmethod
    def key(parent: bytes, tokens: bytes) -> bytes:
        """Return the key of a page."""
        return hashlib.sha256(parent + tokens).digest()

    def find(self, parent: bytes, tokens: bytes) -> tuple[bytes, Page] | None:
        """Return key and page of these tokens after `parent`, or None."""
        key = self.key(parent, tokens)
        page = self.pages.get(key)
        if page is None or page.tokens != tokens or page.parent != parent:
            return None
        return key, page

    def chain(self, key: bytes, root: bytes) -> list[tuple[bytes, Page]]:
        """Return the pages from `root` to `key`, first page first; none for an empty key.

        Raises:
            ValueError: a page of the chain is not there.
        """
        chain: list[tuple[bytes, Page]] = []
        while key and key != root:
            if key not in self.pages:
                raise ValueError(f"no cached page has the key {key.hex()}, {len(chain)} page(s) before the last")
            chain.append((key, self.pages[key]))
            key = self.pages[key].parent
        return chain[::-1]

    def insert(self, key: bytes, page: Page) -> list[ChunkState]:
        """Publish a page that is not yet there; returns the chunks for which it is the first page."""
        first = []
        self.pages[key] = page
        for state, offset, length in page.fragments:
            if not state.pages:
                first.append(state)
            state.pages[key] = None
            state.page_end = max(state.page_end, offset + length)
        return first

    def remove(self, key: bytes) -> list[ChunkState]:
        """Forget a page; returns the chunks for which it was the last page."""
        last = []
        for state, _, _ in self.pages.pop(key).fragments:
            if state.pages.pop(key, key) is None and not state.pages:
                state.page_end = 0
                last.append(state)
        return last

    def check_integrity(self, states: set[ChunkState]) -> None:
        """Check that pages and chunks know each other, and that every page is whole and written."""
        known = 0
        for state in states:
            known += len(state.pages)
            require(all(key in self.pages for key in state.pages), f"{state.chunk} lists a page that is not published")
        listed = 0
        for key, page in self.pages.items():
            require(self.key(page.parent, page.tokens) == key, "a page does not have its key")
            listed += len({id(state) for state, _, _ in page.fragments})
            size = 0
            for state, offset, length in page.fragments:
                size += length
                require(state in states and key in state.pages, f"{state.chunk} does not list its page")
                require(offset + length <= min(state.filled, state.page_end), f"{state.chunk}: page beyond its tokens")
            require(8 * size == self.page_bytes, f"a page of {size} tokens")
        require(known == listed, f"chunks list {known} pages, pages list {listed} chunks")

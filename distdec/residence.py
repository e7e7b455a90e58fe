"""Let requests into rank 0's cache and out of it, and keep the record of that for the next plan. No torch.

A request leaves the cache for good, to be computed again, or for host memory, from where it comes back as it was. The
other ranks repeat all that in the same order: `Replay` is the counterpart of this module.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from distdec.cache.parking import Parking
from distdec.cache.prefix import Match
from distdec.progress import RequestState
from distdec.request import Hit


class Capacity(Protocol):
    """What the scheduler asks of the cache, and does to it."""

    def can_extend(self, needs: Sequence[tuple[int, int]], reserved: int = 0) -> bool:
        """Say whether all (request_id, more tokens) fit together; a request that is not there yet holds nothing."""
        ...

    def match(self, token_ids: Sequence[int]) -> Match:
        """Return what of a prompt is cached."""
        ...

    def adopt(self, request_id: int, key: bytes) -> int:
        """Start a request on the pages of a match."""
        ...

    def free(self, request_id: int, withdraw: bool = False) -> None:
        """Forget a request's sequence."""
        ...


class Changes(NamedTuple):
    """What was done to rank 0's cache; the fields are those of a `StepPlan`."""

    free: tuple[int, ...]
    admit: tuple[int, ...]
    withdraw: tuple[int, ...]
    hits: tuple[Hit, ...]
    offload: tuple[int, ...]
    restore: tuple[int, ...]


class Residence:
    """Give requests their places in rank 0's cache.

    Args:
        cache: rank 0's.
        prefix_caching: look prompts up in the cache.
        host: where preempted requests may be kept; None: nowhere.
    """

    def __init__(self, cache: Capacity, *, prefix_caching: bool = True, host: Parking | None = None) -> None:
        """Start with nothing to tell."""
        self.cache = cache
        self.host = host
        self.prefix_caching = prefix_caching
        # done, and not yet told to the other ranks: a plan that fails must not lose it
        self._freed: list[int] = []
        self._admitted: list[int] = []
        self._withdrawn: list[int] = []
        self._hits: list[Hit] = []
        self._offloaded: list[int] = []
        self._restored: list[int] = []

    def changes(self) -> Changes:
        """Return what was done since `clear`."""
        first = tuple(self._freed), tuple(self._admitted), tuple(self._withdrawn)
        return Changes(*first, tuple(self._hits), tuple(self._offloaded), tuple(self._restored))

    @property
    def untold(self) -> bool:
        """Whether anything was done since `clear`: by a plan that failed, as the next may free what that admitted."""
        return any(self.changes())

    def clear(self) -> None:
        """Begin the record of the next plan."""
        self._freed, self._admitted, self._withdrawn = [], [], []
        self._hits, self._offloaded, self._restored = [], [], []

    def is_parked(self, request_id: int) -> bool:
        """Say whether a request is in host memory."""
        return self.host is not None and request_id in self.host

    def free(self, request_id: int, withdraw: bool = False) -> None:
        """Forget a request, in the cache or on the host.

        Args:
            withdraw: nobody shall find its cached pages again.
        """
        if self.host is not None and request_id in self.host:
            self.host.drop(request_id)
        else:
            self.cache.free(request_id, withdraw)
        self._freed.append(request_id)
        if withdraw:
            self._withdrawn.append(request_id)

    def leave(self, state: RequestState, again_ms: float | None) -> None:
        """Take the place of a preempted request: for the host if that takes less time than to compute it again.

        Args:
            state: not `cold`: one that is has to be laid out afresh.
            again_ms: milliseconds to compute it again; None: unknown.
        """
        request_id, host = state.request_id, self.host
        if (
            host is not None
            and again_ms is not None
            and state.num_computed
            and not state.cold
            and host.move_ms(request_id) < again_ms
            and host.has_room(request_id)
        ):
            host.park(request_id)
            self._freed.append(request_id)
            self._offloaded.append(request_id)
        else:
            self.free(request_id)
            state.num_computed = 0

    def enter(self, state: RequestState, reserve: int, needs: list[tuple[int, int]]) -> bool:
        """Give a request a place if there is room for it, and for `reserve` tokens more, beside the needs of others.

        One from the host takes its old ranks. Where these have no room it waits, or is forgotten there if it is alone.

        Args:
            state: of a waiting request; notes what of it is computed.
            reserve: tokens it may grow by.
            needs: (request_id, more tokens) of those that are running.
        """
        request_id, host = state.request_id, self.host
        if host is not None and request_id in host:
            if host.can_return(request_id, state.num_to_reserve(reserve), needs):
                host.bring_back(request_id)
                self._restored.append(request_id)
                self._admitted.append(request_id)
                return True
            if needs:
                return False
            self.free(request_id)
            state.num_computed = 0
        match, wanted = self._match(state), state.num_to_reserve(reserve)
        # one frame more than the pages: a frame boundary may fall differently behind them
        pinned = match.frames + 1 if match.num_tokens else 0
        fits = self.cache.can_extend([*needs, (request_id, wanted - match.num_tokens)], pinned)
        if not fits and not needs and match.num_tokens:
            match = Match(0, b"", 0)
            fits = self.cache.can_extend([(request_id, wanted)])
        if not fits:
            return False
        state.num_computed = self.cache.adopt(request_id, match.key)
        self._admitted.append(request_id)
        if match.key:
            self._hits.append(Hit(request_id, match.key))
        return True

    def _match(self, state: RequestState) -> Match:
        if not self.prefix_caching or state.cold:
            return Match(0, b"", 0)
        return self.cache.match((*state.request.prompt_ids, *state.output_ids))

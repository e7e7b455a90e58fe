"""Which sequences lie in host memory, and how much of it they take on each rank. Integers only, like the cache.

A sequence that is parked gives up its slots; each rank keeps on its own host the keys and values of its own tokens. So
the sequence has to come back to the ranks it left, in whatever slots are free there by then. As with the cache, the
same calls everywhere give the same books everywhere; the copies that a rank has to make are noted in their order.

Pages published before a sequence leaves stay where they are, until their frames are needed. They are not published
again when it comes back: meanwhile they may have been withdrawn.
"""

from enum import Enum
from typing import NamedTuple

import numpy as np

from distdec.cache.kv_cache import KVCache
from distdec.cache.sequence import Int64Array, Origin


class MoveKind(Enum):
    """What to do with a sequence's keys and values: to the host, back to the pool, or forget the host's."""

    OUT = "out"
    BACK = "back"
    DROP = "drop"


class Move(NamedTuple):
    """One copy to make.

    Shapes:
        slots: [N] int64, this rank's slots of the sequence in token order; none for DROP
    """

    kind: MoveKind
    seq_id: int
    slots: Int64Array


class Parking:
    """Take sequences out of a cache and bring them back.

    Args:
        cache: the integer cache of this rank.
        kvp_rank: whose slots the moves name.
        num_frames: frames of `min_chunk` tokens that each rank may keep on its host.

    Attributes:
        frames: frames taken on each rank's host.
        ms_per_token: how long a token takes to the host and back; measured by who copies.
    """

    def __init__(self, cache: KVCache, kvp_rank: int, num_frames: int) -> None:
        """Start empty."""
        self.cache = cache
        self.num_frames = num_frames
        self.frames = [0] * cache.layout.num_ranks
        self.ms_per_token = 0.0
        self._kvp_rank = kvp_rank
        self._origins: dict[int, Origin] = {}
        self._moves: list[Move] = []

    def __contains__(self, seq_id: int) -> bool:
        """Say whether a sequence is parked."""
        return seq_id in self._origins

    def has_room(self, seq_id: int) -> bool:
        """Say whether every rank's host has room for its part of a sequence in the cache."""
        needs = self._frames(self.cache.origin(seq_id))
        return all(taken + need <= self.num_frames for taken, need in zip(self.frames, needs, strict=True))

    def move_ms(self, seq_id: int) -> float:
        """Return the milliseconds for a sequence in the cache to the host and back: those of the rank with the most."""
        ranks = range(self.cache.layout.num_ranks)
        return self.ms_per_token * max(self.cache.local_length(seq_id, rank) for rank in ranks)

    def park(self, seq_id: int) -> None:
        """Free a sequence whose keys and values go to the host. Its published pages stay cached as after `free`.

        Raises:
            ValueError: it is parked already, or there is no room on the host.
        """
        if seq_id in self or not self.has_room(seq_id):
            raise ValueError(f"sequence {seq_id} is parked already, or {self.num_frames} frames a rank do not hold it")
        self._origins[seq_id] = self.cache.origin(seq_id)
        self._take(seq_id, 1)
        self._moves.append(Move(MoveKind.OUT, seq_id, self._slots(seq_id)))
        self.cache.free(seq_id)

    def can_return(self, seq_id: int, more: int, rows: list[tuple[int, int]]) -> bool:
        """Say whether a parked sequence and `more` tokens behind it fit into the cache beside `rows`."""
        return self.cache.can_place(self._origins[seq_id], more, rows)

    def bring_back(self, seq_id: int) -> None:
        """Give a parked sequence slots again, on the ranks that it came from, and fill them from the host.

        Raises:
            CacheFull: they do not have as many; nothing was changed.
        """
        self.cache.place(seq_id, self._origins[seq_id])
        self._moves.append(Move(MoveKind.BACK, seq_id, self._slots(seq_id)))
        self._take(seq_id, -1)
        del self._origins[seq_id]

    def drop(self, seq_id: int) -> None:
        """Forget a parked sequence."""
        self._moves.append(Move(MoveKind.DROP, seq_id, np.empty(0, np.int64)))
        self._take(seq_id, -1)
        del self._origins[seq_id]

    def take_moves(self) -> list[Move]:
        """Return what has to be copied since the last call, in order: before the slots given up are written again."""
        moves, self._moves = self._moves, []
        return moves

    def _slots(self, seq_id: int) -> Int64Array:
        slots = self.cache.slots(seq_id, 0, self.cache.length(seq_id), self._kvp_rank)
        mine: Int64Array = slots[slots >= 0]
        return mine

    def _take(self, seq_id: int, sign: int) -> None:
        needs = self._frames(self._origins[seq_id])
        self.frames = [taken + sign * need for taken, need in zip(self.frames, needs, strict=True)]

    def _frames(self, origin: Origin) -> list[int]:
        """Return the frames that each rank's part takes on its host, laid end to end."""
        tokens = [0] * len(self.frames)
        for rank, count in origin.runs:
            tokens[rank] += count
        return [-(-count // self.cache.layout.min_chunk) for count in tokens]

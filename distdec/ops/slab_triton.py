"""Slabs of symmetric memory, and the protocols by which programs of all ranks exchange data through them.

What is pushed where. Every rank owns a slab of symmetric memory, mapped by its peers. It is cut into `channels`, one
per program, so a program shares no byte with another one, whatever the size of a launch:

    slab: [channel][parity 2][source rank][capacity bytes]  then  flags: [channel][source rank] int32
          then, where the slab has them,  [channel][parity 2][source rank][words bytes]

A launch runs at most `channels` programs, of which program c uses channel c alone. `state` (int32, this rank's own)
holds one epoch per channel, and an error word.

Protocol of flags, for channel c, use number e (its epoch + 1; parity e % 2), on every rank:
    1. write ALL its own data into slot [parity][own rank] of every rank's slab, the own one included
    2. CTA barrier; raise flag [own rank] of every peer's channel c to e: one release at system scope
    3. wait until the own flags of all sources are e, or e + 1: acquire at system scope
    4. join the slots [parity][0], [parity][1], ... in rank order; store epoch e

Protocol of words, where there is little to send: every number of 4 bytes travels in a word of 8, below e.
    1. write all words into slot [parity][own rank] of every rank's words, the own one included, at least one to each
    2. look at all sources' words until each of them carries e; their lower halves are the data; store epoch e
No flag tells of other memory, so nothing need be ordered and no fence waits until the peers have all that was stored:
an aligned word of 8 bytes is stored and loaded whole.

Why two parities need no trailing barrier. A peer overwrites parity e % 2 in its use e + 2 of this channel. That launch
starts after its use e + 1 has ended, hence after it saw my flag e + 1, or my words of e + 1, which I send in a launch
that starts after my use e, with all its reads, has ended. The argument follows one channel alone, so small launches,
which leave the upper channels and their epochs untouched on every rank alike, do not disturb it; nor do graph replays,
since epochs live in device memory. It needs what every collective needs: all ranks make the same launches in the same
order, on one stream at a time.

Why both protocols may take turns on a channel. Every use, by flags or words, counts the channel's epoch up by one, and
all ranks choose the same one, from shapes alone; so the argument above holds whatever e, e + 1 and e + 2 are. Nothing
but words is ever written where words lie, and a slab begins with words of the epoch before the first use; so what else
is found there is a word of an older use of that parity, and not equal to e. A flag that uses by words have left behind
is older than e as well. Both are compared for equality, not for order, so that it does not matter how old they are: a
leftover looks new only exactly 2^32 uses later, if nothing was written in between and the peer is late in that use.

Why nothing hangs. A program pushes before it waits, and there are never more programs than the device holds at once
(`MAX_PROGRAMS_PER_SM`), so every push happens whatever the peers do. Waits are bounded: a source that has not come
after `spin_limit` polls, or that is more than one use ahead, leaves its bit in the error word and in host memory, the
program's results are NaN, and later launches neither push nor wait, so that the host sees the error soon. A peer that
was only late finishes its own use, whose data it has, and then fails by the same rule: nobody computes on torn data.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

MAX_PROGRAMS_PER_SM = 4
"""Programs of `NUM_WARPS` warps that an SM surely holds at once: 4 x 128 threads x `MAX_REGISTERS` = 64K registers."""
NUM_WARPS = 4
MAX_REGISTERS = 128


class Slab(NamedTuple):
    """Addresses and sizes that a launch needs, the same on every rank but for the tensors and `rank`.

    Shapes:
        peers: [N + 1] int64, addresses of every rank's slab as mapped here, in rank order, then that of an int32 in
            host memory that the device can write: it receives the error word
        state: [channels + 1] int32: epochs, then the error word (bit r: source r did not come; bit 30: out of step)
    """

    peers: Tensor
    state: Tensor
    rank: int
    num_ranks: int
    channels: int
    capacity: int
    words: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's slab, flags and words included."""
        return self.words_offset + 2 * self.channels * self.num_ranks * self.words

    @property
    def flags_offset(self) -> int:
        """Where the flags begin, in bytes."""
        return 2 * self.channels * self.num_ranks * self.capacity

    @property
    def words_offset(self) -> int:
        """Where the words begin, in bytes: with a line of memory that no flag shares."""
        return -(-(self.flags_offset + 4 * self.channels * self.num_ranks) // 128) * 128


@triton.jit
def own_columns(column, o_d, m_d, rank, COLUMNS: tl.constexpr):
    """Return the mask of those of a row's columns that `rank` gets; the row begins at `column` of Hq * D."""
    if COLUMNS > 0:
        m_d &= (column + o_d >= rank * COLUMNS) & (column + o_d < rank * COLUMNS + COLUMNS)
    return m_d


@triton.jit
def channel_area(c, epoch, N: tl.constexpr, CAPACITY: tl.constexpr):
    """Return where the slots of channel c and this use's parity begin, [source] following, in bytes of a slab."""
    return (c.to(tl.int64) * 2 + (epoch & 1)) * (N * CAPACITY)


@triton.jit
def channel_flags(c, N: tl.constexpr, CHANNELS: tl.constexpr, CAPACITY: tl.constexpr):
    """Return where the flags of channel c begin, in bytes of a slab."""
    return c.to(tl.int64) * (4 * N) + 2 * CHANNELS * N * CAPACITY


@triton.jit
def raise_flags(p_peers, flags, epoch, live, rank, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Raise this rank's flag to `epoch` in every peer's slab if `live`, once the program's stores are there."""
    # without it a flag may overtake what other threads of the program have stored
    tl.debug_barrier()
    o_n = tl.arange(0, BLOCK_N)
    m_n = (o_n < N) & (o_n != rank) & live
    p_flag = (tl.load(p_peers + o_n, mask=m_n, other=0) + flags + rank * 4).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(p_flag, tl.zeros_like(o_n) + epoch, mask=m_n, sem="release", scope="sys")


@triton.jit
def wait_for_peers(p_flags, epoch, polls, rank, N: tl.constexpr):
    """Wait until every source's flag is of use `epoch`; return the bits of those that did not come in `polls` looks."""
    lost = tl.full([], 0, tl.int32)
    for k in tl.static_range(1, N):
        source = (rank + k) % N
        p_flag = (p_flags + source * 4).to(tl.pointer_type(tl.int32))
        # differences, so that the epoch may wrap; the peer may be one use ahead, with all of this one delivered. Any
        # other flag may be left from an older use, however old, since uses by words raise none
        ahead = tl.atomic_add(p_flag, 0, sem="acquire", scope="sys") - epoch
        while ((ahead < 0) | (ahead > 1)) & (polls > 0):
            ahead = tl.atomic_add(p_flag, 0, sem="acquire", scope="sys") - epoch
            polls -= 1
        lost |= tl.where(ahead < 0, 1 << source, tl.where(ahead > 1, 1 << 30, 0))
    return lost


@triton.jit
def lost_sources(p_peers, p_state, lost, failed, N: tl.constexpr, CHANNELS: tl.constexpr):
    """Tell device and host of sources that did not come; return 0, or bits of the error word: results are NaN."""
    # after a failure this rank pushes nothing, so it has no result even where all peers' data is here
    lost = tl.where(failed != 0, failed, lost)
    if lost != 0:
        tl.atomic_or(p_state + CHANNELS, lost, sem="relaxed", scope="gpu")
        tl.store(tl.load(p_peers + N).to(tl.pointer_type(tl.int32)), lost)
    return lost


@triton.jit
def wait_for_all(p_peers, p_state, p_flags, epoch, failed, spin_limit, rank, N: tl.constexpr, CHANNELS: tl.constexpr):
    """Wait for every source's data of this use; return 0, or the bits that the error word got."""
    lost = wait_for_peers(p_flags, epoch, tl.where(failed != 0, 0, spin_limit), rank, N)
    lost = lost_sources(p_peers, p_state, lost, failed, N, CHANNELS)
    # without it threads read slots before the thread that polls has seen the flags
    tl.debug_barrier()
    return lost

"""Programs of an exchange between ranks that exchange nothing: they ask for memory that is read next.

While flags and rows are on their way the device's memory is idle, for some microseconds. A launch may bring programs
beside those of its channels that ask the second-level cache for the first bytes of a weight, and end: nobody waits for
what they asked for. They wait for nobody either, so they may come on top of what the device holds at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from distdec.ops.slab_triton import MAX_PROGRAMS_PER_SM, NUM_WARPS, Slab

PIECE_BYTES = {True: 1024, False: 128}
"""What one thread asks for at once: a run of lines where there is such an instruction (from sm_90 on), else one."""
CACHE_SHARE = 0.5
"""Most of the cache that is asked to be filled: the rest is left to what the step itself reads and writes meanwhile."""
_BULK = tl.constexpr(
    "{ .reg .pred wanted; setp.ne.s32 wanted, $2, 0; @wanted cp.async.bulk.prefetch.L2.global [$1], 1024; "
    "mov.u32 $0, 0; }"
)
_LINE = tl.constexpr(
    "{ .reg .pred wanted; setp.ne.s32 wanted, $2, 0; @wanted prefetch.global.L2 [$1]; mov.u32 $0, 0; }"
)


@triton.jit
def fetch_share(p_next, num_pieces, i, NUM: tl.constexpr, BULK: tl.constexpr, THREADS: tl.constexpr):
    """Ask for every `NUM`-th run of `THREADS` pieces from run i on, a piece a thread."""
    PIECE: tl.constexpr = 1024 if BULK else 128
    o = tl.arange(0, THREADS)
    for first in range(i * THREADS, num_pieces, NUM * THREADS):
        address = p_next.to(tl.int64) + (first + o).to(tl.int64) * PIECE
        wanted = (first + o < num_pieces).to(tl.int32)
        if BULK:
            tl.inline_asm_elementwise(_BULK, "=r,l,r", [address, wanted], dtype=tl.int32, is_pure=False, pack=1)
        else:
            tl.inline_asm_elementwise(_LINE, "=r,l,r", [address, wanted], dtype=tl.int32, is_pure=False, pack=1)


class Fetch(NamedTuple):
    """What a launch fetches: so many programs ask for so many pieces.

    Attributes:
        constants: FETCHERS (0: none), BULK and THREADS of a kernel.
    """

    num_programs: int
    num_pieces: int
    bulk: bool

    @property
    def constants(self) -> tuple[Any, ...]:
        """Return FETCHERS, BULK and THREADS."""
        return (self.num_programs, self.bulk, 32 * NUM_WARPS)


NOTHING = Fetch(0, 0, False)


def fetch_of(following: Tensor | None, slab: Slab, num_programs: int) -> Fetch:
    """Return what to fetch of a tensor beside `num_programs` programs of an exchange.

    Example: 16 MiB on 132 multiprocessors with a cache of 50 MiB, 32 programs: 132 more ask for 16,384 pieces.
    """
    if following is None or not following.is_cuda or not fetchable(following):
        return NOTHING
    properties = torch.cuda.get_device_properties(following.device)
    bulk = properties.major >= 9
    limit = int(properties.L2_cache_size * CACHE_SHARE)
    return sized(min(following.nbytes, limit), bulk, slab, num_programs)


def sized(num_bytes: int, bulk: bool, slab: Slab, num_programs: int) -> Fetch:
    """Return the programs that fetch `num_bytes`: one a multiprocessor, as many as there is work and room for."""
    pieces = num_bytes // PIECE_BYTES[bulk]
    room = min(slab.channels // MAX_PROGRAMS_PER_SM, slab.channels - num_programs)
    return Fetch(max(0, min(room, triton.cdiv(pieces, 32 * NUM_WARPS))), pieces, bulk)


def fetchable(following: Tensor) -> bool:
    """Tell whether a tensor is one run of memory that begins where pieces may."""
    return following.is_contiguous() and following.data_ptr() % 16 == 0

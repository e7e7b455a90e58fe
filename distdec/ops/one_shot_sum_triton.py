"""One kernel that sums a small tensor over ranks: push it into the peers' memory, wait for theirs, add.

A tensor is cut into blocks of `BLOCK_BYTES`. A launch of n blocks runs `min(n, channels)` programs; program c takes
blocks c, c + programs, c + 2 programs, ... and keeps the j-th of them in slot j of channel c. Numbers travel in the
tensor's own dtype. Slab, channels and the protocol that keeps ranks in step are those of `slab_triton`.

Why ranks agree to the bit. Every rank reads all addends back from its slab, its own too, and adds the same numbers in
rank order, in float32, with the same instructions; the sum is rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from distdec.ops.fetch_triton import fetch_of, fetch_share
from distdec.ops.launch_triton import Launch, Plans
from distdec.ops.slab_triton import (
    MAX_REGISTERS,
    NUM_WARPS,
    Slab,
    channel_area,
    channel_flags,
    raise_flags,
    wait_for_all,
)

BLOCK_BYTES = 2048
"""Bytes that a program pushes at once: 16, the widest access, for each of its 128 threads. A row of 4,096 bfloat16
numbers makes four programs, which cost what one does: the time is that of a flag across the link."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What is summed."""


def fits(slab: Slab, numel: int, dtype: torch.dtype) -> bool:
    """Tell whether one launch takes a tensor of this size.

    Example: 528 channels of 2,048 bytes take 528 x 1,024 numbers of two bytes.
    """
    return dtype in DTYPES and _num_blocks(numel, dtype) <= slab.channels * (slab.capacity // BLOCK_BYTES)


def _num_blocks(numel: int, dtype: torch.dtype) -> int:
    return -(-numel * dtype.itemsize // BLOCK_BYTES)


@triton.jit
def elements(address, like):
    """Return an address of a slab as a pointer to what `like` points to."""
    # slabs, channels and blocks begin at multiples of 16, which the compiler cannot see in an address that was loaded:
    # without the hint every thread moves one number at a time
    return tl.multiple_of(address.to(like.dtype), 16)


# every rank must run the very same instructions, so what differs between ranks is left unspecialised; the size, which
# does not, is, since accesses under a mask are wide only where its multiple is known
@triton.jit(do_not_specialize=["rank", "spin_limit", "num_pieces"])
def one_shot_sum_kernel(
    p_in,
    p_out,
    p_peers,
    p_state,
    p_next,
    numel,
    rank,
    spin_limit,
    num_pieces,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PUSH: tl.constexpr,
    MERGE: tl.constexpr,
    FETCHERS: tl.constexpr,
    BULK: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Push, wait and add; protocol in `slab_triton`. PUSH, MERGE: apart only where all ranks are simulated.

    The last FETCHERS programs ask for `num_pieces` pieces at `p_next` instead.
    """
    c = tl.program_id(0)
    programs = tl.num_programs(0) - FETCHERS
    # the outer one is decided when the kernel is compiled
    if FETCHERS > 0:  # noqa: SIM102
        if c >= programs:
            fetch_share(p_next, num_pieces, c - programs, FETCHERS, BULK, THREADS)
            return
    stride = programs * BLOCK
    epoch = tl.load(p_state + c) + 1
    failed = tl.load(p_state + CHANNELS)
    # early, so that the address is at hand when the flags are up
    mine = tl.load(p_peers + rank)
    o = tl.arange(0, BLOCK)
    area = channel_area(c, epoch, N, CAPACITY)
    flags = channel_flags(c, N, CHANNELS, CAPACITY)

    if PUSH:
        at = area + rank * CAPACITY
        # after a failure nothing is pushed any more, see the protocol
        live = failed == 0
        for start in range(c * BLOCK, numel, stride):
            m = start + o < numel
            b_in = tl.load(p_in + start + o, mask=m)
            for k in tl.static_range(N):
                # every rank begins with another peer, so that no link carries all at once
                slot = tl.load(p_peers + (rank + k) % N) + at
                tl.store(elements(slot, p_in) + o, b_in, mask=m & live)
            at += BLOCK_BYTES
        raise_flags(p_peers, flags, epoch, live, rank, N, BLOCK_N)

    if MERGE:
        lost = wait_for_all(p_peers, p_state, mine + flags, epoch, failed, spin_limit, rank, N, CHANNELS)
        at = mine + area
        for start in range(c * BLOCK, numel, stride):
            m = start + o < numel
            b_sum = tl.load(elements(at, p_in) + o, mask=m, volatile=True).to(tl.float32)
            for k in tl.static_range(1, N):
                b_sum += tl.load(elements(at + k * CAPACITY, p_in) + o, mask=m, volatile=True).to(tl.float32)
            b_sum = tl.where(lost != 0, float("nan"), b_sum)
            tl.store(p_out + start + o, b_sum.to(p_out.dtype.element_ty), mask=m)
            at += BLOCK_BYTES
        tl.store(p_state + c, epoch)


def one_shot_sum(
    slab: Slab,
    y: Tensor,
    out: Tensor,
    *,
    spin_limit: int,
    following: Tensor | None = None,
    push: bool = True,
    merge: bool = True,
    plans: Plans | None = None,
) -> None:
    """Launch the kernel: one launch, whatever the size.

    Args:
        slab: where to push, and this rank's state.
        spin_limit: polls of flags by one program before ranks count as lost.
        following: what is read next: its first bytes are fetched into the cache meanwhile, see `fetch_triton`.
        push, merge: both; apart only where all ranks are simulated in one process.
        plans: keeps the launch for the next call of this size.

    Shapes:
        y, out: the same shape, contiguous, a dtype of `DTYPES`, the same size and dtype on every rank

    Raises:
        ValueError: `fits` does not hold.

    Notes:
        In-place: writes out, the slabs. Collective: the ranks of the slab. Graph-safe. Host sync: none.
    """
    key = (one_shot_sum, slab[2:], y.numel(), y.dtype, spin_limit, push, merge)
    key = key if following is None else (*key, following.shape, following.dtype)
    plans = Plans() if plans is None else plans
    launch = plans.get(key)
    if launch is None:
        launch = plans.keep(key, _prepare(slab, y.numel(), y.dtype, spin_limit, following, push, merge))
    launch(y, out, slab.peers, slab.state, out if following is None else following)


def _prepare(
    slab: Slab,
    numel: int,
    dtype: torch.dtype,
    spin_limit: int,
    following: Tensor | None,
    push: bool,
    merge: bool,
) -> Launch:
    """Check that the tensor fits the slab and make the launch ready."""
    if not fits(slab, numel, dtype):
        raise ValueError(
            f"{numel} numbers of {dtype} do not fit the slab: {_num_blocks(numel, dtype)} blocks of {BLOCK_BYTES} "
            f"bytes, {slab.channels * (slab.capacity // BLOCK_BYTES)} at most, of {', '.join(map(str, DTYPES))}"
        )
    num_programs = min(_num_blocks(numel, dtype), slab.channels)
    fetch = fetch_of(following, slab, num_programs)
    return Launch(
        one_shot_sum_kernel,
        (num_programs + fetch.num_programs if num_programs else 0,),
        (numel, slab.rank, spin_limit, fetch.num_pieces),
        (
            slab.num_ranks,
            slab.channels,
            slab.capacity,
            BLOCK_BYTES // dtype.itemsize,
            BLOCK_BYTES,
            triton.next_power_of_2(slab.num_ranks),
            push,
            merge,
            *fetch.constants,
        ),
        num_warps=NUM_WARPS,
        maxnreg=MAX_REGISTERS,
    )

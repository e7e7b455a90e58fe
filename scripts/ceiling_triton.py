"""The read ceiling: a kernel that reads as many bytes as an attention call must, and does nothing else with them."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

# (int32 words a step and tensor, steps a program, warps); the fastest for a size is the ceiling of that size
CONFIGS = [(2048, 1, 4), (2048, 4, 4), (4096, 1, 4), (4096, 2, 8), (4096, 8, 8), (8192, 1, 8), (8192, 4, 8)]


@triton.jit
def read_kernel(p_a, p_b, p_sum, num_words, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    i = tl.program_id(0)
    o = i.to(tl.int64) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):
        at = o + step * BLOCK
        a = tl.load(p_a + at, mask=at < num_words, other=0)
        b = tl.load(p_b + at, mask=at < num_words, other=0)
        acc += a + b
    tl.store(p_sum + i, tl.sum(acc))


class Ceiling:
    """Reads `num_bytes` of the copies of two pools, half of each, and leaves one sum a program.

    Args:
        pools: pairs of tensors (keys, values), one pair a copy, each holding `num_bytes / 2` or more.
        num_bytes: bytes to read per call, a multiple of 8.
    """

    def __init__(self, pools: list[tuple[Tensor, Tensor]], num_bytes: int) -> None:
        self.num_words = num_bytes // 8
        self.words = [tuple(_words(x, self.num_words) for x in pair) for pair in pools]
        self.sums = torch.zeros(triton.cdiv(self.num_words, 2048), dtype=torch.int32, device=pools[0][0].device)

    def call(self, config: tuple[int, int, int]) -> Callable[[int], None]:
        """Return the call `f(copy)` with one launch configuration."""
        block, steps, warps = config
        grid = (triton.cdiv(self.num_words, block * steps),)

        def read(copy: int) -> None:
            a, b = self.words[copy % len(self.words)]
            read_kernel[grid](a, b, self.sums, self.num_words, BLOCK=block, STEPS=steps, num_warps=warps)

        return read

    def check(self, config: tuple[int, int, int]) -> None:
        """Raise AssertionError unless the kernel has read every word of copy 0 exactly once."""
        self.sums.zero_()
        self.call(config)(0)
        want = sum(int(x.sum(dtype=torch.int64)) for x in self.words[0]) % 2**32
        got = int(self.sums.sum(dtype=torch.int64)) % 2**32
        if got != want:
            raise AssertionError(f"read kernel {config} summed to {got}, torch to {want}")


def _words(x: Tensor, num_words: int) -> Tensor:
    flat = x.view(-1).view(torch.int32)
    if flat.numel() < num_words:
        raise ValueError(f"the pool holds {flat.numel()} words, {num_words} are to be read")
    return flat[:num_words]

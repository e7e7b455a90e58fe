"""Launch a kernel again without having Triton look at every argument again: 30 arguments cost it some 20 us a call."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Launcher:
    """Compiled kernels by what they were specialised on; one object for each backend object.

    Triton compiles a kernel for the dtypes of its pointers, whether they are aligned to 16 bytes, the values of its
    constants, and some properties of its integers. The key holds all of that, integers and floats by value.
    """

    def __init__(self) -> None:
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        tensors: Sequence[Tensor],
        numbers: tuple[int | float, ...],
        constants: tuple[int | bool, ...],
        **options: int | bool,
    ) -> None:
        """Launch `kernel[grid](*tensors, *numbers, *constants, **options)`."""
        seen = tuple((t.dtype, t.data_ptr() % 16 == 0) for t in tensors)
        key = (id(kernel), tensors[0].device, seen, numbers, constants, *options.items())
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[(grid[0], grid[1], 1)](*tensors, *numbers, *constants)
            return
        compiled = kernel[grid](*tensors, *numbers, *constants, **options)
        # the interpreter has nothing to keep
        if compiled is not None:
            self._compiled[key] = compiled


def launch(
    launcher: Launcher | None,
    kernel: Any,
    grid: tuple[int, int],
    tensors: Sequence[Tensor],
    numbers: tuple[int | float, ...],
    constants: tuple[int | bool, ...],
    **options: int | bool,
) -> None:
    """Launch through a launcher, or as Triton does where there is none."""
    if launcher is None:
        kernel[grid](*tensors, *numbers, *constants, **options)
    else:
        launcher(kernel, grid, tensors, numbers, constants, **options)

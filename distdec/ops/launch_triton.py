"""Prepare a launch once and repeat it: Triton looks at 30 arguments again in every call, for some 20 us of the host.

An op derives grid, constants and what it checks from shapes alone. It keeps the outcome under those shapes in the
`Plans` of its backend object, so that the other layers of a step, and later steps of the same shapes, only look it up.
"""

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from triton.runtime.jit import JITFunction

MAX_PLANS = 512
"""Shapes that are kept: a few dozen for each number of rows, so that a server that has seen more starts again."""


class Launch:
    """One kernel with everything bound that its tensors' addresses do not change.

    Triton compiles a kernel for the dtypes of its pointers, whether they are aligned to 16 bytes, the values of its
    constants, and some properties of its integers. All but the alignment is fixed here: whoever keeps a launch must
    use it for tensors of the same dtypes, on the same device, alone.

    Args:
        kernel: the Triton kernel; its tensor descriptors come first, its tensors next.
        grid: programs along each axis; nothing is launched where one is 0.
        numbers: integers and floats that follow the tensors.
        constants: the `constexpr` arguments, which come last.
        options: of the compiler, `num_warps` among them.
    """

    __slots__ = ("_again", "_constants", "_grid", "_kernel", "_numbers", "_options")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[int | float, ...],
        constants: tuple[Any, ...],
        **options: int | bool,
    ) -> None:
        self._kernel, self._grid, self._options = kernel, (*grid, 1, 1)[:3], options
        self._numbers, self._constants = numbers, constants
        self._again: dict[Any, Any] = {}

    def __call__(self, *tensors: Tensor, descriptors: tuple[Any, ...] = ()) -> None:
        """Launch `kernel[grid](*descriptors, *tensors, *numbers, *constants, **options)`.

        Args:
            descriptors: what the copy engine reads, or None in place of each; which of them are None must follow from
                the alignment of the tensors.

        Notes:
            From the second launch on, addresses alone are handed over: nothing looks whether they are the device's.
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        joined = 0
        for address in addresses:
            joined |= address
        alignment = None if joined & 15 == 0 else tuple([address & 15 == 0 for address in addresses])
        again = self._again.get(alignment)
        if again is not None:
            again(*descriptors, *addresses, *self._numbers, *self._constants)
        elif 0 not in self._grid:
            compiled = self._kernel[self._grid](
                *descriptors, *tensors, *self._numbers, *self._constants, **self._options
            )
            # the interpreter has nothing to keep
            if compiled is not None:
                self._again[alignment] = compiled[self._grid]


def needs_gpu(kernel: Any) -> bool:
    """Tell whether a kernel will be compiled; with TRITON_INTERPRET=1 it is interpreted instead."""
    return isinstance(kernel, JITFunction)


class Plans(dict[Hashable, Any]):
    """What ops have prepared, by the shapes that it was derived from; one object for each backend object."""

    def keep(self, key: Hashable, plan: Any) -> Any:
        """Keep a plan and return it."""
        if len(self) >= MAX_PLANS:
            self.clear()
        self[key] = plan
        return plan

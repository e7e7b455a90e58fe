"""Launching a compiled kernel again."""

import pytest
import torch

from distdec.ops.launch_triton import Launcher


class Compiled:
    """What a launch returns on a device: takes all arguments, constants too, and a grid of three."""

    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        assert len(grid) == 3
        return lambda *args: self.calls.append(("again", grid, args))


class Kernel:
    """Stands in for a kernel."""

    def __init__(self, compiled=True):
        self.calls, self.compiled = [], compiled

    def __getitem__(self, grid):
        def first(*args, **options):
            self.calls.append(("first", grid, args, options))
            return Compiled(self.calls) if self.compiled else None

        return first


def test_the_same_specialisation_is_launched_through_its_compiled_kernel():
    kernel, launcher, memory = Kernel(), Launcher(), torch.zeros(64)
    launcher(kernel, (5, 2), (memory,), (0.5, 3), (8, True), num_warps=4)
    other = torch.ones(8)
    launcher(kernel, (7, 2), (other,), (0.5, 3), (8, True), num_warps=4)
    assert kernel.calls == [
        ("first", (5, 2), (memory, 0.5, 3, 8, True), {"num_warps": 4}),
        ("again", (7, 2, 1), (other, 0.5, 3, 8, True)),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": (torch.zeros(64)[1:],)},
        {"tensors": (torch.zeros(64, dtype=torch.float16),)},
        {"numbers": (0.5, 16)},
        {"constants": (9, True)},
        {"num_warps": 8},
        {"launch_pdl": True},
        {"kernel": True},
    ],
    ids=str,
)
def test_another_specialisation_is_not(change):
    kernel, launcher = Kernel(), Launcher()
    call = {"grid": (1, 1), "tensors": (torch.zeros(64),), "numbers": (0.5, 3), "constants": (8, True), "num_warps": 4}
    launcher(kernel, **call)
    second = Kernel() if change.pop("kernel", False) else kernel
    launcher(second, **{**call, **change})
    assert [c[0] for c in kernel.calls + (second.calls if second is not kernel else [])] == ["first", "first"]


def test_the_interpreter_leaves_nothing_to_launch_again():
    kernel, launcher = Kernel(compiled=False), Launcher()
    for _ in range(2):
        launcher(kernel, (1, 1), (torch.zeros(4),), (), ())
    assert [c[0] for c in kernel.calls] == ["first", "first"]

"""Launching a prepared kernel again, and what ops prepare."""

import pytest
import torch

from distdec.ops import combine_triton, decode_triton, launch_triton, store_kv_triton
from distdec.ops.backends import get_backend
from distdec.ops.launch_triton import Launch, Plans
from distdec.ops.tables import KVTables


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


def test_a_second_launch_goes_through_the_compiled_kernel_with_addresses():
    kernel = Kernel()
    launch, memory, other = Launch(kernel, (5, 2), (0.5, 3), (8, True), num_warps=4), torch.zeros(64), torch.ones(8)
    launch(memory)
    launch(other)
    assert kernel.calls == [
        ("first", (5, 2, 1), (memory, 0.5, 3, 8, True), {"num_warps": 4}),
        ("again", (5, 2, 1), (other.data_ptr(), 0.5, 3, 8, True)),
    ]


def test_memory_of_another_alignment_is_another_specialisation():
    kernel, memory = Kernel(), torch.zeros(64)
    launch = Launch(kernel, (1,), (), ())
    for pair in ((memory, memory), (memory[1:], memory), (memory, memory[1:]), (memory[1:], memory)):
        launch(*pair)
    assert [call[0] for call in kernel.calls] == ["first", "first", "first", "again"]
    # what was compiled for the one misalignment is what runs again
    assert kernel.calls[3][2] == (memory[1:].data_ptr(), memory.data_ptr())


def test_an_empty_grid_launches_nothing():
    kernel = Kernel()
    Launch(kernel, (0, 3), (), ())(torch.zeros(4))
    assert not kernel.calls


def test_the_interpreter_leaves_nothing_to_launch_again():
    kernel = Kernel(compiled=False)
    launch = Launch(kernel, (1, 1), (), ())
    for _ in range(2):
        launch(torch.zeros(4))
    assert [c[0] for c in kernel.calls] == ["first", "first"]


def test_plans_do_not_pile_up():
    plans = Plans()
    for key in range(3 * launch_triton.MAX_PLANS):
        assert plans.keep(key, -key) == -key
        assert plans[key] == -key
    assert len(plans) <= launch_triton.MAX_PLANS


KERNELS = ((store_kv_triton, "store_kv_kernel"), (decode_triton, "decode_kernel"), (combine_triton, "combine_kernel"))


class Step:
    """The local ops of a decode step of two rows on a backend object whose kernels are stand-ins."""

    def __init__(self, monkeypatch, dtype=torch.float16):
        self.kernels = []
        for module, name in KERNELS:
            self.kernels.append(Kernel())
            monkeypatch.setattr(module, name, self.kernels[-1])
        self.ops, self.checks = get_backend("triton", "cpu"), []
        for module, name in ((store_kv_triton, "check_store"), (decode_triton, "check_decode")):
            check = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *args, c=check: (self.checks.append(c.__name__), c(*args)))
        self.dtype = dtype
        self.tables = self.made(2)

    def made(self, rows):
        numbers = [torch.zeros(shape, dtype=torch.int32) for shape in ((64, 4), (rows, 2), (rows + 1,))]
        return decode_triton.with_schedule(KVTables(*numbers), 2, 4)

    def run(self, rows=2, slots=torch.int64, **options):
        q = torch.zeros(rows, 4, 16, dtype=self.dtype)
        pool = torch.zeros(8, 2, 16, dtype=self.dtype)
        positions = torch.zeros(rows, dtype=torch.int32)
        self.ops.store_kv(q[:, :2], q[:, :2], torch.zeros(rows, dtype=slots), pool, pool)
        tables = self.tables if rows == 2 else self.made(rows)
        self.ops.decode(q, pool, pool, tables, positions, 1, **{"scale": 0.5, **options})

    def counts(self):
        """Per kernel: first launches, and launches again."""
        kinds = [[call[0] for call in kernel.calls] for kernel in self.kernels]
        return [(kind.count("first"), kind.count("again")) for kind in kinds]


def test_further_layers_of_a_step_check_nothing_and_launch_what_is_compiled(monkeypatch):
    step = Step(monkeypatch)
    for _ in range(3):
        step.run()
    assert step.checks == ["check_store", "check_decode"]
    assert step.counts() == [(1, 2)] * 3


@pytest.mark.parametrize(
    ("change", "stores", "decodes"),
    [
        ({"rows": 3}, 2, 2),
        ({"scale": 0.25}, 1, 2),
        ({"window": 5}, 1, 2),
        ({"softcap": 3.0}, 1, 2),
        ({"slots": torch.int32}, 2, 1),
    ],
    ids=str,
)
def test_other_shapes_types_and_numbers_are_prepared_anew(monkeypatch, change, stores, decodes):
    step = Step(monkeypatch)
    step.run()
    step.run(**change)
    assert [count[0] for count in step.counts()[:2]] == [stores, decodes]


def test_tensors_that_do_not_fit_are_refused_after_some_that_did(monkeypatch):
    step = Step(monkeypatch)
    step.run()
    pool, q = torch.zeros(8, 2, 16, dtype=step.dtype), torch.zeros(3, 4, 16, dtype=step.dtype)
    with pytest.raises(ValueError, match="one slot a token"):
        step.ops.store_kv(q[:, :2], q[:, :2], torch.zeros(2, dtype=torch.int64), pool, pool)
    with pytest.raises(ValueError, match="2 rows of 1 query tokens"):
        step.ops.decode(q, pool, pool, step.tables, torch.zeros(3, dtype=torch.int32), 1, scale=0.5)

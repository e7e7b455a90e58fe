"""Comparisons that look at the places of inf and NaN first, and tolerances that nothing can loosen."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from distdec.ops.partial import Partial

FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}


def same_specials(got: Tensor, want: Tensor) -> None:
    """Fail unless NaN, +inf and -inf stand in the same places."""
    got, want = got.detach().cpu(), want.detach().cpu()
    assert got.shape == want.shape
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = (test(got) != test(want)).nonzero()
        assert not len(wrong), f"{test.__name__} differs at {wrong[:5].tolist()} ({len(wrong)} places)"


def close(got: Tensor, want: Tensor) -> None:
    """Fail unless the values agree to float32's tolerance."""
    same_specials(got, want)
    torch.testing.assert_close(got.detach().cpu().double(), want.detach().cpu().double(), equal_nan=True, **FLOAT32)


def close_partial(got: Partial, want: Partial) -> None:
    """Fail unless both members agree to float32's tolerance and have the contract's types."""
    assert got.out.dtype == got.lse.dtype == torch.float32
    close(got.lse, want.lse)
    close(got.out, want.out)


def as_good_as_eager(got: Partial, want: Partial, eager: Partial) -> None:
    """Fail unless the largest error is at most twice that of eager attention in the same dtype."""
    assert got.out.dtype == got.lse.dtype == torch.float32
    for name in ("lse", "out"):
        value, true, peer = (getattr(p, name).detach().cpu().double() for p in (got, want, eager))
        same_specials(value, true)
        finite = torch.isfinite(true)
        error = (value - true)[finite].abs().max().item()
        allowed = 2 * (peer - true)[finite].abs().max().item()
        assert error <= max(allowed, FLOAT32["atol"]), f"{name}: error {error:.2e}, eager allows {allowed:.2e}"


@contextlib.contextmanager
def nan_filled_empty() -> Iterator[None]:
    """Make `torch.empty` return NaN, so that an output nobody writes is seen."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        yield

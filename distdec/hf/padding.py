"""Pads on the left of a batch: from a mask over columns to each row's number of new tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def new_tokens(mask: Tensor | None, cached: Sequence[int], past: int, new: int) -> list[int]:
    """Count each row's real tokens among the new columns.

    Args:
        mask: [B, past + new], nonzero where a token is real; None: all are.
        cached: tokens stored of each row.
        past, new: columns before this forward and in it.

    Raises:
        ValueError: a row that is not pads followed by tokens, columns left out, or a mask that contradicts the cache.

    Notes:
        Host sync: one, if there is a mask.

    Example: past 0, new 4, mask [[1, 1, 1, 1], [0, 0, 1, 1]] -> [4, 2]; then past 4, new 1, a 1 appended -> [1, 1].
    """
    num_rows, width = len(cached), past + new
    if mask is None:
        if any(length != past for length in cached):
            raise ValueError("earlier forwards had pads (attention_mask); hand the mask on, it must cover all columns")
        return [new] * num_rows
    if tuple(mask.shape) != (num_rows, width):
        raise ValueError(
            f"attention_mask must be [{num_rows}, {width}]: {past} cached and {new} new columns, got "
            f"{list(mask.shape)}; leave use_cache on, and hand on the mask of the cached columns too"
        )
    real = mask != 0
    totals = real.sum(-1)
    start = width - totals
    fits = (real == (torch.arange(width, device=mask.device) >= start[:, None])).all(-1)
    counts = []
    for row, (total, good) in enumerate(torch.stack([totals, fits.to(totals.dtype)]).T.tolist()):
        count = total - cached[row]
        if not good:
            raise ValueError(
                f"attention_mask of row {row} is not pads followed by tokens (0*1*); pad on the left, and do not pad "
                "between two calls that share a cache"
            )
        if count > new or count < 0 or (cached[row] and count != new):
            raise ValueError(
                f"attention_mask of row {row} has {total} tokens in {width} columns, but the cache holds {cached[row]} "
                f"of the first {past}: the mask contradicts an earlier one"
            )
        counts.append(count)
    return counts

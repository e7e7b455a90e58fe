"""What a merge is, and the arithmetic of every mode; no rank talks to another one in this file.

With the partial (o_r, l_r) of rank r, m = max_r l_r and w_r = exp(l_r - m):

    out = sum_r w_r o_r / sum_r w_r        lse = m + ln(sum_r w_r)

Each mode is written once, as a generator that yields the collectives it needs and is sent their results:

    top = yield "max", lse                 the largest over ranks
    total = yield "sum", packed            the sum over ranks
    rows = yield "gather", mine            [n] -> [R, n], rank order
    mine = yield "reduce_scatter", rows    [R, ...] -> [...], this rank's row of the sum
    rows = yield "all_to_all", rows        [R, n] -> [R, n], row r went to rank r and came from it

`merge_collective` answers over a mesh's kvp group; `merge.simulate` steps the generators of R partials in one
process.

Rules that every mode keeps: `out` of a row with `lse = -inf` is ignored, whatever it holds. NaN or +inf in a row that
has keys makes that token NaN, all its heads, on every rank, and touches no other token; a MAX over ranks may swallow a
NaN, so a flag is summed along (or the LSE travels as NaN where ranks see each other's). Sums run in rank order, the own
partial included as it was sent, so replicated results have the same bits on all ranks.

Kernels that finish a row themselves (all_gather and all_to_all on a GPU, `one_shot`, one rank alone) fail the row
(token, head), not the token's other heads: an output projection spreads it over the token anyway.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Generator
from typing import NamedTuple

import torch
from torch import Tensor

from distdec.merge_place import Place
from distdec.mesh import Mesh
from distdec.ops.packed import Packing
from distdec.ops.partial import Partial

# a scatter mode's columns come in multiples of this, so that an output projection's slice suits the matrix unit
COLUMN_MULTIPLE = 16
TRANSPORTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn}
_NEG_INF = float("-inf")


class Merged(NamedTuple):
    """Attention over all ranks' keys, or this rank's columns of it.

    Shapes:
        out: [T, stop - start] float32 or the dtype asked for: columns of the flattened Hq x Dv
        lse: [T, Hq] float32, natural log over all ranks' keys and the sinks; every head on every rank
        columns: (start, stop)
    """

    out: Tensor
    lse: Tensor
    columns: tuple[int, int]


def padded_columns(num_columns: int, num_ranks: int) -> int:
    """Columns a rank receives in a scatter mode, padding included: 360 over 8 ranks is 45 each, padded to 48."""
    return -(-num_columns // (num_ranks * COLUMN_MULTIPLE)) * COLUMN_MULTIPLE


def column_range(num_columns: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Return the (start, stop) of a rank's true columns in a scatter mode; empty on the last ranks of narrow models.

    Example: 360 columns over 8 ranks: rank 0 (0, 48), rank 6 (288, 336), rank 7 (336, 360).
    """
    width = padded_columns(num_columns, num_ranks)
    return min(rank * width, num_columns), min((rank + 1) * width, num_columns)


def mask_by_length(partial: Partial, local_len: Tensor) -> Partial:
    """Write the legal empty row where this rank holds no key: for foreign kernels that leave garbage there.

    Shapes:
        local_len: [T] integers, number of keys that token t sees on this rank
    """
    empty = (local_len <= 0).unsqueeze(-1)
    return Partial(partial.out.masked_fill(empty.unsqueeze(-1), 0.0), partial.lse.masked_fill(empty, _NEG_INF))


Program = Generator[tuple[str, Tensor], Tensor, Merged]


def _clean(partial: Partial) -> tuple[Tensor, Tensor, Tensor]:
    """Return out and lse, (0, -inf) where there is nothing to add, and the tokens [T] bool that fail."""
    out, lse = partial.out.float(), partial.lse
    finite = torch.isfinite(lse) & torch.isfinite(out).all(-1)
    failed = ~(finite | (lse == _NEG_INF)).all(-1)
    keep = finite & ~failed.unsqueeze(-1)
    return torch.where(keep.unsqueeze(-1), out, 0.0), torch.where(keep, lse, _NEG_INF), failed


def _marked(partial: Partial) -> tuple[Tensor, Tensor]:
    """Return clean (out, lse) with lse NaN for tokens that fail, for modes whose ranks see each other's LSE."""
    out, lse, failed = _clean(partial)
    return out, lse.masked_fill(failed.unsqueeze(-1), float("nan"))


def _finite(top: Tensor) -> Tensor:
    """Replace -inf by 0: a row without any key must not compute -inf - -inf."""
    return top.masked_fill(top == _NEG_INF, 0.0)


def _nonzero(denominator: Tensor) -> Tensor:
    """Replace 0 by 1: a row without any key divides its zeros by one."""
    return denominator.masked_fill(denominator == 0, 1.0)


def _fold(parts: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum [R, ...] over its first dimension in rank order, whatever the shape of the rest."""
    total = None
    for r in range(parts.shape[0]):
        part = parts[r].float() if weights is None else parts[r].float() * weights[r]
        total = part if total is None else total + part
    return total


def _weights(lses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From every rank's lse [R, T, Hq]: weights [R, T, Hq], their sum (1 where no rank has a key), the global lse."""
    top = lses.amax(0)
    weights = torch.exp(lses - _finite(top))
    denominator = _fold(weights)
    return weights, _nonzero(denominator), top + torch.log(denominator)


def _all_reduce(partial: Partial, place: Place) -> Program:
    """MAX of lse, then one SUM of [numerator | denominator | flag]: two collectives, replicated.

    In bfloat16 the LSEs are gathered instead of maximised, and only `w_r o_r / sum w` is summed in bfloat16.
    """
    num_tokens, num_heads, head_dim = partial.out.shape
    num_columns = num_heads * head_dim
    device = partial.out.device
    if place.wire != torch.float32:
        weighted, lse = yield from _weighted(partial, place)
        mine = place.buffer("sum", weighted.shape, place.wire, device)
        total = yield "sum", mine.copy_(weighted)
        return Merged(total.float().flatten(1), lse, (0, num_columns))
    out, lse, failed = _clean(partial)
    top = yield "max", place.buffer("max", lse.shape, torch.float32, device).copy_(lse)
    weight = torch.exp(lse - _finite(top))
    packed = place.buffer("sum", (num_tokens, num_columns + num_heads + 1), torch.float32, device)
    packed[:, :num_columns].unflatten(1, (num_heads, head_dim)).copy_(out * weight.unsqueeze(-1))
    packed[:, num_columns:-1] = weight
    packed[:, -1] = failed
    total = yield "sum", packed
    denominator, flag = total[:, num_columns:-1], total[:, -1:] > 0
    out = total[:, :num_columns].unflatten(1, (num_heads, head_dim)) / _nonzero(denominator).unsqueeze(-1)
    lse = top + torch.log(denominator)
    nan = float("nan")
    return Merged(out.flatten(1).masked_fill(flag, nan), lse.masked_fill(flag, nan), (0, num_columns))


def _weighted(partial: Partial, place: Place) -> Generator[tuple[str, Tensor], Tensor, tuple[Tensor, Tensor]]:
    """Gather all LSEs; return this rank's share of the merged out [T, Hq, Dv] and the merged lse."""
    out, lse = _marked(partial)
    lses = yield "gather", place.buffer("lse", (lse.numel(),), torch.float32, lse.device).copy_(lse.flatten())
    weights, denominator, merged_lse = _weights(lses.unflatten(1, tuple(lse.shape)))
    return out * (weights[place.rank] / denominator).unsqueeze(-1), merged_lse


def _by_columns(rows: Tensor, out: Tensor) -> None:
    """Copy out [T, Hq, Dv] into rows [R, T, width], rank r's columns in row r, zeros in the padding."""
    columns = out.flatten(1)
    num_columns, (num_ranks, num_tokens, width) = columns.shape[1], rows.shape
    if num_columns == num_ranks * width:
        rows.copy_(columns.view(num_tokens, num_ranks, width).transpose(0, 1))
        return
    for rank in range(num_ranks):
        start, stop = column_range(num_columns, num_ranks, rank)
        rows[rank, :, : stop - start] = columns[:, start:stop]
        # never read again, but a NaN check on what is sent must not stumble over it
        rows[rank, :, stop - start :] = 0.0


def _reduce_scatter(partial: Partial, place: Place) -> Program:
    """Gather all LSEs, then reduce-scatter the weighted out by columns: two collectives."""
    weighted, lse = yield from _weighted(partial, place)
    num_tokens, num_columns = weighted.flatten(1).shape
    width = padded_columns(num_columns, place.size)
    rows = place.buffer("rows", (place.size, num_tokens, width), place.wire, weighted.device)
    _by_columns(rows, weighted)
    mine = yield "reduce_scatter", rows
    start, stop = column_range(num_columns, place.size, place.rank)
    return Merged(mine[:, : stop - start].float(), lse, (start, stop))


def _exchange(
    kind: str, partial: Partial, place: Place, sinks: Tensor | None, out_dtype: torch.dtype | None
) -> Program:
    """One collective of packed partials, folded by every receiver in rank order, sinks included."""
    # the reference fails whole tokens, the kernels rows of them
    out, lse = partial if place.ops.kernels else _marked(partial)
    num_tokens, num_heads, head_dim = out.shape
    width = num_heads * head_dim
    columns, num_messages = (0, width), 1
    if kind == "all_to_all":
        columns = column_range(width, place.size, place.rank)
        width, num_messages = padded_columns(width, place.size), place.size
    packing = Packing(num_tokens, num_heads, head_dim, width, place.wire)
    sent = place.buffer("sent", (num_messages, packing.num_bytes), torch.uint8, out.device)
    place.ops.pack(out, lse, sent, packing)
    rows = yield kind, (sent if kind == "all_to_all" else sent[0])
    lses, scales, outs = packing.parts(rows)
    merged = torch.empty((num_tokens, columns[1] - columns[0]), dtype=out_dtype or torch.float32, device=out.device)
    merged_lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=out.device)
    how = {"sinks": sinks, "scales": scales, "head_dim": head_dim, "first_column": columns[0]}
    place.ops.fold_ranks(outs, lses, out=merged, lse=merged_lse, **how)
    return Merged(merged, merged_lse, columns)


def _all_gather(
    partial: Partial, place: Place, sinks: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Program:
    """One collective of packed partials, combined on every rank in rank order: replicated, R partials received."""
    return (yield from _exchange("gather", partial, place, sinks, out_dtype))


def _all_to_all(
    partial: Partial, place: Place, sinks: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Program:
    """One collective: rank r is sent its columns of this rank's out, and all of this rank's LSEs."""
    return (yield from _exchange("all_to_all", partial, place, sinks, out_dtype))


def _alone(partial: Partial, place: Place) -> Program:
    """Apply the same rules to one rank's partial; no collective."""
    out, lse = _marked(partial)
    yield from ()
    out = out.masked_fill(lse.isnan().unsqueeze(-1), float("nan"))
    return Merged(out.flatten(1), lse, (0, out.shape[1] * out.shape[2]))


def _finished(program: Callable[[Partial, Place], Program]) -> Callable[..., Program]:
    """Add the sinks and the cast to a program that leaves them out."""

    def run(
        partial: Partial, place: Place, sinks: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Program:
        merged = yield from program(partial, place)
        return _finish(merged, partial, place, sinks, out_dtype)

    return run


alone = _finished(_alone)


class Mode(NamedTuple):
    """What a mode is: its output form and its program, which is its simulated reference too.

    A program takes a partial, a place, the sinks and the dtype of the output.
    """

    replicated: bool
    program: Callable[..., Program]

    @property
    def reduces(self) -> bool:
        """Tell whether sums of several ranks travel, which 8 bits with the scale of one rank's row cannot hold."""
        return self.program not in (_all_gather, _all_to_all)


# a mode with a kernel of its own names the program whose results it reproduces
MODES = {
    "all_reduce": Mode(True, _finished(_all_reduce)),
    "all_gather": Mode(True, _all_gather),
    "reduce_scatter": Mode(False, _finished(_reduce_scatter)),
    "all_to_all": Mode(False, _all_to_all),
    "one_shot": Mode(True, _all_gather),
    "one_shot_scatter": Mode(False, _all_to_all),
}


def check_transport(mode: str, transport: str) -> None:
    """Refuse a transport that does not exist or that a mode, "auto" among them, does not take."""
    if transport not in TRANSPORTS:
        raise ValueError(f"unknown merge transport {transport!r}; legal: {', '.join(TRANSPORTS)}")
    if TRANSPORTS[transport].itemsize == 1 and mode != "auto" and MODES[mode].reduces:
        legal = [name for name in MODES if not MODES[name].reduces]
        raise ValueError(f"merge transport {transport} goes with {', '.join(legal)} or auto, not with {mode}")


def check_partial(partial: Partial, sinks: Tensor | None = None) -> None:
    """Refuse what is not a partial, or sinks that do not fit it, before any rank enters a collective."""
    out, lse = partial
    if out.dim() != 3 or lse.shape != out.shape[:2] or not out.is_floating_point() or lse.dtype != torch.float32:
        raise ValueError(
            f"expected out [T, Hq, Dv] floating and lse [T, Hq] float32, got out {tuple(out.shape)} {out.dtype}, "
            f"lse {tuple(lse.shape)} {lse.dtype}"
        )
    if sinks is not None and sinks.shape != out.shape[1:2]:
        raise ValueError(f"expected sinks [{out.shape[1]}], one a query head, got {tuple(sinks.shape)}")


def _finish(
    merged: Merged, partial: Partial, place: Place, sinks: Tensor | None, out_dtype: torch.dtype | None
) -> Merged:
    """Add the sinks, once: each is one more term exp(sink) of the denominator. Then cast."""
    out, lse, columns = merged
    if sinks is not None:
        sinks = sinks.float()
        # out x exp(lse) / (exp(lse) + exp(sink)); rows without a key stay (0, -inf), also beside a sink of -inf
        empty = lse == _NEG_INF
        share = torch.sigmoid(lse - sinks).masked_fill(empty, 0.0)
        lse = torch.logaddexp(lse, sinks).masked_fill(empty, _NEG_INF)
        out = out * share[:, place.heads_of(columns, partial.out.shape[2], out.device)]
    return Merged(out.to(out_dtype or torch.float32), lse, columns)


class Merge(abc.ABC):
    """A merge over the kvp axis of a mesh, as `merge.make_merge` builds it.

    Attributes:
        mesh: whose kvp axis it runs over.
        mode: name of the mode; fixed, the same on all ranks.
        reason: why this mode, for the start-up log.
        replicated: every rank gets all columns; else its own (`column_range`).
        calls: collectives entered so far; equal on all ranks at every step.
    """

    mesh: Mesh
    mode: str
    reason: str
    replicated: bool
    calls: int

    @abc.abstractmethod
    def __call__(
        self, partial: Partial, *, sinks: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Merged:
        """Merge this rank's partial with those of its kvp group.

        Args:
            partial: this rank's; the shapes are the same on all ranks of the group.
            sinks: one logit a query head that joins the softmax without a value; counted once, after the merge.
            out_dtype: dtype of the returned out; default float32.

        Shapes:
            partial: out [T, Hq, Dv] floating, lse [T, Hq] float32, natural log; a row without a key has lse = -inf
            sinks: [Hq] floating
            returns `Merged`; a token that no rank has a key for is out 0, lse -inf, with sinks too

        Raises:
            ValueError: the shapes do not fit each other, or the lse is not float32.

        Notes:
            Collective: the kvp axis; every rank enters in every step, with or without tokens. Graph-safe: after one
            eager call of the largest shape. Host sync: none.
        """

    def check_replicated(self, merged: Merged) -> None:
        """Debug aid: compare hashes of what must have the same bits on all ranks of each kvp group.

        Raises:
            RuntimeError: on every rank of the mesh, naming the ranks that differ.

        Notes:
            Collective: the whole mesh (gloo). Host sync: copies the result to the host.
        """
        digest = hashlib.sha256()
        for tensor in (merged.out, merged.lse) if self.replicated else (merged.lse,):
            digest.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
        self.mesh.check_same("merged output", digest.digest(), "kvp")

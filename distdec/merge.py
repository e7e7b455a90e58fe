"""Join the partials of all kvp ranks into attention over the whole sequence: the modes of `merge_modes` on real ranks.

`make_merge` builds the merge of a mesh; `simulate` runs the same programs for R partials in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from distdec.merge_choice import choose_mode
from distdec.merge_collective import CollectiveMerge, advance
from distdec.merge_measure import FURTHER_TOKENS, Timer, choose, graph_timer, measure
from distdec.merge_modes import (
    MODES,
    TRANSPORTS,
    Merge,
    Merged,
    Place,
    alone,
    check_partial,
    column_range,
    mask_by_length,
    padded_columns,
)
from distdec.mesh import Mesh
from distdec.one_shot import OneShotMerge, why_not
from distdec.ops.partial import Partial

__all__ = [
    "MODES",
    "CollectiveMerge",
    "Merge",
    "Merged",
    "column_range",
    "make_merge",
    "mask_by_length",
    "padded_columns",
    "simulate",
]


def _build_one_shot(mode: str, mesh: Mesh, wire: torch.dtype, reason: str) -> Merge:
    if mesh.kvp_size == 1:
        return CollectiveMerge(mode, mesh, wire, reason)
    transport = next(name for name, dtype in TRANSPORTS.items() if dtype == wire)
    merge = OneShotMerge(mesh, scatter=not MODES[mode].replicated, transport=transport)
    merge.reason = reason
    return merge


# modes that do not run their program over `torch.distributed` but have a builder of their own
BUILDERS: dict[str, Callable[[str, Mesh, torch.dtype, str], Merge]] = {
    "one_shot": _build_one_shot,
    "one_shot_scatter": _build_one_shot,
}


def make_merge(
    mode: str,
    mesh: Mesh,
    *,
    transport: str = "float32",
    replicated: bool = True,
    num_tokens: int = 8,
    num_heads: int = 32,
    head_dim: int = 128,
    timer: Timer | None = None,
) -> Merge:
    """Build the merge of a mesh's kvp axis.

    Args:
        mode: a name in `MODES`, or "auto": on GPUs the fastest of the output form at the typical step, measured here
            and now (some ms a mode), then fixed; its table is the merge's `reason`. On CPUs the estimate of
            `choose_mode` instead: a collective of gloo takes 0.3 to 7 ms on ranks that share cores, whatever its few
            KiB, so that a short measurement would choose by chance, and another mode in the next run.
        mesh: all its ranks must call this together.
        transport: dtype of `out` between ranks. "bfloat16" halves the bytes; LSEs still travel as float32. Each rank's
            contribution is rounded once, so `out` is off by at most 2^-8 of the largest |out| any rank sends; in the
            modes that reduce (all_reduce, reduce_scatter) the running sum is rounded at each of R - 1 steps too, so by
            at most R x 2^-8 of it.
        replicated, num_tokens, num_heads, head_dim: for "auto": the output form, and the typical step. Rank 0's count.
        timer: for "auto": measures with this instead.

    Raises:
        ValueError: unknown mode or transport, with the legal ones.
        RuntimeError: the ranks ask for different merges, or for `one_shot` where it is not possible; the message says
            why. "auto" chooses among the others then.

    Notes:
        Collective: the whole mesh (host integers over gloo; `one_shot` maps its slabs too, and "auto" merges).
    """
    if mode not in (*MODES, "auto"):
        raise ValueError(f"unknown merge mode {mode!r}; legal: {', '.join((*MODES, 'auto'))}")
    if transport not in TRANSPORTS:
        raise ValueError(f"unknown merge transport {transport!r}; legal: {', '.join(TRANSPORTS)}")
    mesh.check_same("merge", f"{mode} {transport} {replicated}".encode())
    reason = f"{mode}: asked for"
    if mode == "auto":
        # rank 0's sizes count: ranks that chose for themselves could end in different collectives
        sizes = [int(replicated), num_tokens, num_heads, head_dim, mesh.kvp_size]
        agreed = mesh.agree(sizes if mesh.is_leader else None)
        return _build_auto(mesh, TRANSPORTS[transport], agreed, timer)
    return BUILDERS.get(mode, CollectiveMerge)(mode, mesh, TRANSPORTS[transport], reason)


def _attempt(mode: str, mesh: Mesh, wire: torch.dtype) -> Merge | RuntimeError:
    """Build a mode, or return why it is not possible: the same on all ranks."""
    try:
        return BUILDERS.get(mode, CollectiveMerge)(mode, mesh, wire, "")
    except RuntimeError as error:
        return error


def _build_auto(mesh: Mesh, wire: torch.dtype, sizes: list[int], timer: Timer | None) -> Merge:
    """Build the fastest mode that works here; whatever fails does so on all ranks or is agreed on."""
    replicated, num_tokens, num_heads, head_dim, num_ranks = sizes
    if timer is None and mesh.device.type == "cuda":
        timer = graph_timer
    if timer is None or num_ranks == 1:
        mode, reason = choose_mode(bool(replicated), *sizes[1:], mesh.device.type)
        return CollectiveMerge(mode, mesh, wire, f"{reason}; not one_shot: {why_not(mesh)}")
    modes = sorted(name for name in MODES if MODES[name].replicated == bool(replicated))
    built = {mode: _attempt(mode, mesh, wire) for mode in modes}
    merges = {mode: merge for mode, merge in built.items() if isinstance(merge, Merge)}
    refused = "".join(f"; not {mode}: {built[mode]}" for mode in modes if mode not in merges)
    counts = sorted({num_tokens, *FURTHER_TOKENS})
    table = measure(merges, counts, num_heads, head_dim, mesh, timer)
    chosen = choose(table, counts, num_tokens, f"of {num_heads} heads x {head_dim} over {num_ranks} ranks")
    if chosen is None:
        chosen = choose_mode(bool(replicated), *sizes[1:], mesh.device.type)
        refused += "".join(f"; {mode} {told}" for mode, told in table.items())
    for mode, merge in merges.items():
        if mode != chosen.mode and isinstance(merge, OneShotMerge):
            merge.close()
    merges[chosen.mode].reason = chosen.reason + refused
    return merges[chosen.mode]


def simulate(
    mode: str,
    partials: Sequence[Partial],
    *,
    transport: str = "float32",
    sinks: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> list[Merged]:
    """Merge R partials in one process with the programs that real ranks run; one result per simulated rank.

    Bits equal those of real ranks in all_gather and all_to_all; where a library reduces, its order may differ.
    """
    for partial in partials:
        check_partial(partial, sinks)
    size = len(partials)
    program = MODES[mode].program if size > 1 else alone
    places = [Place(rank, size, TRANSPORTS[transport]) for rank in range(size)]
    ranks = [program(partial, place, sinks, out_dtype) for partial, place in zip(partials, places, strict=True)]
    answers = [None] * size
    while True:
        asked, results = zip(*map(advance, ranks, answers), strict=True)
        if None in asked:
            assert None not in results, "ranks must enter the same number of collectives"
            return list(results)
        kind, first = asked[0]
        assert all(k == kind and t.shape == first.shape for k, t in asked), "ranks must enter the same collective"
        answers = _simulated(kind, torch.stack([tensor for _, tensor in asked]))


def _simulated(kind: str, rows: Tensor) -> list[Tensor]:
    """Answer a collective for all ranks at once; `rows` [R, ...] has each rank's tensor."""
    size = len(rows)
    if kind == "all_to_all":
        return list(rows.transpose(0, 1))
    if kind == "gather":
        return [rows] * size
    if kind == "max":
        return [rows.amax(0)] * size
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return [total] * size if kind == "sum" else list(total)

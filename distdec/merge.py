"""Join the partials of all kvp ranks into attention over the whole sequence: the modes of `merge_modes` on real ranks.

`make_merge` builds the merge of a mesh; `simulate` runs the same programs for R partials in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial as bind

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
    alone,
    check_partial,
    check_transport,
    column_range,
    mask_by_length,
    padded_columns,
)
from distdec.merge_place import Place
from distdec.mesh import Mesh
from distdec.one_shot import OneShotMerge
from distdec.ops.partial import Partial
from distdec.slabs import NotPossible, Peers, why_not

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
    merge = OneShotMerge(mesh, scatter=not MODES[mode].replicated, transport=_name(wire))
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
        transport: dtype of `out` between ranks; LSEs travel as float32 always. "bfloat16" halves the bytes,
            "float8_e4m3" quarters them, with a float32 scale for each row (token, head), in the modes that sum nothing
            on the way. Each rank's contribution is rounded once, so `out` is off by at most 2^-8 or 2^-4 of the largest
            |out| any rank sends; in the modes that reduce (all_reduce, reduce_scatter) the running sum is rounded at
            each of R - 1 steps too, so by at most R x 2^-8 of it. The merge's `reason` ends with the error of a sample.
        replicated, num_tokens, num_heads, head_dim: for "auto": the output form, and the typical step. Rank 0's count.
        timer: for "auto": measures with this instead.

    Raises:
        ValueError: unknown mode or transport, or a transport that the mode does not take, with the legal ones.
        RuntimeError: the ranks ask for different merges, or for `one_shot` where it is not possible; the message says
            why. "auto" chooses among the others then. Or GPUs that have no 8-bit numbers.

    Notes:
        Collective: the whole mesh (host integers over gloo; `one_shot` maps its slabs too, and "auto" merges).
    """
    if mode not in (*MODES, "auto"):
        raise ValueError(f"unknown merge mode {mode!r}; legal: {', '.join((*MODES, 'auto'))}")
    check_transport(mode, transport)
    mesh.check_same("merge", f"{mode} {transport} {replicated}".encode())
    wire = TRANSPORTS[transport]
    if wire.itemsize == 1:
        _check_float8(mesh)
    if mode == "auto":
        # rank 0's sizes count: ranks that chose for themselves could end in different collectives
        sizes = [int(replicated), num_tokens, num_heads, head_dim, mesh.kvp_size]
        merge = _build_auto(mesh, wire, mesh.agree(sizes if mesh.is_leader else None), timer)
    else:
        merge = BUILDERS.get(mode, CollectiveMerge)(mode, mesh, wire, f"{mode}: asked for")
    if wire != torch.float32 and mesh.kvp_size > 1:
        error = transport_error(merge.mode, transport, mesh.kvp_size)
        merge.reason += f"; transport {transport}: out off by up to {error:.1e} of the largest |out| in a sample"
    return merge


def _name(wire: torch.dtype) -> str:
    return next(name for name, dtype in TRANSPORTS.items() if dtype == wire)


def has_8_bit_floats(device: torch.device) -> bool:
    """Tell whether the kernels can round to 8 bits on a device."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def _check_float8(mesh: Mesh) -> None:
    """Refuse 8-bit transport on all ranks where the hardware of one has no such numbers."""
    without = [rank for rank, row in enumerate(mesh.gather([has_8_bit_floats(mesh.device)])) if not row[0]]
    if without:
        raise RuntimeError(
            f"merge transport float8_e4m3 needs GPUs of compute capability 8.9 or more, not there on ranks {without}"
        )


def transport_error(mode: str, transport: str, num_ranks: int) -> float:
    """Return the largest error of a fixed sample's merged out, as a share of the largest |out| of all ranks.

    Example: 16 tokens of 8 heads of 64 normal numbers over 2 ranks in bfloat16: 0.0009.
    """
    generator = torch.Generator().manual_seed(0)
    partials = [
        Partial(torch.randn(16, 8, 64, generator=generator), torch.randn(16, 8, generator=generator))
        for _ in range(num_ranks)
    ]
    exact, rounded = (simulate(mode, partials, transport=name) for name in ("float32", transport))
    worst = max(float((a.out - b.out).abs().max()) for a, b in zip(exact, rounded, strict=True) if a.out.numel())
    return worst / max(float(partial.out.abs().max()) for partial in partials)


def _attempt(mode: str, mesh: Mesh, wire: torch.dtype) -> Merge | RuntimeError:
    """Build a mode, or return why it is not possible: the same on all ranks."""
    try:
        return BUILDERS.get(mode, CollectiveMerge)(mode, mesh, wire, "")
    except NotPossible as error:
        return error


def _build_auto(mesh: Mesh, wire: torch.dtype, sizes: list[int], timer: Timer | None) -> Merge:
    """Build the fastest mode that works here; whatever fails does so on all ranks or is agreed on."""
    replicated, num_tokens, num_heads, head_dim, num_ranks = sizes
    if timer is None and mesh.device.type == "cuda":
        timer = bind(graph_timer, device=mesh.device)
    estimate = bind(choose_mode, bool(replicated), *sizes[1:], mesh.device.type, reductions=wire.itemsize > 1)
    if timer is None or num_ranks == 1:
        mode, reason = estimate()
        return CollectiveMerge(mode, mesh, wire, f"{reason}; not one_shot: {why_not(Peers.kvp(mesh))}")
    form = [name for name in sorted(MODES) if MODES[name].replicated == bool(replicated)]
    modes = [name for name in form if wire.itemsize > 1 or not MODES[name].reduces]
    built = {mode: _attempt(mode, mesh, wire) for mode in modes}
    merges = {mode: merge for mode, merge in built.items() if isinstance(merge, Merge)}
    refused = "".join(f"; not {mode}: {built[mode]}" for mode in modes if mode not in merges)
    counts = sorted({num_tokens, *FURTHER_TOKENS})
    table = measure(merges, counts, num_heads, head_dim, mesh, timer)
    chosen = choose(table, counts, num_tokens, f"of {num_heads} heads x {head_dim} over {num_ranks} ranks")
    if chosen is None:
        chosen = estimate()
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

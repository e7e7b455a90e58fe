"""Choose the merge mode from sizes alone: pure arithmetic, so that a planner can ask without any rank running."""

from typing import NamedTuple

from distdec.config import DETERMINISTIC_MERGES

# mode -> (output replicated, collectives a call)
_MODES = {"all_gather": (True, 1), "all_reduce": (True, 2), "all_to_all": (False, 1), "reduce_scatter": (False, 2)}

# device type -> (us a collective, us a MiB received). cuda: NCCL 2.28 in CUDA graphs on two H200 over NVLink, 9 us up
# to 64 KiB and 38 us at 4 MiB. cpu: gloo on one host of two cores, 0.3 to 7 ms a collective whatever its few KiB.
_COSTS = {"cuda": (9.0, 7.0), "cpu": (1000.0, 1000.0)}


class Choice(NamedTuple):
    """A mode and the sentence that says why, for the start-up log."""

    mode: str
    reason: str


def received_bytes(mode: str, num_tokens: int, num_heads: int, head_dim: int, num_ranks: int) -> int:
    """Bytes that a rank receives in one merge with float32 transport (a ring reduces in 2 (R - 1) / R times the size).

    Example: 1 token, 32 heads of 128, 4 ranks: all_gather 3 x (4096 + 32) x 4 = 49,536 bytes.
    """
    peers, columns = num_ranks - 1, num_heads * head_dim
    lses = peers * num_heads
    elements = {
        "all_gather": peers * columns + lses,
        "all_reduce": 2 * peers * (columns + 2 * num_heads + 1) // num_ranks,
        "all_to_all": peers * columns // num_ranks + lses,
        "reduce_scatter": peers * columns // num_ranks + lses,
    }
    return 4 * num_tokens * elements[mode]


def choose_mode(
    replicated: bool,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    num_ranks: int,
    device_type: str,
    *,
    reductions: bool = True,
) -> Choice:
    """Return the cheapest mode of an output form: collectives x latency + bytes received / bandwidth.

    All-gather has half the collectives of all-reduce but grows with the ranks; all-to-all and reduce-scatter move the
    same bytes, all-to-all in one collective.

    Args:
        replicated: every rank needs all columns; else each takes its own columns.
        num_tokens: tokens of the typical step.
        num_heads, head_dim: query heads on this rank and the head size of the values.
        num_ranks: size of the kvp axis.
        device_type: "cuda" or "cpu".
        reductions: modes that sum on the way may be chosen; False where the transport does not allow it.
    """
    latency_us, us_per_mib = _COSTS[device_type]
    costs = {}
    for mode, (form, num_collectives) in _MODES.items():
        if form == replicated and (reductions or num_collectives == 1):
            moved = received_bytes(mode, num_tokens, num_heads, head_dim, num_ranks)
            costs[mode] = num_collectives * latency_us + us_per_mib * moved / 2**20
    best = min(costs, key=lambda mode: (costs[mode], mode))
    told = ", ".join(f"{mode} {costs[mode]:.0f} us" for mode in sorted(costs))
    form = "replicated" if replicated else "scattered"
    reason = (
        f"{best}: estimated {told} for {form} output of {num_tokens} tokens x {num_heads} heads x {head_dim} "
        f"over {num_ranks} ranks on {device_type}"
    )
    return Choice(best, reason)


def deterministic_mode(mode: str, replicated: bool = True) -> str:
    """Return the mode of a merge whose bits do not follow the size of a step: `mode`, or for "auto" the form's own.

    Libraries add in an order that may change with the size of a message, and `one_shot` joins splits in its kernel only
    in steps without prompts, and hands large ones to another mode.

    Raises:
        ValueError: a mode that is not like that.
    """
    gather, scatter = DETERMINISTIC_MERGES
    if mode == "auto":
        return gather if replicated else scatter
    if mode not in DETERMINISTIC_MERGES:
        raise ValueError(f"a deterministic cache goes with merge {gather}, {scatter} or auto, got {mode!r}")
    return mode

"""Join the partials that one rank's programs left in the workspace of `decode`: contract and PyTorch reference."""

import math

import torch
from torch import Tensor

from distdec.ops.partial import Partial

LN2 = math.log(2.0)


def combine(
    partial_out: Tensor, partial_lse2: Tensor, ranges: Tensor, num_kv_heads: int, q_len: int, group_size: int
) -> Partial:
    """Join the partials of every unit, a unit being one row's queries on one KV head.

    Unit `u = row * num_kv_heads + kv_head` owns partials `ranges[u, 0]` to `ranges[u, 1] - 1`. Row `i * G + g` of a
    partial belongs to query token i and query head `kv_head * G + g`. With `M = max_n lse2_n`:
    `lse = ln 2 * (M + log2 sum_n 2^(lse2_n - M))`, `out = sum_n 2^(lse2_n - M) out_n / sum_n 2^(lse2_n - M)`.

    Where `lse2` is -inf, `out` counts for nothing, whatever it is. A unit without partials gives out 0, lse -inf.

    Shapes:
        partial_out: [N, R, Dv] float32, normalised, R = q_len * G
        partial_lse2: [N, R] float32, logarithm in BASE 2, which never leaves a workspace
        ranges: [U, 2] int32, U = B * num_kv_heads
        returns `Partial`: out [B * q_len, Hq, Dv] float32, lse [B * q_len, Hq] float32, natural log
    """
    dim = partial_out.shape[2]
    rows = ranges.shape[0] // num_kv_heads
    out = torch.zeros((ranges.shape[0], q_len * group_size, dim), dtype=torch.float32, device=partial_out.device)
    lse = torch.full(out.shape[:2], -math.inf, dtype=torch.float32, device=partial_out.device)
    for unit, (begin, end) in enumerate(ranges.tolist()):
        if begin == end:
            continue
        lse2 = partial_lse2[begin:end]
        top = lse2.amax(0)
        weights = torch.exp2(lse2 - top.masked_fill(top == -math.inf, 0.0))
        values = partial_out[begin:end].masked_fill((lse2 == -math.inf)[..., None], 0.0)
        total = weights.sum(0)
        seen = total != 0
        out[unit] = torch.where(seen[:, None], (weights[..., None] * values).sum(0) / total[:, None], 0.0)
        lse[unit] = torch.where(seen, LN2 * (top + torch.log2(total)), -math.inf)

    def by_token(x: Tensor) -> Tensor:
        split = x.view(rows, num_kv_heads, q_len, group_size, -1).transpose(1, 2)
        return split.reshape(rows * q_len, num_kv_heads * group_size, -1)

    return Partial(by_token(out), by_token(lse).squeeze(-1))


def fold_ranks(
    outs: Tensor,
    lses: Tensor,
    *,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
    head_dim: int = 0,
    first_column: int = 0,
) -> None:
    """Fold the partials of all ranks in rank order into what a layer hands on.

    With m the largest lse of a row and `w_r = exp(lse_r - m)`: `out = sum_r w_r out_r / (sum_r w_r + exp(sink - m))`,
    `lse = m + ln(sum_r w_r + exp(sink - m))`. A row (token, head) that holds NaN or +inf on some rank that has keys
    becomes NaN throughout, no other row does. Where no rank has a key: 0 and -inf, with sinks too.

    Args:
        scales: what each row was divided by on its way; None: by nothing.
        head_dim, first_column: where `outs` and `out` are stretches of the flattened Hq x Dv columns: Dv, and the
            first column. Faults in other columns are seen by the LSE alone, which `pack` has marked.

    Shapes:
        outs: [R, T, Hq, Dv] floating, dense but for the first stride; lses: [R, T, Hq] float32, natural log, likewise
        out: [T, Hq, Dv] in any floating dtype and lse: [T, Hq] float32, both written, dense
        stretches: outs [R, T, W] and out [T, C] with C <= W; columns past C are padding
        sinks: [Hq]; scales: as lses

    Notes:
        In-place: writes out and lse. Collective: none.
    """
    num_columns = out.flatten(1).shape[1]
    heads = torch.arange(first_column, first_column + num_columns, device=out.device) // (head_dim or outs.shape[-1])
    values = outs.flatten(2)[..., :num_columns].float()
    if scales is not None:
        values = values * scales[..., heads]
    empty = lses == -math.inf
    values = values.masked_fill(empty[..., heads], 0.0)
    faults = (~values.isfinite()).any(0).float()
    failed = torch.zeros_like(lse).index_add_(1, heads, faults) > 0
    failed |= (~lses.isfinite() & ~empty).any(0)
    top = lses.amax(0).masked_fill(failed, 0.0)
    base = top.masked_fill(top == -math.inf, 0.0)
    total, acc = torch.zeros_like(base), torch.zeros_like(values[0])
    for rank in range(len(lses)):
        weight = torch.exp(lses[rank] - base)
        total, acc = total + weight, acc + values[rank] * weight[:, heads]
    none = top == -math.inf
    merged = acc / total.masked_fill(none, 1.0)[:, heads]
    merged_lse = (base + torch.log(total)).masked_fill(none, -math.inf)
    if sinks is not None:
        # out x exp(lse) / (exp(lse) + exp(sink)); rows without a key stay (0, -inf), also beside a sink of -inf
        share = torch.sigmoid(merged_lse - sinks.float()).masked_fill(none, 0.0)
        merged = merged * share[:, heads]
        merged_lse = torch.logaddexp(merged_lse, sinks.float()).masked_fill(none, -math.inf)
    out.copy_(merged.masked_fill(failed[:, heads], math.nan).view(out.shape))
    lse.copy_(merged_lse.masked_fill(failed, math.nan))


class DecodeWorkspace:
    """Memory for unmerged partials, allocated once and lent to one call after the other on the same stream.

    Args:
        num_floats: floats of partial outputs, at least `max_partials * R * Dv`.
        num_rows: floats of partial LSEs, at least `max_partials * R`.
    """

    def __init__(self, num_floats: int, num_rows: int, device: torch.device | str) -> None:
        self.out = torch.empty(num_floats, dtype=torch.float32, device=device)
        self.lse2 = torch.empty(num_rows, dtype=torch.float32, device=device)

    @classmethod
    def for_partials(cls, max_partials: int, rows: int, dim: int, device: torch.device | str) -> "DecodeWorkspace":
        """Allocate room for `max_partials` partials of `rows` rows and `dim` columns."""
        return cls(max_partials * rows * dim, max_partials * rows, device)

    def take(self, num_partials: int, rows: int, dim: int) -> tuple[Tensor, Tensor]:
        """Return (out [N, R, Dv], lse2 [N, R]), views of the memory; what they hold is left over from earlier calls.

        Raises:
            ValueError: the workspace is too small.
        """
        if num_partials * rows * dim > self.out.numel() or num_partials * rows > self.lse2.numel():
            raise ValueError(
                f"{num_partials} partials of {rows} x {dim} need {num_partials * rows * dim} floats and "
                f"{num_partials * rows} LSEs; the workspace holds {self.out.numel()} and {self.lse2.numel()}"
            )
        out = self.out[: num_partials * rows * dim].view(num_partials, rows, dim)
        return out, self.lse2[: num_partials * rows].view(num_partials, rows)

"""Choose the next tokens from logits.

`sample` runs on rank 0 alone; the others read the tokens in the next plan. `greedy` runs on every rank where the next
step is launched before its tokens are read: the same logits give the same tokens.

A draw is a function of (seed, index of the token in its output) and the logits, nothing else: no generator state, so
batch mates, ranks, steps and restarts cannot change it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distdec.request import SamplingParams

_MASK = (1 << 64) - 1


class SamplingRow(NamedTuple):
    """What choosing one row's token needs besides the logits. `seen_ids` are the prompt's and the output's tokens."""

    params: SamplingParams
    seed: int
    token_index: int
    seen_ids: Sequence[int]


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) that depends on (seed, index) alone.

    Two rounds of the splitmix64 finaliser (Steele, Lea, Flood, 2014): the first spreads the seed, the second the
    counter, so neighbouring seeds do not give shifted copies of one another's stream. The top 53 bits are used.
    """
    word = _mix(_mix(seed & _MASK) + (index + 1) * 0x9E3779B97F4A7C15)
    return (word >> 11) * 2.0**-53


def _mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def greedy(logits: Tensor) -> Tensor:
    """Return the first of the largest logits of each row; -1 for a row with a NaN, a +inf or nothing but -inf.

    Shapes:
        logits: [N, V] any float dtype; returns [N] int64

    Notes:
        In-place: none. Collective: none. Host sync: none.
    """
    largest, tokens = logits.max(-1)
    return torch.where(largest.abs() < torch.inf, tokens, -1)


def sample(logits: Tensor, rows: Sequence[SamplingRow | None]) -> list[int | None]:
    """Choose one token a row: repetition penalty, then temperature, top-k, top-p, min-p, then the draw.

    Greedy rows take the first of the largest logits. A row with a NaN, a +inf or nothing but -inf gets None and
    fails alone; its batch mates are not touched.

    Args:
        rows: None for a greedy row without a penalty.

    Shapes:
        logits: [N, V] any float dtype, N rows in the order of `rows`

    Notes:
        In-place: none. Collective: none. Host sync: one, for the tokens.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} requests")
    if not rows:
        return []
    logits = logits.float()
    special = {i: row for i, row in enumerate(rows) if row is not None}
    logits = _penalise(logits, special)
    # after the penalty: an extreme one overflows; neither of NaN
    tokens = greedy(logits)
    usable = tokens >= 0
    random = [i for i, row in special.items() if not row.params.greedy]
    if random:
        index = torch.tensor(random, device=logits.device)
        chosen = logits.index_select(0, index)
        # a bad row would only make its own draw meaningless; it is reported by `usable`
        tokens[index] = _draw(
            torch.nan_to_num(chosen, nan=0.0, posinf=0.0, neginf=-torch.inf), [special[i] for i in random]
        )
    return [None if token < 0 else token for token in torch.where(usable, tokens, -1).tolist()]


def _penalise(logits: Tensor, rows: Mapping[int, SamplingRow]) -> Tensor:
    if all(row.params.repetition_penalty == 1.0 for row in rows.values()):
        return logits
    logits = logits.clone()
    for i, row in rows.items():
        penalty = row.params.repetition_penalty
        if penalty != 1.0:
            seen = torch.tensor(sorted(set(row.seen_ids)), device=logits.device)
            old = logits[i, seen]
            logits[i, seen] = torch.where(old > 0, old / penalty, old * penalty)
    return logits


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw from the filtered distributions by the inverse of their cumulative sums, likeliest token first.

    Shapes:
        logits: [N, V] float32; returns [N] int64
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    vocab = logits.shape[-1]
    scaled = logits.double() / column([row.params.temperature for row in rows])
    scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device)
    keep = rank < column([float(min(row.params.top_k or vocab, vocab)) for row in rows])
    probs = scaled.masked_fill(~keep, float("-inf")).softmax(-1)
    # the tokens before this one have not reached top_p yet; so the first token is always kept
    keep = keep & (probs.cumsum(-1) - probs < column([row.params.top_p for row in rows]))
    probs = torch.where(keep, probs, 0.0)
    # relative to the likeliest token, so the scale of the remaining probabilities does not matter
    probs = torch.where(probs >= column([row.params.min_p for row in rows]) * probs[:, :1], probs, 0.0)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    target = column([uniform(row.seed, row.token_index) for row in rows]) * total
    # right=True: a target that equals a boundary belongs to the next token, which has the mass above it
    place = torch.searchsorted(cumulative, target, right=True)
    # rounding may put the target on the total itself; the last token with any mass is then meant
    place = torch.minimum(place, (probs > 0).sum(-1, keepdim=True) - 1).clamp_(min=0)
    return order.gather(-1, place)[:, 0]

"""What became of a request, and how all ranks hear of it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distdec.request import FinishReason

_REASONS = tuple(FinishReason)


@dataclass(frozen=True)
class Completion:
    """What became of one request. Times in seconds, from its `add()`; `tpot_s` is the mean after the first token.

    On ranks other than 0 `text` is empty.
    """

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    text: str = ""
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    total_s: float = 0.0


def to_words(completions: Sequence[Completion]) -> list[int]:
    """Return completions as integers, texts left out; times as nanoseconds."""
    words: list[int] = []
    for done in completions:
        times = (round(1e9 * seconds) for seconds in (done.ttft_s, done.tpot_s, done.total_s))
        head = (done.request_id, _REASONS.index(done.finish_reason), done.seed, *times)
        words += [*head, len(done.token_ids), *done.token_ids]
    return words


def from_words(words: Sequence[int]) -> list[Completion]:
    """Rebuild completions from the integers of `to_words`."""
    completions, at = [], 0
    while at < len(words):
        request_id, reason, seed, ttft, tpot, whole, count = words[at : at + 7]
        at += 7 + count
        ids = tuple(words[at - count : at])
        completions.append(Completion(request_id, ids, _REASONS[reason], seed, "", ttft / 1e9, tpot / 1e9, whole / 1e9))
    return completions

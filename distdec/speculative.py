"""Guess a request's next tokens, so that one step can check several of them. Integers only, no torch.

A proposer gets the tokens so far and returns its drafts. They run in one row behind the token that is still to be
computed, and the row's logits say at each position what would have been chosen there. Drafts are accepted as far as
they are that choice, so a request gets the same tokens as without, greedy or sampled: a draw depends on its position
alone (see `sampling.py`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import index

import numpy as np

from distdec.progress import RequestState, TokenArray
from distdec.request import StepPlan

Proposer = Callable[[TokenArray, int], tuple[int, ...]]
"""`propose(tokens, max_draft)`: up to `max_draft` token ids of the vocabulary that may follow `tokens`. Called on rank
0 alone, for each request that decodes, in every step.

Shapes:
    tokens: [N] int32, prompt and output so far, read-only and valid during the call
"""


class NgramProposer:
    """Look the last tokens up in the request itself, and propose what followed them there.

    The longest match of `shortest` to `longest` tokens counts, among those the latest. Where what followed reaches the
    end of the text, it goes on from its own start: a text that repeats itself is taken to go on doing so.

    Source: prompt lookup decoding (Saxena, 2023).

    Notes:
        One pass over the tokens a call: 13, 57 and 393 us for 4K, 128K and 1M of them (one core, 30 Nov 2026).

    Example:
        >>> NgramProposer(1, 3)(np.array([5, 6, 7, 8, 5, 6], np.int32), 3)
        (7, 8, 5)
    """

    def __init__(self, shortest: int, longest: int) -> None:
        """Look for matches of these lengths."""
        self.shortest = shortest
        self.longest = longest

    def __call__(self, tokens: TokenArray, max_draft: int) -> tuple[int, ...]:
        """Return the drafts."""
        # where the last token stood before
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        length = 1
        while length < self.longest and ends.size:
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[-1 - length]] if longer.size else longer
            if not longer.size:
                break
            ends, length = longer, length + 1
        if length < self.shortest or not ends.size:
            return ()
        start = int(ends[-1]) + 1
        found: list[int] = tokens[start + np.arange(max_draft) % (len(tokens) - start)].tolist()
        return tuple(found)


def checked(propose: Proposer, vocab_size: int) -> Proposer:
    """Return a proposer that refuses what is no token with a ValueError, on rank 0 where the step is planned.

    The embedding of a token outside the vocabulary would end a GPU's process.
    """

    def checked_propose(tokens: TokenArray, max_draft: int) -> tuple[int, ...]:
        found = propose(tokens, max_draft)
        try:
            drafts = tuple(map(index, found))[:max_draft]
        except TypeError as error:
            raise ValueError(f"the proposer must return token ids, got {found!r}: {error}") from None
        if drafts and not 0 <= min(drafts) <= max(drafts) < vocab_size:
            raise ValueError(f"the proposer's drafts {drafts} are not all in the vocabulary, 0 to {vocab_size - 1}")
        return drafts

    return checked_propose


def accept(drafts: Sequence[int], chosen: Sequence[int | None]) -> list[int | None]:
    """Return a row's new tokens: its drafts as far as they are what was chosen, and the choice behind them.

    Args:
        drafts: the row's.
        chosen: what was chosen behind the pending token and behind each draft; None where the logits were unusable.

    Example:
        drafts (7, 8, 9), chosen (7, 8, 4, 1): 7, 8 and 4; the choice behind the wrong 9 means nothing.
    """
    count = 0
    while count < len(drafts) and drafts[count] == chosen[count]:
        count += 1
    return list(chosen[: count + 1])


class Drafter:
    """Ask a proposer for the drafts of a step.

    Args:
        propose: where they come from.
        most: of one row.
    """

    def __init__(self, propose: Proposer, most: int) -> None:
        """Keep both."""
        self.propose = propose
        self.most = most

    def draft(self, decode: Sequence[RequestState], budget: int) -> dict[int, tuple[int, ...]]:
        """Return the drafts of each decode row that has any: as many as the budget, dealt evenly, and its end allow.

        Args:
            decode: requests with one token outstanding, in order.
            budget: tokens of all these rows together; their outstanding ones come first.
        """
        drafts: dict[int, tuple[int, ...]] = {}
        left = budget - len(decode)
        for at, state in enumerate(decode):
            if left <= 0:
                break
            share = -(-left // (len(decode) - at))
            # behind them comes the choice of one more token, which is never fed back if it is the last
            most = min(self.most, share, state.max_new - len(state.output_ids) - 1)
            found = self.propose(state.history(), most)[:most] if most > 0 else ()
            if found:
                drafts[state.request_id] = tuple(found)
                left -= len(found)
        return drafts


def verify(
    plan: StepPlan,
    chosen: Mapping[int, Sequence[int | None]],
    running: Mapping[int, RequestState],
    eos_ids: Collection[int],
) -> dict[int, list[int | None]]:
    """Return the new tokens of each request: its accepted drafts and the choice behind them, up to an end of sequence.

    Args:
        plan: the plan that was run.
        chosen: for each of a row's logits the token that follows from them; None where they were unusable.
        running: the requests that still run.
        eos_ids: tokens that end a request unless it ignores them.
    """
    tokens = {}
    for row in plan.rows:
        if row.request_id in chosen:
            new = accept(row.drafts, chosen[row.request_id])
            state = running.get(row.request_id)
            if state is not None and not state.request.sampling.ignore_eos:
                new = new[: next((i for i, token in enumerate(new, 1) if token in eos_ids), None)]
            tokens[row.request_id] = new
    return tokens

"""Do to a rank's integer cache what a plan says: free, admit, and publish what its rows have filled. No torch."""

from collections.abc import Sequence

from distdec.cache.kv_cache import KVCache
from distdec.cache.parking import Parking
from distdec.request import StepPlan


class Replay:
    """Apply plans to one rank's cache, in their order, so that it stays the same as all others.

    Args:
        cache: this rank's.
        publish: let later prompts find the pages of earlier ones.
        host: where preempted requests may be kept.
    """

    def __init__(self, cache: KVCache, publish: bool = True, host: Parking | None = None) -> None:
        """Start with an empty cache."""
        self.cache = cache
        self._publish = publish
        self._host = host
        # of each sequence, where its first page not yet published starts, and the tokens from there on
        self._tails: dict[int, tuple[int, list[int]]] = {}
        # of each speculative row of the step launched last
        self._drafts: dict[int, tuple[int, ...]] = {}

    def admit(self, plan: StepPlan) -> None:
        """Free and admit; not on rank 0, whose scheduler does so as it decides."""
        host, keys = self._host, {hit.request_id: hit.key for hit in plan.hits}
        for request_id in plan.free:
            if host is not None and request_id in host:
                host.drop(request_id)
            elif host is not None and request_id in plan.offload:
                host.park(request_id)
            else:
                self.cache.free(request_id, request_id in plan.withdraw)
        for request_id in plan.admit:
            if host is not None and request_id in plan.restore:
                host.bring_back(request_id)
            else:
                self.cache.adopt(request_id, keys.get(request_id, b""))

    def keep(self, kept: Sequence[tuple[int, int]]) -> None:
        """Truncate the sequences of speculative rows to what was accepted, and publish the pages that this has filled.

        On rank 0 when it knows, on the others before anything else that the next plan says.

        Args:
            kept: (request_id, length) of each such row of the step launched last.
        """
        for request_id, length in kept:
            self.cache.truncate(request_id, length)
            if self._publish:
                start, tail = self._tails[request_id]
                accepted = length - start - len(tail)
                self._append([(request_id, start, self._drafts.pop(request_id)[:accepted])])

    def publish(self, plan: StepPlan, late: Sequence[int] = ()) -> None:
        """Publish the pages that a step has filled, after it was launched, on every rank; drafts are left for `keep`.

        Their keys and values are written by then as far as any later step can tell: it runs behind this one.

        Args:
            late: the tokens of the plan's rows, if it is pending.
        """
        if not self._publish:
            return
        for request_id in plan.free:
            # who comes back from the host goes on in the middle of a page
            if request_id not in plan.restore and not (self._host is not None and request_id in self._host):
                self._tails.pop(request_id, None)
        if plan.pending:
            self._append([(row[0], row[1], (token,)) for row, token in zip(plan.rows, late, strict=True)])
            return
        for row in plan.rows:
            if row.num_drafts:
                self._drafts[row.request_id] = row.drafts
        self._append([(i, start, tokens[: len(tokens) - drafts]) for i, start, tokens, _, drafts in plan.rows])

    def _append(self, rows: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Take the next tokens of sequences, the first of each at its start, and publish the pages that are full now.

        Args:
            rows: (request_id, start, tokens).
        """
        size, tails = self.cache.layout.page_size, self._tails
        for request_id, start, token_ids in rows:
            found = tails.get(request_id)
            if found is None:
                # a hit ends with a page, so the first row of a sequence starts one
                found = tails[request_id] = (start, [])
            begin, tail = found
            tail += token_ids
            if len(tail) >= size:
                full = len(tail) // size * size
                self.cache.commit_pages(request_id, tail[:full], begin)
                tails[request_id] = (begin + full, tail[full:])

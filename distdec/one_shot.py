"""The `one_shot` merge: partials pushed into the peers' memory and merged in the kernel that joins the local splits.

The kernel is in `ops/one_shot_triton.py`; `slabs` sets up the memory through which the ranks reach each other.
"""

from __future__ import annotations

from functools import partial as bind

import torch
from torch import Tensor

from distdec.merge_collective import CollectiveMerge
from distdec.merge_modes import TRANSPORTS, Merge, Merged, check_partial, check_transport, column_range, padded_columns
from distdec.mesh import Mesh
from distdec.ops.own import OwnTokens
from distdec.ops.partial import Partial
from distdec.ops.splits import Splits
from distdec.slabs import TIMEOUT_S, MapSlabs, Peers, SharedSlabs, find_mapping, spin_limit

CAPACITY_BYTES = 8 << 20
"""Default room for one rank's rows of one launch: 256 tokens of 64 heads of 128 floats."""


class OneShotMerge(Merge):
    """Merge the partials of a kvp group with one kernel and no call of a collective library.

    A value that is not finite in a row with keys makes that row NaN, one query head of one token, on every rank.

    Args:
        mesh: at least two kvp ranks, on one host, with peer access between their GPUs.
        scatter: True gives every rank its share of the columns, as `reduce_scatter` does; False gives all columns to
            every rank, bit-identical.
        transport: "float32", or "bfloat16" or "float8_e4m3" to round every rank's output row once (off by at most 2^-8
            or 2^-4 of the largest |out| that any rank sends; LSEs stay float32).
        capacity_bytes: room for the rows of one rank in one call; a call with more goes through `all_gather` or
            `all_to_all` instead. The slab takes 2 x kvp x this, and some MB for small calls, see `slab_triton`.
        timeout_s: how long a launch waits for a late rank, about.
        first_epoch: where the flags begin to count; any int32.
        map_slabs: instead of symmetric memory.

    Raises:
        ValueError: an unknown transport.
        RuntimeError: this mesh cannot do it; the reason is the same on every rank.

    Notes:
        Collective: the whole mesh, when made and when closed. One object serves one stream at a time, eager calls and
        graph replays alike; a graph that was captured with it must be gone before it is closed.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        scatter: bool = False,
        transport: str = "float32",
        capacity_bytes: int = CAPACITY_BYTES,
        timeout_s: float = TIMEOUT_S,
        first_epoch: int = 0,
        map_slabs: MapSlabs | None = None,
    ) -> None:
        check_transport("one_shot", transport)
        what, peers = "merge mode one_shot", Peers.kvp(mesh)
        map_slabs = map_slabs or find_mapping(what, peers)
        # imported here: without Triton the line above has refused, and said so
        from distdec.ops.one_shot_triton import Plans, max_items, one_shot
        from distdec.ops.one_shot_words_triton import WORD_BYTES

        self.mode = "one_shot_scatter" if scatter else "one_shot"
        self.replicated = not scatter
        self.reason = f"{self.mode}: one kernel over symmetric memory"
        self.calls = 0
        self.mesh = mesh
        self._payload = TRANSPORTS[transport]
        self._spin_limit = spin_limit(timeout_s)
        self._large = CollectiveMerge("all_to_all" if scatter else "all_gather", mesh, self._payload, self.reason)
        self._slabs = SharedSlabs(what, peers, map_slabs, capacity_bytes, first_epoch, words=WORD_BYTES)
        self._slab, self._alarm = self._slabs.slab, self._slabs.alarm
        self._max_items = bind(max_items, self._slab)
        self._kernel = bind(one_shot, plans=Plans())

    def fits(self, num_tokens: int, num_q_heads: int, dim: int) -> bool:
        """Tell whether a call of this size runs in the kernel; the same answer on every rank."""
        return num_tokens * num_q_heads <= self._max_items(dim, self._payload.itemsize)

    def __call__(
        self, partial: Partial, *, sinks: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Merged:
        """Merge partials whose local splits are joined already: prefill rows, the reference ops, foreign ops.

        Shapes:
            partial: out [T, Hq, Dv] float32, lse [T, Hq] float32, natural log
            sinks: [Hq], one extra logit a head, counted once
            returns `Merged`: out [T, columns] in `out_dtype` (None: float32), lse [T, Hq], columns (start, stop)

        Raises:
            ValueError: the shapes do not fit each other.
            RuntimeError: an earlier call lost a rank.

        Notes:
            Collective: the kvp axis. Graph-safe. Host sync: none.
        """
        check_partial(partial)
        num_tokens, num_q_heads, dim = partial.out.shape
        if not self.fits(num_tokens, num_q_heads, dim):
            merged = self._large(partial, sinks=sinks, out_dtype=out_dtype)
            self.calls += 1
            return merged
        return self.merge_splits(Splits.of(partial), sinks=sinks, out_dtype=out_dtype)

    def merge_splits(
        self,
        splits: Splits,
        *,
        sinks: Tensor | None = None,
        own: OwnTokens | None = None,
        following: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Merged:
        """Join the splits that `decode` left in its workspace and merge them across ranks, in one kernel.

        Args:
            own: new tokens that the splits leave out, one a row: each is added on the rank that holds it, which stores
                it while the partials are on their way.
            following: a weight that is read next: its first bytes are fetched into the device's cache meanwhile.

        Shapes:
            sinks and returns: as `__call__`; `fits` must hold

        Raises:
            ValueError: more rows than the slab takes.
            RuntimeError: an earlier call lost a rank.

        Notes:
            In-place: writes the pool of `own`. Collective: the kvp axis. Graph-safe. Host sync: none.
        """
        if self._alarm[0]:
            self.check()
        num_heads, slab = splits.num_q_heads, self._slab
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(f"expected sinks [{num_heads}], one a query head, got {tuple(sinks.shape)}")
        total = num_heads * splits.head_dim
        width, columns = 0, (0, total)
        if not self.replicated:
            width, columns = padded_columns(total, slab.num_ranks), column_range(total, slab.num_ranks, slab.rank)
        out = splits.out.new_empty((splits.num_tokens, columns[1] - columns[0]), dtype=out_dtype or torch.float32)
        lse = splits.lse.new_empty((splits.num_tokens, num_heads))
        self._kernel(
            slab,
            splits,
            out,
            lse,
            payload=self._payload,
            spin_limit=self._spin_limit,
            columns=width,
            sinks=sinks,
            own=own,
            following=following,
        )
        self.calls += 1
        return Merged(out, lse, columns)

    def check(self) -> None:
        """Raise if a launch that has run lost a rank; see `SharedSlabs.check`."""
        self._slabs.check()

    def close(self) -> None:
        """Free the slab; see `SharedSlabs.close`."""
        self._slabs.close()

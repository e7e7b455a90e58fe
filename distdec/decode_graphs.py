"""The whole decode step of a model as CUDA graphs: embedding, all layers with their merges, and the head.

A step that holds nothing but decode rows is padded to the next captured row count and replayed. The padding rows hold
no key, store nothing and belong to nobody; their logits are cut off. All other steps run eagerly, over the same static
buffers. On a device without graphs the captured callables are called instead, padding and all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distdec.batch import StepBatch
from distdec.graphs import GraphKey, StepGraphs, row_buckets
from distdec.hf.attention import EngineBinding
from distdec.request import StepPlan
from distdec.row_tables import NO_PADDING, Padding
from distdec.sharded_cache import ShardedCache


class DecodeGraphs:
    """Captured decode steps by padded row count.

    Args:
        binding: the model on its attention; the merge and its buffers live as long as the graphs.
        inputs: token ids, positions and needed tokens of a step, [3, capacity] int64; a captured step reads its first
            columns where they are.
        max_rows: most rows of a step.
        max_tokens: most tokens of any step, eager ones too: the buffers are made for it now, and never move.
        progress: called with the number of captured steps, and of all.

    Notes:
        Collective: every rank makes it at the same time, with the same numbers.
    """

    def __init__(
        self,
        binding: EngineBinding,
        inputs: Tensor,
        *,
        max_rows: int,
        max_tokens: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.binding = binding
        self.cache: ShardedCache = binding.attention.cache
        mesh, merge, buffers = binding.attention.mesh, binding.attention.merge, self.cache.buffers
        self.buckets = row_buckets(max_rows)
        frames = self.cache.layout.num_frames[mesh.kvp_rank]
        # a view lies in a chunk of its own, unless prefixes are shared: then this may not do, see `stale`
        buffers.reserve(tokens=max(max_tokens, max_rows), rows=max_rows, views=frames + 2 * max_rows)
        self._generation = buffers.generation
        self._graphs = StepGraphs(
            mesh.device,
            barrier=mesh.barrier if mesh.world_size > 1 else None,
            moved=lambda: buffers.generation,
            checks=[check] if (check := getattr(merge, "check", None)) else (),
            keep=[binding.attention],
        )
        self._inputs = inputs
        # forwards launched from Python: a replay is none
        self.num_forwards = 0
        self._capture(progress)

    def _capture(self, progress: Callable[[int, int], None] | None) -> None:
        steps = {}
        # the widest key last, as the buffers then hold its rows: any of the steps may then warm up
        for rows in self.buckets:
            pad = Padding(rows)
            batch = self.cache.buffers.fill([], q_len=1, pad=pad)
            steps[GraphKey(rows)] = (self._step_of(batch), tuple(words[:rows] for words in self._inputs))
        self._inputs.zero_()
        with torch.no_grad():
            self._graphs.capture(steps, progress)

    def _step_of(self, batch: StepBatch) -> Callable[..., Tensor]:
        # the batch of a padded step has the same addresses every time, so this one serves all later ones
        def step(ids: Tensor, positions: Tensor, needed: Tensor) -> Tensor:
            return self._forward(ids, positions, needed, batch)

        return step

    def _forward(self, ids: Tensor, positions: Tensor, needed: Tensor, batch: StepBatch) -> Tensor:
        self.num_forwards += 1
        # part of the captured step: two launches less
        self.cache.buffers.derive(batch)
        self.binding.set_step(batch)
        return self.binding.forward(ids, positions, logits_to_keep=needed)

    def padding(self, plan: StepPlan) -> Padding:
        """Return up to what a step is padded; the same on every rank, as nothing but the plan counts."""
        if not plan.decode_only:
            return NO_PADDING
        key = self._graphs.pick(len(plan.rows))
        return NO_PADDING if key is None else Padding(key.rows)

    @property
    def stale(self) -> bool:
        """Whether this rank's buffers had to move. Its steps then run eagerly, padded as on the other ranks."""
        return self.cache.buffers.generation != self._generation

    def run(self, pad: Padding, inputs: tuple[Tensor, Tensor, Tensor], batch: StepBatch) -> Tensor:
        """Run a padded step and return the logits of its needed tokens, padding included.

        Shapes:
            inputs: token ids [T], positions [T] and needed tokens [N], int64, padded
            returns [N, vocabulary], valid until the next step

        Notes:
            In-place: writes the pool. Collective: as the model's forward. Host sync: none.
        """
        if self.stale:
            return self._forward(*inputs, batch)
        return self._graphs.replay(GraphKey(pad.decode_rows), *inputs)

    def close(self) -> None:
        """Drop the graphs; before the merge and the process group go."""
        self._graphs.close()

"""Run one step's rows through the model: owns the model, the sharded cache and the attention layer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distdec.arrival import Arrival, Patience
from distdec.attention import DistributedAttention
from distdec.batch import StepBatch
from distdec.capacity import GIB, Room, choose_max_tokens
from distdec.config import Config
from distdec.hf.attention import bind_engine
from distdec.hf.sharding import merge_for, rank_sum_of, sharding_of
from distdec.hf.support import check_model
from distdec.load import DTYPES, load_model, resolve_dtype
from distdec.mesh import Mesh
from distdec.model_graphs import ModelGraphs
from distdec.request import StepPlan
from distdec.row_tables import NO_PADDING, Padding
from distdec.sampling import greedy
from distdec.sharded_cache import ShardedCache
from distdec.sizing import Memory, bytes_per_token, make_cache, make_smallest_cache, memory_of, warm_up


class Runner:
    """A model whose attention runs on a sharded cache, fed with plans.

    Args:
        model: a transformers causal language model with this rank's weights and `attn_implementation="distdec"`.
        attention: the layer all attention modules share; it brings the mesh and the cache.
        max_tokens: tokens that the cache was made for (its pool is a little larger, for whole chunks).
    """

    def __init__(self, model: torch.nn.Module, attention: DistributedAttention, max_tokens: int) -> None:
        self.model = model
        self.attention = attention
        self.cache: ShardedCache = attention.cache
        self.mesh: Mesh = attention.mesh
        self.max_tokens = max_tokens
        self.binding = bind_engine(model, attention)
        self.graphs: ModelGraphs | None = None
        # this rank's memory as `build` found it, and the seconds of its parts
        self.room = Room(0)
        self.start_s: dict[str, float] = {}
        self._num_eager = 0
        self._patience = Patience(self.mesh.timeout_s)
        self._inputs = _Inputs(self.mesh.device, self._patience)
        # of the step launched last
        self._logits: Tensor | None = None
        self._tokens: Tensor | None = None

    @classmethod
    def build(
        cls,
        model: torch.nn.Module,
        mesh: Mesh,
        config: Config,
        wanted_tokens: int,
        progress: Callable[[int, int], None] | None = None,
        memory: Memory | None = None,
    ) -> Runner:
        """Choose how a model from `load_model` communicates, warm it up, make its cache and capture its steps.

        Args:
            wanted_tokens: size of a cache whose size is automatic, where memory allows; the same on every rank.
            progress: called with the number of captured steps, and of all.
            memory: reads this rank's free memory; None reads the device's.

        Raises:
            ValueError: there is no memory for the cache, or for the steps beside it.

        Notes:
            Collective: the choice of the merge and of the sum over ranks, the warm-up, the size, the captured steps.
        """
        started = time.perf_counter()
        geometry = check_model(model, mesh, engine=True)
        dtype = DTYPES[resolve_dtype(config.model.dtype, mesh.device)]
        memory = memory or memory_of(mesh)
        options, deterministic = config.parallel, config.backend.deterministic
        merge = merge_for(model, mesh, options.merge, options.transport, deterministic=deterministic)
        total = rank_sum_of(model)
        if total is not None:
            total.choose(config.parallel.reduce, mesh, config.parallel.timeout_s)
        room = Room(memory.free())
        smallest = make_smallest_cache(mesh, geometry, config, dtype)
        runner = cls(model, DistributedAttention(mesh, smallest, merge=merge), 0)
        del smallest
        if config.parallel.overlap in ("fetch", "both"):
            runner.binding.fetch_following()
        if _switched_on(config.backend.compile, mesh):
            runner.binding.compile()
        with _explained(model):
            if memory.measures:
                captures = _switched_on(config.backend.graphs, mesh)
                room = Room(room.free, *warm_up(runner.binding, config.scheduler, memory, captures))
            runner.start_s["warm-up"] = time.perf_counter() - started
            runner._settle(config, wanted_tokens, room, memory, progress)
        return runner

    def _settle(
        self,
        config: Config,
        wanted_tokens: int,
        room: Room,
        memory: Memory,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """Make the cache that fits this rank's room and all others', and capture the steps.

        What the captured steps take is known only then. Where it is more than was set aside and the cache has left no
        other room, a smaller cache is made, once.
        """
        started = time.perf_counter()
        mesh, steps, dtype = self.mesh, config.scheduler, self.cache.pool.k.dtype
        geometry, captures = self.binding.geometry, _switched_on(config.backend.graphs, self.mesh)

        def fitting() -> int:
            rooms = [Room(*words) for words in mesh.gather(self.room)]
            return choose_max_tokens(
                config.cache, wanted_tokens, bytes_per_token(geometry, dtype), rooms, mesh.kvp_size
            )

        self.room, taken = room, 0
        size = fitting()
        for last in (False, True):
            self._use(make_cache(mesh, geometry, config, size, dtype), size)
            if captures:
                before = memory.free()
                most = (steps.max_rows, steps.token_budget, steps.max_pending_prefills)
                self.capture(*most, progress, num_draft_tokens=steps.num_draft_tokens)
                taken = before - memory.free()
            self.start_s["capture"] = time.perf_counter() - started
            if not (captures and memory.measures):
                return
            self.room = room._replace(graphs=taken)
            fits = fitting()
            if fits >= size:
                return
            assert self.graphs is not None, "captured above"
            self.graphs.close()
            self.graphs = None
            if last:
                raise ValueError(
                    f"captured steps take {taken / GIB:.3g} GiB, more each time, and leave no room for a cache of "
                    f"{size} tokens: cache.max_tokens={fits} is smaller, backend.graphs=off captures none"
                )
            # the large one goes first: there is no room for both
            self._use(make_smallest_cache(mesh, geometry, config, dtype), 0)
            memory.free()
            size = fits

    def _use(self, cache: ShardedCache, max_tokens: int) -> None:
        """Run on another cache from now on. No graph may hold the one before."""
        self.attention.cache = self.cache = cache
        self.max_tokens = max_tokens

    @classmethod
    def load(
        cls,
        folder: str | Path,
        mesh: Mesh,
        config: Config,
        *,
        wanted_tokens: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Runner:
        """Load a model folder and make its cache: `load_model` and `build` in one.

        Args:
            wanted_tokens: as for `build`; rank 0's counts.

        Raises:
            ValueError: the model or the layout cannot run, or there is no memory for a cache.

        Notes:
            Collective: as `build`.
        """
        model = load_model(folder, mesh, config)
        [wanted] = mesh.agree([wanted_tokens])
        return cls.build(model, mesh, config, wanted, progress)

    def capture(
        self,
        max_rows: int,
        max_tokens: int,
        max_prefills: int = 0,
        progress: Callable[[int, int], None] | None = None,
        *,
        num_draft_tokens: int = 0,
    ) -> None:
        """Run steps of up to `max_rows` rows as graphs from now on. Arguments as for `ModelGraphs`."""
        # a captured step may hold all rows and all tokens of a step in padding
        capacity = max_tokens + max_rows * (1 + num_draft_tokens)
        self._inputs = _Inputs(self.mesh.device, self._patience, capacity)
        self.graphs = ModelGraphs(
            self.binding,
            self._inputs.words,
            max_rows=max_rows,
            max_tokens=max_tokens,
            max_prefills=max_prefills,
            num_draft_tokens=num_draft_tokens,
            progress=progress,
        )

    @property
    def num_forwards(self) -> int:
        """Forwards launched from Python, those of warming up included; a replayed graph is none."""
        return self._num_eager + (self.graphs.num_forwards if self.graphs is not None else 0)

    @property
    def num_layers(self) -> int:
        return self.cache.pool.k.shape[0]

    @property
    def dtype(self) -> str:
        return str(self.cache.pool.k.dtype).removeprefix("torch.")

    @property
    def logits_agree(self) -> bool:
        """Whether all ranks have the same logits to the bit: one rank, or a head whose parts all ranks gather."""
        return self.mesh.world_size == 1 or sharding_of(self.model) is not None

    def choose(self) -> Arrival:
        """Choose the likeliest token of each row of the step launched last, on the device.

        They are the tokens of the next step, if its rows are pending. Host sync: none.
        """
        assert self._logits is not None, "choose() before a step"
        self._tokens = greedy(self._logits)
        return Arrival(self._tokens, self._patience)

    def ready(self) -> Tensor:
        """Return the logits of the step launched last, once the device has them.

        Raises:
            StepStuck: it has not after the mesh's timeout: a rank is lost.
        """
        assert self._logits is not None, "ready() before a step"
        self._patience.wait_for_all(self.mesh.device)
        return self._logits

    def padding(self, plan: StepPlan) -> Padding:
        """Return up to what a plan's rows have to be padded; none of it where the step runs eagerly."""
        return NO_PADDING if self.graphs is None else self.graphs.padding(plan)

    def run(self, plan: StepPlan, batch: StepBatch) -> Tensor:
        """Run the plan's rows and return the logits of the rows that need them, in row order.

        Activations are those of the plan's tokens, whatever the length of the prompts they belong to, and logits exist
        for the needed rows only.

        Args:
            plan: what to run.
            batch: the same rows, as `ShardedCache.begin_step` described them, padded as `padding` says; the views of a
                padded step are cut here.

        Shapes:
            returns [N, vocabulary], the same on every rank

        Notes:
            In-place: writes the pool. Collective: one merge a layer, and those of the sharded weights; every rank must
            call this with the same plan. Host sync: none.
        """
        pad = self.padding(plan)
        count, (input_ids, position_ids, needed) = self._inputs.fill(plan, pad)
        with torch.no_grad():
            if plan.pending:
                assert self._tokens is not None, "pending tokens that no step has chosen"
                torch.clamp(self._tokens, min=0, out=input_ids[:count])
            if pad != NO_PADDING and self.graphs is not None:
                self._logits = self.graphs.run(pad, (input_ids, position_ids, needed), batch)[:count]
            else:
                self._num_eager += 1
                self.binding.set_step(batch)
                self._logits = self.binding.forward(input_ids, position_ids, logits_to_keep=needed)
        return self._logits

    def close(self) -> None:
        """Drop the graphs, take the binding off the model and give back the merge's and the sum's slabs, in this order.

        After a `StepStuck` it does nothing: all of that would wait for the device. The process then has to end by
        `os._exit`, the mesh left open.

        Raises:
            StepStuck: the device does not end what is queued: a rank was lost in the last step.

        Notes:
            Collective, where there are slabs that peers write to: before the mesh is closed. Host sync: yes.
        """
        if self._patience.stuck:
            return
        self._patience.wait_for_all(self.mesh.device)
        if self.graphs is not None:
            self.graphs.close()
        self.binding.close()
        close_merge = getattr(self.attention.merge, "close", None)
        if close_merge is not None:
            close_merge()
        total = rank_sum_of(self.model)
        if total is not None:
            total.close()


@contextlib.contextmanager
def _explained(model: torch.nn.Module) -> Iterator[None]:
    """Say which options help where the start fails for want of memory or for what the compiler cannot do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            "memory ran out at the start: smaller scheduler.token_budget, scheduler.max_rows and cache.memory_fraction "
            f"need less, and so do more ranks ({str(error).splitlines()[0]})"
        ) from error
    except RuntimeError as error:
        # by name: importing the compiler takes a second, and most runs on a CPU never need it
        if type(error).__module__ != "torch._dynamo.exc":
            raise
        raise RuntimeError(
            f"torch.compile cannot compile the layers of {type(model).__name__}; backend.compile=off runs them as they "
            f"are: {error}"
        ) from error


def _switched_on(option: str, mesh: Mesh) -> bool:
    return option == "on" or (option == "auto" and mesh.device.type == "cuda")


class _Inputs:
    """Token ids, positions and needed rows of a step, on the device, in buffers that stay where they are.

    One host buffer is enough, as a step's copy is the first of its work on the device: waiting for it before the next
    step is filled leaves the device one step to run meanwhile. Not waiting would overwrite the tokens of a prompt's
    slice that is still queued, since nobody reads a result of such a step.
    """

    def __init__(self, device: torch.device, patience: Patience, capacity: int = 1024) -> None:
        self.device = device
        self._patience = patience
        self._copied: torch.cuda.Event | None = None
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        pin = self.device.type == "cuda"
        self.host = torch.zeros(3, capacity, dtype=torch.int64, pin_memory=pin)
        self._array = self.host.numpy()
        self.words = torch.zeros(3, capacity, dtype=torch.int64, device=self.device) if pin else self.host

    def fill(self, plan: StepPlan, pad: Padding = NO_PADDING) -> tuple[int, tuple[Tensor, Tensor, Tensor]]:
        """Return N and (token ids [T], positions [T], indices of the tokens whose logits are needed [N]), all int64.

        Padding is token 0 at position 0, and in a padded step there is an index for every token of a decode row and
        every other row, token 0 after the N.

        Example: rows of 1 and 3 tokens, both needing logits: indices 0 and 3. With the last 2 tokens drafts, the first
        row is filled up to 3 tokens: indices 0, 3, 4 and 5.
        """
        rows, decode, q_len = plan.rows, plan.num_decode, max(plan.q_len, pad.q_len)
        prefill = max(decode, pad.decode_rows) * q_len
        total = prefill + max(sum([len(row.token_ids) for row in rows[decode:]]), pad.prefill_tokens)
        # (an old host buffer stays alive until its copy is done: the allocator of pinned memory sees to that)
        if total > self.capacity:
            self._allocate(1 << (total - 1).bit_length())
        if self._copied is not None:
            self._patience.wait(self._copied)
        self._array[:, :total] = 0
        ids, positions, needed = self._array
        wanted, first, at = [], 0, prefill
        if q_len == 1:
            first = decode
            ids[:first] = [row.token_ids[0] for row in rows[:first]]
            positions[:first] = [row.start for row in rows[:first]]
            wanted = [i for i, row in enumerate(rows[:first]) if row.needs_logits]
        for index, row in enumerate(rows[first:], first):
            begin = index * q_len if index < decode else at
            stop = begin + len(row.token_ids)
            ids[begin:stop] = row.token_ids
            positions[begin:stop] = np.arange(row.start, row.start + len(row.token_ids))
            wanted += range(stop - row.num_logits, stop)
            at = max(at, stop)
        needed[: len(wanted)] = wanted
        if self.words is not self.host:
            self.words[:, :total].copy_(self.host[:, :total], non_blocking=True)
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record()
        count = len(wanted) if pad == NO_PADDING else pad.decode_rows * pad.q_len + pad.prefill_rows
        return len(wanted), (self.words[0, :total], self.words[1, :total], self.words[2, :count])

"""The engine: requests in, tokens out, one step at a time. The file to read first; docs/walk.md follows one step.

Every rank runs the same loop. Rank 0 alone decides, samples and holds texts; a step's decisions reach the other ranks
as one list of integers, the plan, and the token chosen in one step is part of the next plan. So all ranks go on with
the same token by construction, and nothing but integers is ever sent. Greedy steps that are launched ahead are the
exception: there every rank takes the token from its own logits, which have the same bits everywhere.

    engine = Engine(Runner.load(folder, mesh, config), config.scheduler, tokenizer=tokenizer)
    done = engine.generate([(prompt_ids, SamplingParams(max_new_tokens=32))])      # on every rank
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from distdec.arrival import Arrival
from distdec.batch import StepBatch
from distdec.capacity import no_room
from distdec.completion import Completion, from_words, to_words
from distdec.config import SchedulerConfig
from distdec.detokenize import TextStream
from distdec.progress import RequestState, TokenEvent
from distdec.replay import Replay
from distdec.request import FinishReason, PlanKind, Request, SamplingParams, StepPlan
from distdec.row_tables import NO_PADDING
from distdec.runner import Runner
from distdec.sampling import SamplingRow, sample
from distdec.scheduler import Scheduler
from distdec.speculative import Proposer, checked, verify

_SHARE_WORDS = 1 << 18  # integers a message, well below what a mesh agrees on at once


@dataclass(frozen=True)
class StepResult:
    """A step's plan, and on rank 0 what it brought."""

    plan: StepPlan
    events: tuple[TokenEvent, ...] = ()
    completions: tuple[Completion, ...] = ()

    @property
    def done(self) -> bool:
        return self.plan.kind is PlanKind.DONE


@dataclass
class _Live:
    """What rank 0 keeps of a request besides the scheduler's state."""

    seed: int
    text: TextStream | None
    added: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0


class _Launched(NamedTuple):
    """A step under way: its plan, and where its tokens arrive if the next one was not to wait for them."""

    plan: StepPlan
    tokens: Arrival | None = None


class Engine:
    """Run many requests on a model whose KV cache is sharded over the ranks of a mesh.

    Args:
        runner: model, cache and attention.
        config: of the scheduler.
        eos_ids: tokens that end a request; None takes the model's.
        tokenizer: anything with transformers' `decode`; used on rank 0, for texts and stop strings.
        propose: where the drafts of speculative rows come from; None: the request's own text, by n-grams. Used on rank
            0 alone, and only with `num_draft_tokens` above 0.
    """

    def __init__(
        self,
        runner: Runner,
        config: SchedulerConfig | None = None,
        *,
        eos_ids: Collection[int] | None = None,
        tokenizer: Any = None,
        propose: Proposer | None = None,
    ) -> None:
        self.runner = runner
        self.mesh = runner.mesh
        self.cache = runner.cache
        text_config = runner.model.config.get_text_config()
        self.vocab_size = text_config.vocab_size
        self.max_positions = text_config.max_position_embeddings
        self.eos_ids = frozenset(model_eos_ids(runner.model) if eos_ids is None else eos_ids)
        config = config or SchedulerConfig()
        if propose is not None and not config.num_draft_tokens:
            raise ValueError("propose= has no use with scheduler.num_draft_tokens=0: no drafts are asked for")
        parking = self.cache.host and self.cache.host.parking
        self.scheduler = Scheduler(
            config,
            self.cache.kv,
            self.eos_ids,
            prefix_caching=self.cache.prefix_caching,
            lookahead=config.lookahead and runner.logits_agree,
            host=parking,
            propose=propose and checked(propose, self.vocab_size),
        )
        self.replay = Replay(self.cache.kv, self.cache.prefix_caching, parking)
        self.tokenizer = tokenizer
        self.peak_tokens = 0
        self._live: dict[int, _Live] = {}
        # those of them without a token so far
        self._silent: set[int] = set()
        self._next_id = 0
        self._next: _Launched | None = None
        # a plan whose tokens are not told yet, and on rank 0 those tokens
        self._untold: StepPlan | None = None
        self._late: tuple[int, ...] = ()
        # on rank 0, what the speculative rows of the step before keep
        self._kept: tuple[tuple[int, int], ...] = ()

    def add(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """Queue a prompt, at any time; rank 0 only. Returns the request's id.

        Args:
            prompt_ids: the tokens.
            sampling: how to choose new ones, and when to stop.
            priority: lower is served first.
            timeout_s: seconds from now after which it ends with what it has.

        Raises:
            ValueError: the prompt is empty, has ids outside the vocabulary, or does not fit the model or the cache
                together with its new tokens; stop strings without a tokenizer.
        """
        request = Request(self._next_id, tuple(prompt_ids), sampling or SamplingParams(), priority, timeout_s)
        self.check(request)
        self.scheduler.add(request)
        self._next_id += 1
        params = request.sampling
        text = None if self.tokenizer is None else TextStream(self._decode, params.stop)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self._live[request.request_id] = _Live(seed, text)
        self._silent.add(request.request_id)
        return request.request_id

    def check(self, request: Request) -> None:
        """Refuse a request that can never run; see `add`."""
        request.check(self.vocab_size, self.max_positions)
        if request.max_tokens > self.runner.max_tokens:
            raise ValueError(no_room(request, self.runner.max_tokens, self.mesh.kvp_size, self.runner.dtype))
        if request.sampling.stop and self.tokenizer is None:
            raise ValueError(f"request {request.request_id}: stop strings need an engine with a tokenizer")

    def cancel(self, request_id: int) -> None:
        """End a request in whatever state it is, keeping its tokens; rank 0 only, between steps."""
        self.scheduler.finish(request_id, FinishReason.CANCELLED)

    def step(self) -> StepResult:
        """Run one step: schedule, agree, reserve, run, sample, commit. Every rank calls it, as often as rank 0.

        Where nothing but decode rows goes on, the next step is launched before this one's tokens are read: they stay
        on the device, and the host works while it runs.

        Raises:
            RuntimeError: on every rank, if rank 0 could not plan; a rank that received something else than a plan.

        Notes:
            Collective: the plan over the mesh, then those of the model. Host sync: rank 0 reads the tokens.
        """
        step = self._next or self._launch(self._agree(self.scheduler.schedule))
        assert step is not None, "a HOLD without a step under way"
        self._next = None
        if step.plan.followed:
            self._next = self._launch(self._agree(lambda: self.scheduler.ahead(step.plan), step.plan))
        return self._commit(step.plan, self._sample(step) if self.mesh.is_leader else {})

    def _launch(self, plan: StepPlan) -> _Launched | None:
        """Do what a plan says, up to the choice of tokens on the device; nothing for a HOLD."""
        if not self.mesh.is_leader:
            if plan.late:
                self._tell(plan.late)
            self.replay.keep(plan.kept)
            self.replay.admit(plan)
        if self.cache.host is not None:
            self.cache.host.carry()
        if plan.kind is PlanKind.HOLD:
            return None
        batch = self._reserve(plan)
        if batch is None:
            return _Launched(plan)
        self.runner.run(plan, batch)
        if plan.pending:
            self._untold = plan
        else:
            self.replay.publish(plan)
        return _Launched(plan, self.runner.choose() if plan.followed else None)

    def _tell(self, tokens: tuple[int, ...]) -> None:
        """Publish what the step whose tokens were pending has filled, now that they are known."""
        assert self._untold is not None, "tokens for no step"
        self.replay.publish(self._untold, tokens)
        self._untold = None

    def _agree(self, decide: Callable[[], StepPlan], before: StepPlan | None = None) -> StepPlan:
        plan, error = None, None
        if self.mesh.is_leader:
            try:
                plan = decide()
                if self._late or self._kept:
                    plan = replace(plan, late=self._late, kept=self._kept)
                    self._late, self._kept = (), ()
            except Exception as raised:
                # the others already wait for a plan
                plan, error = StepPlan(0, PlanKind.FAIL), raised
        words = self.mesh.agree(None if plan is None else plan.encode())
        if plan is None:
            plan = StepPlan.decode(words, before)
        if plan.kind is PlanKind.FAIL:
            raise error or RuntimeError("rank 0 could not plan the step; it says why")
        return plan

    def _reserve(self, plan: StepPlan) -> StepBatch | None:
        """Free, admit and reserve as the plan says. The same integers on every rank, so nobody can run out alone."""
        if not plan.rows:
            return None
        rows = [(row[0], len(row[2])) for row in plan.rows]
        pad = self.runner.padding(plan)
        shape = {"q_len": max(plan.q_len, pad.q_len), "num_decode": plan.num_decode}
        batch = self.cache.begin_step(rows, **shape, pad=pad, derive=pad == NO_PADDING)
        self.peak_tokens = max(self.peak_tokens, self.cache.kv.held_tokens(self.mesh.kvp_rank))
        return batch

    def _sample(self, step: _Launched) -> dict[int, list[int | None]]:
        """Return the new tokens of each request; None as the last of them where logits are unusable."""
        needed = [row for row in step.plan.rows if row.needs_logits]
        if not needed:
            return {}
        if step.tokens is None:
            rows: list[SamplingRow | None] = []
            for row in needed:
                state = self._state(row.request_id)
                rows += [None] * (1 + row.num_drafts) if state.plain else self._sampling_rows(state, row.drafts)
            found = sample(self.runner.ready(), rows)
            if len(found) == len(needed):
                return {row.request_id: [token] for row, token in zip(needed, found, strict=True)}
            left = iter(found)
            chosen = {row.request_id: list(islice(left, row.num_logits)) for row in needed}
            return verify(step.plan, chosen, self.scheduler.running, self.eos_ids)
        tokens = step.tokens.read()
        if self._next is not None:
            # of a row that cannot go on, whose token nobody needs, the device took token 0
            self._late = tuple([max(token, 0) for token in tokens])
            self._tell(self._late)
        # one that ended with the step before has run a row too many
        pairs = [(row.request_id, token) for row, token in zip(needed, tokens, strict=True)]
        return {i: [None if token < 0 else token] for i, token in pairs if i in self._live}

    def _state(self, request_id: int) -> RequestState:
        # a request may have been cancelled while its step ran; its token is dropped at commit
        return self.scheduler.running.get(request_id) or self.scheduler.finished[request_id]

    def _sampling_rows(self, state: RequestState, drafts: Sequence[int]) -> list[SamplingRow]:
        """Return how the token behind each of a row's logits is chosen, if all drafts before it are right."""
        params, seed, count = state.request.sampling, self._live[state.request_id].seed, len(state.output_ids)
        seen: tuple[int, ...] = ()
        if params.repetition_penalty != 1.0:
            seen = (*state.request.prompt_ids, *state.output_ids)
        return [SamplingRow(params, seed, count + i, seen and (*seen, *drafts[:i])) for i in range(len(drafts) + 1)]

    def _commit(self, plan: StepPlan, tokens: dict[int, list[int | None]]) -> StepResult:
        if not self.mesh.is_leader:
            return StepResult(plan)
        texts, stopped = self._push(tokens)
        if plan.q_len > 1:
            self._kept = tuple([(r.request_id, r.start + len(tokens[r.request_id])) for r in plan.rows if r.num_drafts])
            self.replay.keep(self._kept)
        events = self.scheduler.commit(plan, tokens, stopped)
        for at, (request_id, token, reason, _) in enumerate(events if texts else ()):
            text = texts[request_id].pop(0)
            if reason is not None and (stream := self._live[request_id].text) is not None:
                text += stream.finish()
            events[at] = TokenEvent(request_id, token, reason, text)
        finished = [request_id for request_id in self.scheduler.finished if request_id in self._live]
        return StepResult(plan, tuple(events), tuple([self._complete(request_id) for request_id in finished]))

    def _push(self, tokens: dict[int, list[int | None]]) -> tuple[dict[int, list[str]], set[int]]:
        """Return the text that each new token makes certain, and the requests whose text met a stop string.

        What comes behind such a token is taken out of `tokens`.
        """
        for request_id in self._silent.intersection(tokens) if self._silent else ():
            if tokens[request_id][0] is not None:
                self._silent.remove(request_id)
                self._live[request_id].first_token = time.perf_counter()
        texts: dict[int, list[str]] = {}
        stopped: set[int] = set()
        for request_id, new in () if self.tokenizer is None else tokens.items():
            stream = self._live[request_id].text
            assert stream is not None, "a request without a text beside a tokenizer"
            pieces = texts[request_id] = []
            for token in new:
                pieces.append("" if token is None else stream.push(token))
                if stream.stopped:
                    stopped.add(request_id)
                    tokens[request_id] = new[: len(pieces)]
                    break
        return texts, stopped

    def _complete(self, request_id: int) -> Completion:
        live, state = self._live.pop(request_id), self.scheduler.forget(request_id)
        self._silent.discard(request_id)
        assert state.finish_reason is not None, "an unfinished request among the finished"
        now, count = time.perf_counter(), len(state.output_ids)
        return Completion(
            request_id,
            tuple(state.output_ids),
            state.finish_reason,
            live.seed,
            "" if live.text is None else live.text.text,
            ttft_s=live.first_token - live.added if count else 0.0,
            tpot_s=(now - live.first_token) / (count - 1) if count > 1 else 0.0,
            total_s=now - live.added,
        )

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def generate(
        self,
        prompts: Sequence[tuple[Sequence[int], SamplingParams]] | None,
        on_step: Callable[[StepResult], None] | None = None,
    ) -> list[Completion]:
        """Run prompts to their ends. Called on every rank; rank 0's prompts count, the others' are ignored.

        Args:
            prompts: (token ids, sampling parameters) of each request.
            on_step: called after each step, on every rank.

        Returns:
            The completions in the order of the prompts, on every rank the same but for the texts.

        Raises:
            ValueError: on rank 0, a prompt that `add` refuses; the other ranks raise RuntimeError. Nothing has run.
        """
        ids, error = [], None
        if self.mesh.is_leader:
            try:
                for prompt in prompts or ():
                    ids.append(self.add(*prompt))  # noqa: PERF401 (those added before a refusal are withdrawn)
            except Exception as raised:
                error = raised
                self._withdraw(ids)
        if self.mesh.agree([int(error is not None)]) == [1]:
            raise error or RuntimeError("rank 0 refused a prompt; it says why")
        completions: dict[int, Completion] = {}
        while True:
            result = self.step()
            completions.update((done.request_id, done) for done in result.completions)
            if on_step is not None:
                on_step(result)
            if result.done:
                break
        return self._share([completions[request_id] for request_id in ids])

    def close(self) -> None:
        """Give back what the runner holds, graphs first; on every rank, before the mesh is closed."""
        self.runner.close()

    def _withdraw(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            self.cancel(request_id)
            self._complete(request_id)

    def _share(self, completions: list[Completion]) -> list[Completion]:
        """Tell every rank rank 0's completions, texts left out."""
        words = to_words(completions)
        [total] = self.mesh.agree([len(words)])
        shared: list[int] = []
        for start in range(0, total, _SHARE_WORDS):
            shared += self.mesh.agree(words[start : start + _SHARE_WORDS])
        return completions if self.mesh.is_leader else from_words(shared)


def model_eos_ids(model: Any) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of a model: its generation config's, else its config's."""
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
    return ()

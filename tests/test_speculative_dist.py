"""Speculative rows on real ranks: the tokens of an engine without them, fewer steps, the same pages in the cache."""

import dataclasses

import pytest
import torch

from distdec.config import BackendConfig, CacheConfig, Config, ParallelConfig, SchedulerConfig
from distdec.engine import Engine
from distdec.mesh import Mesh
from distdec.request import FinishReason, PlanKind, SamplingParams
from distdec.runner import Runner
from launch.assets import byte_tokenizer
from launch.parity import load_reference, reference_tokens

pytestmark = pytest.mark.dist

NEW = 24
DRAFTS = 3
# small pages and chunks, so that drafts begin, cross and end both
CONFIG = Config(
    cache=CacheConfig(max_tokens=600, min_chunk=4, max_chunk=16, page_size=2),
    scheduler=SchedulerConfig(
        prefill_slice=16,
        token_budget=48,
        max_rows=5,
        decode_deadline_ms=0,
        reserve_tokens=4,
        num_draft_tokens=DRAFTS,
        ngram_min=1,
    ),
)


def plain(config):
    return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, num_draft_tokens=0))


def prompts():
    """Texts that repeat themselves, two of them with a common start, and one token alone."""
    generator = torch.Generator().manual_seed(11)
    base = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in (9, 31, 4, 17)]
    return [base[0] * 3, base[1], base[2] * 9, base[1][:20] + base[3], [7], base[3] * 6]


def mixed_sampling():
    params = [SamplingParams(NEW + i, ignore_eos=True) for i in range(6)]
    params[1] = dataclasses.replace(params[1], temperature=0.7, seed=5)
    params[2] = dataclasses.replace(params[2], temperature=0.3, top_k=3, seed=6)
    params[3] = dataclasses.replace(params[3], repetition_penalty=1.05)
    params[5] = dataclasses.replace(params[5], temperature=0.2, repetition_penalty=1.02, seed=7)
    return params


class Oracle:
    """Knows what comes and proposes that, or never that."""

    def __init__(self, texts, right):
        self.texts, self.right = texts, right

    def __call__(self, tokens, max_draft):
        known = tokens.tolist()
        [text] = [text for text in self.texts if text[: len(known)] == known]
        coming = text[len(known) : len(known) + max_draft]
        return tuple(coming if self.right else [(token + 1) % 256 for token in coming])


def run_all(folder, config, requests, poison=True, **kwargs):
    """Run requests, all together; then the first one's text and more, alone. Returns what there is to compare."""
    with Mesh.create(device="cpu", timeout_s=60) as mesh:
        engine = Engine(Runner.load(folder, mesh, config), config.scheduler, **kwargs)
        if poison:
            engine.cache.pool.k.fill_(float("nan"))
            engine.cache.pool.v.fill_(float("nan"))
        plans = []

        def on_step(result):
            plans.append(result.plan)
            engine.cache.kv.check_integrity()
            engine.scheduler.check_integrity()
            for row in result.plan.rows:
                if row.num_drafts and mesh.is_leader:
                    state = engine.scheduler.running.get(row.request_id)
                    # what was rejected is gone when the step is over
                    assert state is None or engine.cache.kv.length(row.request_id) == state.num_computed

        done = engine.generate(requests, on_step)
        pages, hits = engine.cache.kv.stats().published_pages, engine.scheduler.stats.hit_tokens
        again = [*requests[0][0], *done[0].token_ids, 3, 4]
        done += engine.generate([(again, SamplingParams(4, ignore_eos=True))], on_step)
        counts, stats = engine.scheduler.stats, engine.cache.kv.stats()
        engine.close()
        held = (stats.free_frames, stats.cached_frames, stats.published_pages, stats.num_sequences)
        return {
            "tokens": [list(one.token_ids) for one in done],
            "reasons": [one.finish_reason for one in done],
            "plans": plans,
            "pages": pages,
            "hits": counts.hit_tokens - hits,
            "held": held,
            "counts": counts,
        }


@pytest.fixture(scope="module")
def alone(folder):
    """Each mixed request by an engine of one rank without drafts; greedy ones are those of transformers."""
    requests = list(zip(prompts(), mixed_sampling(), strict=True))
    engine = Engine(Runner.load(folder, Mesh.single(), plain(CONFIG)), plain(CONFIG).scheduler)
    tokens = [list(engine.generate([request])[0].token_ids) for request in requests]
    model = load_reference(folder, "float32", "cpu")
    for i in (0, 4):
        assert tokens[i] == reference_tokens(model, prompts()[i], NEW + i)
    return tokens


GRAPHS = dataclasses.replace(CONFIG, backend=BackendConfig(graphs="on"))
# a cache for two of the six; steps without drafts attend to their new tokens apart, those with drafts do not
SMALL = dataclasses.replace(
    CONFIG,
    cache=dataclasses.replace(CONFIG.cache, max_tokens=130),
    parallel=ParallelConfig(overlap="store"),
)


@pytest.mark.parametrize(
    ("num_ranks", "config"),
    [(1, CONFIG), (2, CONFIG), (3, SMALL), (2, GRAPHS)],
    ids=["1 rank", "2 ranks", "3 ranks, small cache", "2 ranks, graphs"],
)
def test_tokens_are_those_without_drafts_on_every_rank(ranks, folder, alone, num_ranks, config):
    requests = list(zip(prompts(), mixed_sampling(), strict=True))
    results = ranks(num_ranks).run(run_all, folder, config, requests, timeout_s=240)
    for result in results:
        assert result["tokens"][:6] == alone
        assert result["held"] == results[0]["held"]
        assert [plan.encode() for plan in result["plans"]] == [plan.encode() for plan in results[0]["plans"]]
    counts, plans = results[0]["counts"], results[0]["plans"]
    assert results[0]["held"][3] == 0
    assert counts.drafted_tokens > counts.accepted_tokens > 10
    assert (counts.preemptions > 0) == (config is SMALL)
    drafted = [plan for plan in plans if any(row.num_drafts for row in plan.rows)]
    assert config is SMALL or any(plan.num_decode < len(plan.rows) for plan in drafted), "no drafts beside a prompt"
    assert any({row.num_drafts for row in plan.rows[: plan.num_decode]} >= {0, DRAFTS} for plan in drafted)
    assert all(plan.num_tokens <= config.scheduler.token_budget for plan in plans)


def steps_of(result):
    """Steps with rows of the first call."""
    first = next(i for i, plan in enumerate(result["plans"]) if plan.kind is PlanKind.DONE)
    return [plan for plan in result["plans"][:first] if plan.rows]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_right_drafts_save_steps_and_wrong_ones_change_nothing(ranks, folder, alone, num_ranks):
    requests = [(prompts()[0], SamplingParams(NEW, ignore_eos=True))]
    text = prompts()[0] + alone[0] + [0] * DRAFTS
    base = ranks(num_ranks).run(run_all, folder, plain(CONFIG), requests, timeout_s=120)[0]
    for right in (True, False):
        # the second text, behind the first, is not known to it
        oracle = Oracle([text], right)
        results = ranks(num_ranks).run(proposed_by, folder, CONFIG, requests, oracle, timeout_s=120)
        for result in results:
            assert result["tokens"] == base["tokens"]
            # not a page more, and none less: the last page of the output is found again
            assert (result["pages"], result["held"]) == (base["pages"], base["held"])
        assert results[0]["hits"] == base["hits"] == (len(text) - DRAFTS - 1) // 2 * 2
        # two slices of the prompt, the second of which brings a token; then 1 + 3 tokens a step, or 1
        steps = len(steps_of(results[0])) - 1
        assert steps == 1 + (-(-(NEW - 1) // (DRAFTS + 1)) if right else NEW - 1)
        counts = results[0]["counts"]
        # a row drafts no further than the last token but one
        drafted = NEW - 1 - (steps - 1) if right else sum(min(DRAFTS, NEW - 2 - i) for i in range(NEW - 2))
        assert (counts.drafted_tokens, counts.accepted_tokens) == (drafted, drafted if right else 0)
        assert counts.acceptance_rate == float(right)


def proposed_by(folder, config, requests, oracle):
    def propose(tokens, max_draft):
        # of the second call nothing is known
        return oracle(tokens, max_draft) if len(tokens) < len(requests[0][0]) + NEW else ()

    return run_all(folder, config, requests, propose=propose)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_penalty_counts_the_drafts_before_a_position(folder, temperature):
    # strong enough that a token hardly comes twice, so that what was seen decides
    params = SamplingParams(NEW, temperature=temperature, repetition_penalty=3.0, seed=3, ignore_eos=True)
    base = Engine(Runner.load(folder, Mesh.single(), plain(CONFIG)), plain(CONFIG).scheduler)
    [want] = base.generate([(prompts()[0], params)])
    oracle = Oracle([prompts()[0] + list(want.token_ids) + [0] * DRAFTS], True)
    engine = Engine(Runner.load(folder, Mesh.single(), CONFIG), CONFIG.scheduler, propose=oracle)
    [got] = engine.generate([(prompts()[0], params)])
    assert got.token_ids == want.token_ids
    assert engine.scheduler.stats.acceptance_rate == 1.0


def endings(folder, config, eos, stop, propose):
    """Run three requests that end early: by token, by text, and at a token that one of them ignores."""
    engine = Engine(
        Runner.load(folder, Mesh.single(), config),
        config.scheduler,
        eos_ids=eos,
        tokenizer=byte_tokenizer(),
        propose=propose,
    )
    requests = [
        SamplingParams(NEW),
        SamplingParams(NEW, ignore_eos=True, stop=stop),
        SamplingParams(NEW - 2, ignore_eos=True),
    ]
    events, steps = {}, 0

    def on_step(result):
        nonlocal steps
        steps += bool(result.plan.rows)
        for event in result.events:
            events.setdefault(event.request_id, []).append(event)

    done = engine.generate([(prompts()[4], params) for params in requests], on_step)
    for one in done:
        of_it = events[one.request_id]
        assert tuple(event.token_id for event in of_it) == one.token_ids
        assert "".join(event.text for event in of_it) == one.text
        assert [event.finish_reason for event in of_it] == [None] * (len(of_it) - 1) + [one.finish_reason]
    engine.cache.kv.check_integrity()
    return [(list(one.token_ids), one.finish_reason, one.text) for one in done], engine.cache.kv.stats(), steps


@pytest.mark.parametrize("end", range(2, 8))
def test_an_accepted_run_ends_at_the_right_token(folder, alone, end):
    # whatever part of an accepted run the end falls on, runs being of four tokens behind the first
    tokens = alone[4][:NEW]
    text = byte_tokenizer().decode(tokens)
    stop = (sorted(set(text) - {"\ufffd"}, key=text.index)[end],)
    eos = (tokens[end],)
    want, books, most = endings(folder, plain(CONFIG), eos, stop, None)
    oracle = Oracle([prompts()[4] + tokens + [0] * DRAFTS], True)
    got, mine, steps = endings(folder, CONFIG, eos, stop, oracle)
    assert got == want
    assert [reason for _, reason, _ in got] == [FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH]
    assert len(got[0][0]) == end + 1
    assert (mine.published_pages, mine.num_sequences) == (books.published_pages, 0)
    assert steps < most


def test_unusable_logits_behind_a_draft_end_the_request_where_they_would_without(folder, alone):
    """NaN at a position that only an accepted draft leads to: the tokens before it stay."""
    engine = Engine(
        Runner.load(folder, Mesh.single(), CONFIG),
        CONFIG.scheduler,
        propose=Oracle([prompts()[0] + alone[0] + [0] * DRAFTS], True),
    )
    ready = engine.runner.ready
    calls = 0

    def damaged():
        nonlocal calls
        logits = ready()
        calls += 1
        if calls == 2:
            logits[2] = float("nan")
        return logits

    engine.runner.ready = damaged
    [done] = engine.generate([(prompts()[0], SamplingParams(NEW, ignore_eos=True))])
    assert done.finish_reason is FinishReason.NUMERICS
    assert list(done.token_ids) == alone[0][:3]
    assert engine.cache.kv.stats().published_pages == 0, "nobody shall find its pages"


def failed_plan(folder):
    """Fail to plan right behind a step with wrong drafts, and go on."""
    with Mesh.create(device="cpu", timeout_s=60) as mesh:
        wrong = lambda tokens, most: (int(tokens[-1]) ^ 1,) * most  # noqa: E731
        engine = Engine(Runner.load(folder, mesh, CONFIG), CONFIG.scheduler, propose=wrong)
        if mesh.is_leader:
            engine.add(prompts()[0], SamplingParams(NEW, ignore_eos=True))
        drafted = 0
        while not drafted:
            drafted = sum(row.num_drafts for row in engine.step().plan.rows)
        before = engine.cache.kv.length(0)
        if mesh.is_leader:
            places, engine.scheduler.places = engine.scheduler.places, None
        with pytest.raises((AttributeError, RuntimeError), match=r"NoneType|rank 0 could not plan"):
            engine.step()
        if mesh.is_leader:
            engine.scheduler.places = places
        [start] = [row.start for row in engine.step().plan.rows]
        return before, start, engine.cache.kv.length(0)


def test_a_plan_that_fails_does_not_lose_what_is_to_be_dropped(ranks, folder):
    (before, start, after), (before_1, _, after_1) = ranks(2).run(failed_plan, folder, timeout_s=60)
    # the other rank hears of it with the next plan
    assert (before, before_1) == (start, start + DRAFTS)
    assert (after, after_1) == (start + 1, start + 1 + DRAFTS)


def test_a_proposer_without_drafts_to_make_is_refused(folder):
    runner = Runner.load(folder, Mesh.single(), plain(CONFIG))
    with pytest.raises(ValueError, match="num_draft_tokens=0"):
        Engine(runner, plain(CONFIG).scheduler, propose=lambda tokens, most: ())
    assert Engine(runner, plain(CONFIG).scheduler).scheduler.lookahead
    assert not Engine(runner, CONFIG.scheduler).scheduler.lookahead


def refused_drafts(folder, found, message):
    """Run with a proposer of nonsense, give the request up, and run it again without drafts."""
    with Mesh.create(device="cpu", timeout_s=60) as mesh:
        answer = [found]
        engine = Engine(Runner.load(folder, mesh, CONFIG), CONFIG.scheduler, propose=lambda tokens, most: answer[0])
        # one token: the step that admits it asks for drafts already
        prompts = [([7], SamplingParams(NEW, ignore_eos=True))]
        with pytest.raises((ValueError, RuntimeError), match=message if mesh.is_leader else "rank 0 could not plan"):
            engine.generate(prompts)
        if mesh.is_leader:
            engine.cancel(0)
        while not engine.step().done:
            pass
        answer[0] = ()
        [done] = engine.generate(prompts)
        return list(done.token_ids), engine.cache.kv.stats()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ((1 << 20,), "not all in the vocabulary, 0 to"),
        ((3, -1), "not all in the vocabulary"),
        ((1.0,), "must return token ids"),
        (None, "must return token ids, got None"),
        ((2**70,), "not all in the vocabulary"),
    ],
)
def test_drafts_that_are_no_tokens_are_refused_and_leave_the_engine_usable(ranks, folder, alone, found, message):
    results = ranks(2).run(refused_drafts, folder, found, message, timeout_s=60)
    assert results[0] == results[1]
    tokens, books = results[0]
    assert tokens[:NEW] == alone[4][:NEW]
    assert books.num_sequences == 0


def test_drafts_may_be_any_row_of_token_ids(folder, alone):
    oracle = Oracle([prompts()[4] + alone[4] + [0] * DRAFTS], True)
    engine = Engine(
        Runner.load(folder, Mesh.single(), CONFIG),
        CONFIG.scheduler,
        # more than is asked for, too
        propose=lambda tokens, most: torch.tensor(oracle(tokens, most + 1)),
    )
    [done] = engine.generate([(prompts()[4], SamplingParams(NEW, ignore_eos=True))])
    assert list(done.token_ids) == alone[4][:NEW]
    assert engine.scheduler.stats.acceptance_rate == 1.0

"""The engine on real ranks: tokens of transformers, the same everywhere; real shards; failures that stay apart."""

import dataclasses

import pytest
import torch

from distdec.config import CacheConfig, Config, ParallelConfig, SchedulerConfig
from distdec.engine import Engine
from distdec.mesh import Mesh
from distdec.request import FinishReason, SamplingParams
from distdec.runner import Runner
from launch.assets import byte_tokenizer, tiny_model_folder
from launch.parity import load_reference, reference_tokens

pytestmark = pytest.mark.dist

# small chunks and slices, so that short prompts cross every edge; lengths are pairwise different
CONFIG = Config(
    cache=CacheConfig(max_tokens=400, min_chunk=4, max_chunk=16, page_size=2),
    scheduler=SchedulerConfig(prefill_slice=16, token_budget=40, max_rows=3, decode_deadline_ms=0),
)
LENGTHS = (5, 37, 1, 60)
NEW = 10
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


def make_prompts():
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(folder):
    model = load_reference(folder, "float32", "cpu")
    return [reference_tokens(model, prompt, NEW) for prompt in make_prompts()]


def make_engine(folder, mesh, merge="auto", overlap="none", **kwargs):
    config = dataclasses.replace(CONFIG, parallel=ParallelConfig(tp=mesh.tp_size, merge=merge, overlap=overlap))
    return Engine(Runner.load(folder, mesh, config), config.scheduler, **kwargs)


def mesh_of(tp=1):
    return Mesh.create(tp=tp, device="cpu", timeout_s=20)


def freed(engine):
    """Check that nothing is held any more, and return this rank's free frames."""
    engine.cache.kv.check_integrity()
    engine.scheduler.check_integrity()
    stats = engine.cache.kv.stats()
    assert stats.num_sequences == 0
    assert sum(stats.tokens) == 0
    return tuple(free + cached for free, cached in zip(stats.free_frames, stats.cached_frames, strict=True))


def generate_all(folder, merge, tp, overlap):
    with mesh_of(tp) as mesh:
        engine = make_engine(folder, mesh, merge, overlap, tokenizer=byte_tokenizer() if mesh.is_leader else None)
        shapes = []
        handle = engine.runner.model.register_forward_hook(
            lambda module, args, kwargs, out: shapes.append((kwargs["input_ids"].shape[1], out.logits.shape[1])),
            with_kwargs=True,
        )
        done = engine.generate([(prompt, GREEDY) for prompt in make_prompts()] if mesh.is_leader else None)
        handle.remove()
        layers, merges = engine.runner.num_layers, engine.runner.attention.merge.calls
        freed(engine)
        return {
            "done": done,
            "shapes": shapes,
            "per_layer": merges / (engine.runner.num_forwards * layers),
            "pool_bytes": engine.cache.pool.bytes,
        }


@pytest.mark.parametrize(
    ("num_ranks", "tp", "merge", "collectives", "overlap"),
    [
        (2, 1, "all_reduce", 2, "none"),
        (2, 1, "reduce_scatter", 2, "both"),
        (3, 1, "all_to_all", 1, "none"),
        (3, 1, "all_gather", 1, "store"),
        (4, 2, "auto", 1, "none"),
    ],
)
def test_tokens_are_those_of_transformers_on_every_rank(
    ranks, folder, expected, num_ranks, tp, merge, collectives, overlap
):
    results = ranks(num_ranks).run(generate_all, folder, merge, tp, overlap, timeout_s=120)
    for rank, result in enumerate(results):
        assert [list(done.token_ids) for done in result["done"]] == expected
        assert [done.request_id for done in result["done"]] == [0, 1, 2, 3]
        assert {done.finish_reason for done in result["done"]} == {FinishReason.LENGTH}
        assert all(0 < done.ttft_s < done.total_s for done in result["done"])
        assert result["per_layer"] == collectives
        # a step holds a slice, whatever the prompt's length, and logits only of the rows that sample
        assert result["shapes"] == results[0]["shapes"]
        assert max(tokens for tokens, _ in result["shapes"]) <= CONFIG.scheduler.token_budget
        assert max(logits for _, logits in result["shapes"]) <= CONFIG.scheduler.max_rows
        assert sum(logits for _, logits in result["shapes"]) == NEW * len(LENGTHS)
        assert [bool(done.text) for done in result["done"]] == [rank == 0] * 4
    assert results[0]["done"][1].text == byte_tokenizer().decode(expected[1])


def shards_of_one(folder):
    """Prefill one prompt; return what this rank holds of it."""
    with mesh_of() as mesh:
        engine = make_engine(folder, mesh)
        engine.cache.pool.k.fill_(float("nan"))
        engine.cache.pool.v.fill_(float("nan"))
        if mesh.is_leader:
            engine.add(make_prompts()[3], GREEDY)
        for _ in range(4):
            engine.step()
        kv, rank = engine.cache.kv, mesh.kvp_rank
        slots = kv.slots(0, 0, kv.length(0), rank)
        owned = [position for position, slot in enumerate(slots) if slot >= 0]
        k, v = engine.cache.pool.layer(1)
        written = [bool(k[slot].isfinite().all() and v[slot].isfinite().all()) for slot in slots if slot >= 0]
        free_of = set(range(k.shape[0])) - set(slots.tolist())
        untouched = all(k[slot].isnan().all() and v[slot].isnan().all() for slot in free_of)
        if mesh.is_leader:
            engine.cancel(0)
        engine.step()
        freed(engine)
        return owned, all(written), untouched, kv.stats().free_frames


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_position_is_stored_once_and_shards_are_even(ranks, folder, num_ranks):
    results = ranks(num_ranks).run(shards_of_one, folder, timeout_s=120)
    owned = [owned for owned, _, _, _ in results]
    assert sorted(position for part in owned for position in part) == list(range(60))
    assert max(map(len, owned)) - min(map(len, owned)) <= CONFIG.cache.max_chunk
    for _, written, untouched, _ in results:
        assert written
        assert untouched, "a token was stored where no view says"
    assert len({free for _, _, _, free in results}) == 1, "the ranks disagree about what is free"


def damaged(folder, damage):
    """Generate with one rank's shard of one request damaged after its prefill; return all completions."""
    with mesh_of() as mesh:
        engine = make_engine(folder, mesh)
        victim = 1

        def on_step(result):
            for row in result.plan.rows:
                at_end = row.start + row.num_tokens == LENGTHS[victim]
                if row.request_id == victim and at_end and mesh.rank == 1 and damage is not None:
                    slots = engine.cache.kv.slots(victim, 0, LENGTHS[victim], 1)
                    k, v = engine.cache.pool.layer(0)
                    for slot in slots[slots >= 0].tolist():
                        k[slot], v[slot] = damage, damage

        done = engine.generate([(prompt, GREEDY) for prompt in make_prompts()], on_step)
        freed(engine)
        return done


def test_a_lost_shard_changes_its_own_request_only(ranks, folder, expected):
    done = ranks(2).run(damaged, folder, 0.0, timeout_s=120)[0]
    got = [list(one.token_ids) for one in done]
    assert got[1] != expected[1], "the shard of rank 1 is not what attention reads"
    assert got[1][0] == expected[1][0], "the first token comes from the prefill, before the damage"
    assert [got[i] for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]


def test_nan_in_one_requests_cache_fails_that_request_alone(ranks, folder, expected):
    for done in ranks(2).run(damaged, folder, float("nan"), timeout_s=120):
        assert done[1].finish_reason is FinishReason.NUMERICS
        assert list(done[1].token_ids) == expected[1][:1]
        assert [list(done[i].token_ids) for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]


def sampled(folder, num_calls):
    with mesh_of() as mesh:
        engine = make_engine(folder, mesh)
        params = [SamplingParams(NEW, temperature=0.9, top_p=0.95, seed=7 + i, ignore_eos=True) for i in range(4)]
        prompts = list(zip(make_prompts(), params, strict=True))
        if num_calls == 1:
            return [done.token_ids for done in engine.generate(prompts)]
        # one by one and the other way round, so that neither batch nor request id is the same
        return [engine.generate([prompt])[0].token_ids for prompt in prompts[::-1]][::-1]


def test_samples_depend_on_the_seed_alone(ranks, folder):
    together = ranks(2).run(sampled, folder, 1, timeout_s=120)
    assert together[0] == together[1]
    assert ranks(3).run(sampled, folder, 4, timeout_s=120)[0] == together[0]
    assert len({tokens[:4] for tokens in together[0]}) == 4


def arrivals_and_cancellations(folder):
    """Requests that come while others run and are cancelled in every state; the last one runs to its end."""
    with mesh_of() as mesh:
        engine = make_engine(folder, mesh)
        start = engine.cache.kv.stats().free_frames
        prompts = make_prompts()
        done, step = {}, 0
        while True:
            if mesh.is_leader:
                if step == 0:
                    ids = [engine.add(prompts[i], GREEDY) for i in (3, 1, 0, 0)]  # the last one has to wait
                elif step == 1:
                    engine.cancel(ids[0])  # in the middle of its prompt
                    engine.cancel(ids[3])  # waiting
                elif step == 4:
                    ids += [engine.add(prompts[2], GREEDY), engine.add(prompts[2], GREEDY)]
                elif step == 7:
                    engine.cancel(ids[2])  # decoding
                    engine.cancel(ids[4])  # decoding too: two are freed by one plan
            result = engine.step()
            done.update((one.request_id, one) for one in result.completions)
            step += 1
            if result.done:
                break
        reasons = {i: (one.finish_reason.value, len(one.token_ids)) for i, one in done.items()}
        return reasons, list(done[5].token_ids) if mesh.is_leader else None, freed(engine) == start


def test_cancelled_requests_leave_nothing_behind_on_any_rank(ranks, folder, expected):
    results = ranks(2).run(arrivals_and_cancellations, folder, timeout_s=120)
    reasons, last, _ = results[0]
    assert reasons[0] == ("cancelled", 0)
    assert reasons[3] == ("cancelled", 0)
    assert reasons[2][0] == "cancelled"
    assert 0 < reasons[2][1] < NEW
    assert reasons[4][0] == "cancelled"
    assert 0 < reasons[4][1] < NEW
    assert reasons[1] == reasons[5] == ("length", NEW)
    assert last == expected[2]
    assert all(clean for _, _, clean in results)


def message_of(call, *args):
    try:
        call(*args)
    except (ValueError, RuntimeError, AttributeError) as error:
        return str(error)
    return "nothing was raised"


def refusals(folder):
    """What rank 0 refuses or cannot plan ends the call on every rank, and the engine goes on afterwards."""
    with mesh_of() as mesh:
        engine = make_engine(folder, mesh)
        bad = ([], [256 + 99], [-1], [1] * 500)
        told = [message_of(engine.generate, [([1, 2, 3], GREEDY), (prompt, GREEDY)]) for prompt in bad]
        assert not engine.scheduler.has_work, "what was added beside a refused prompt is still there"
        if mesh.is_leader:
            engine.scheduler.places.cache = None  # a fault in planning
            engine.add([1, 2], GREEDY)
        told.append(message_of(engine.step))
        if mesh.is_leader:
            engine.scheduler.places.cache = engine.cache.kv
        engine.generate([])
        done = engine.generate([(prompt, GREEDY) for prompt in make_prompts()])
        return told, [list(one.token_ids) for one in done], freed(engine)


def test_what_rank_0_refuses_ends_the_call_on_every_rank(ranks, folder, expected):
    (told, tokens, _), (told_1, tokens_1, _) = ranks(2).run(refusals, folder, timeout_s=120)
    assert "the prompt is empty" in told[0]
    assert "token id 355 is outside the vocabulary (legal: 0 to 258)" in told[1]
    assert "token id -1 is outside the vocabulary" in told[2]
    assert "needs 509 tokens of KV cache, and the cache holds 400 over 2 ranks. It would fit on 3 ranks" in told[3]
    assert len(told) == len(told_1) == 5
    assert told_1[:4] == ["rank 0 refused a prompt; it says why"] * 4
    assert told_1[4] == "rank 0 could not plan the step; it says why"
    assert tokens == tokens_1 == expected


def test_a_stop_string_ends_a_request_and_its_text(folder, expected):
    tokenizer = byte_tokenizer()
    engine = make_engine(folder, Mesh.single(), tokenizer=tokenizer)
    prompt, tokens = make_prompts()[1], expected[1]
    # any bytes may come, so stop at the first readable character of the expected text
    text = tokenizer.decode(tokens)
    stop = next(character for character in text if character != "\ufffd")
    stopped = dataclasses.replace(GREEDY, stop=(stop,))
    [done] = engine.generate([(prompt, stopped)])
    assert done.finish_reason is FinishReason.STOP
    assert done.text == text[: text.index(stop)]


def test_stop_strings_need_a_tokenizer(folder):
    engine = make_engine(folder, Mesh.single())
    with pytest.raises(ValueError, match="stop strings need an engine with a tokenizer"):
        engine.add([1, 2], SamplingParams(stop=("x",)))
    assert engine.eos_ids == {257}


def test_the_model_s_eos_ends_a_request(folder, expected):
    first = make_engine(folder, Mesh.single())
    engine = Engine(first.runner, CONFIG.scheduler, eos_ids=(expected[3][2],))
    done = engine.generate([(make_prompts()[3], SamplingParams(NEW)), (make_prompts()[0], GREEDY)])
    assert done[0].finish_reason is FinishReason.EOS
    assert list(done[0].token_ids) == expected[3][: expected[3].index(expected[3][2]) + 1]
    assert list(done[1].token_ids) == expected[0]


def test_a_model_with_tied_embeddings_loads_and_gives_its_tokens(tmp_path):
    tied = str(
        tiny_model_folder(
            tmp_path, tie_word_embeddings=True, hidden_size=144, num_attention_heads=9, num_key_value_heads=3
        )
    )
    engine = make_engine(tied, Mesh.single())
    reference = load_reference(tied, "float32", "cpu")
    done = engine.generate([(prompt, GREEDY) for prompt in make_prompts()])
    assert [list(one.token_ids) for one in done] == [reference_tokens(reference, p, NEW) for p in make_prompts()]

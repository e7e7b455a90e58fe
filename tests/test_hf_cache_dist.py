"""`model.generate` on two ranks that each hold a part of every sequence, against eager transformers in one process."""

import copy

import pytest
import torch
from hf_models import FURTHER, MAIN, left_padded, tiny_model

pytestmark = pytest.mark.dist

# the first body on a worker imports transformers, which takes a while on busy cores
TIMEOUT_S = 150.0
NEW_TOKENS = 12
# longer than every window, pairwise different, on both sides of a chunk edge
LENGTHS = (23, 9, 16)
OPTIONS = {"max_tokens": 4096, "min_chunk": 4, "max_chunk": 8, "page_size": 4}


def make(family, **options):
    """An eager model, its twin on a sharded cache, the cache. Three tokens of four go to rank 0."""
    from distdec.hf import DistributedCache
    from distdec.mesh import Mesh

    mesh = Mesh.create()
    eager, model = tiny_model(family, "eager"), tiny_model(family, "distdec")
    cache = DistributedCache(model, mesh, **{**OPTIONS, "weights": (3, 1), **options})
    cache.core.pool.k.fill_(float("nan"))
    cache.core.pool.v.fill_(float("nan"))
    return eager, model, cache


def greedy(model, inputs, cache=None, **options):
    """Greedy tokens after the prompt, and each step's logits."""
    from distdec.hf import cache_argument

    kept = {} if cache is None else cache_argument(cache)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "output_logits": True, **options}
    out = model.generate(**inputs, **kept, **settings, return_dict_in_generate=True)
    logits = None if out.logits is None else torch.stack(out.logits)
    return out.sequences[:, inputs["input_ids"].shape[1] :], logits


def check_equal(got, want):
    """Same tokens and, within float32 rounding through three layers, the same logits."""
    assert got[0].tolist() == want[0].tolist()
    if got[1] is not None:
        scale = want[1].abs().max()
        assert (got[1] - want[1]).abs().max() <= 2e-5 * scale, float((got[1] - want[1]).abs().max() / scale)


def run_family(family):
    eager, model, cache = make(family)
    inputs = left_padded(LENGTHS)
    check_equal(greedy(model, inputs, cache), greedy(eager, inputs))
    # the last token of a generation is not stored, pads never are
    stored = sum(LENGTHS) + len(LENGTHS) * (NEW_TOKENS - 1)
    return cache.core.local_tokens(), stored, cache.get_seq_length()


@pytest.mark.parametrize("family", MAIN)
def test_generate_equals_eager(ranks, family):
    (first, stored, columns), (second, _, _) = ranks(2).run(run_family, family, timeout_s=TIMEOUT_S)
    assert first + second == stored
    assert first > second > 0
    assert columns == max(LENGTHS) + NEW_TOKENS - 1


@pytest.mark.slow
@pytest.mark.parametrize("family", FURTHER)
def test_generate_equals_eager_on_further_families(ranks, family):
    test_generate_equals_eager(ranks, family)


def run_few_heads(kv_heads):
    from distdec.hf import DistributedCache
    from distdec.hf.parallel import shard
    from distdec.mesh import Mesh

    mesh = Mesh.create()
    eager = tiny_model("qwen2", "eager", num_key_value_heads=kv_heads)
    model = shard(tiny_model("qwen2", "distdec", num_key_value_heads=kv_heads), mesh)
    cache = DistributedCache(model, mesh, **OPTIONS)
    inputs = left_padded((61, 33, 47))
    check_equal(greedy(model, inputs, cache), greedy(eager, inputs))
    return cache.core.local_tokens()


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_four_ranks_share_fewer_kv_heads_without_a_copy(ranks, kv_heads):
    held = ranks(4).run(run_few_heads, kv_heads, timeout_s=TIMEOUT_S)
    # each token once, and no rank above its quarter by more than a chunk a row
    assert sum(held) == 61 + 33 + 47 + 3 * (NEW_TOKENS - 1)
    assert max(held) <= sum(held) / 4 + 3 * 8


def run_without_rank_1(family):
    from distdec.ops.partial import Partial

    eager, model, cache = make(family)
    merge = cache.attention.merge
    if cache.core.mesh.rank == 1:
        empty = lambda p: Partial(torch.zeros_like(p.out), torch.full_like(p.lse, float("-inf")))  # noqa: E731
        cache.attention.merge = lambda partial, **kw: merge(empty(partial), **kw)
    inputs = left_padded(LENGTHS)
    return greedy(model, inputs, cache)[0].tolist() == greedy(eager, inputs)[0].tolist()


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_lost_shard_changes_the_tokens(ranks, family):
    assert ranks(2).run(run_without_rank_1, family, timeout_s=TIMEOUT_S) == [False, False]


def run_without_mask_function(family):
    from transformers import AttentionMaskInterface

    eager, model, cache = make(family)
    inputs = left_padded(LENGTHS)
    made = AttentionMaskInterface._global_mapping.pop("distdec")
    try:
        got = greedy(model, inputs, cache)[0].tolist()
    finally:
        AttentionMaskInterface._global_mapping["distdec"] = made
    return [a == b for a, b in zip(got, greedy(eager, inputs)[0].tolist(), strict=True)]


def test_without_the_mask_function_padded_rows_go_wrong(ranks):
    for rows in ranks(2).run(run_without_mask_function, "llama", timeout_s=TIMEOUT_S):
        assert rows == [True, False, False]


def run_ways(family):
    """All the ways of `generate` on one pair of models."""
    eager, model, cache = make(family, min_chunk=1, max_chunk=4, page_size=1)
    inputs = left_padded(LENGTHS)
    single = left_padded(LENGTHS[:1])
    # a text that repeats itself, so that looking n-grams up in the prompt finds and loses candidates
    repeats = {k: torch.cat([v, v], 1) for k, v in single.items()}
    beams = {"num_beams": 3, "output_logits": False}
    # releases before 5.10 look for the end of text in every draft
    plain = {"output_logits": False, "eos_token_id": 2}

    check_equal(greedy(model, inputs, cache, **beams), greedy(eager, inputs, **beams))
    cache.reset()
    sampled = {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.5, "output_logits": False}
    check_equal(greedy(model, inputs, cache, **sampled), greedy(eager, inputs, **sampled))
    cache.reset()
    # chunks of 5: the first two hold nothing but pads of the 9-token row
    check_equal(greedy(model, inputs, cache, prefill_chunk_size=5), greedy(eager, inputs))
    cache.reset()
    want = greedy(eager, repeats, **plain)
    check_equal(greedy(model, repeats, cache, prompt_lookup_num_tokens=3, **plain), want)
    cache.reset()
    # a draft model with the same weights: every draft is accepted, while those of the n-grams are mostly taken back
    draft = tiny_model(family, "eager")
    check_equal(greedy(model, repeats, cache, assistant_model=draft, **plain), want)
    cache.reset()
    cache.core.kv.check_integrity()
    return cache.core.local_tokens(), cache.core.kv.sequences()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_every_way_of_generate_equals_eager(ranks, family):
    # mistral: a window shorter than the prompt under beams, chunks of the prompt and taken-back drafts
    assert ranks(2).run(run_ways, family, timeout_s=TIMEOUT_S) == [(0, []), (0, [])]


def run_resume(family):
    eager, model, cache = make(family)
    inputs = left_padded(LENGTHS)
    first = greedy(model, inputs, cache)[0]
    turn = left_padded((5, 5, 5), seed=7)
    longer = {
        "input_ids": torch.cat([inputs["input_ids"], first, turn["input_ids"]], 1),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones_like(first), turn["attention_mask"]], 1),
    }
    twin = copy.deepcopy(cache)
    want = greedy(eager, longer)
    before = cache.core.local_tokens()
    check_equal(greedy(model, longer, cache), want)
    # the twin shares what was there, and is not disturbed by what the first one added
    check_equal(greedy(model, longer, twin), want)
    twin.reset()
    cache.reset()
    cache.core.kv.check_integrity()
    return before, cache.core.local_tokens()


def test_a_filled_cache_is_continued(ranks):
    for before, after in ranks(2).run(run_resume, "qwen2", timeout_s=TIMEOUT_S):
        assert before > 0
        assert after == 0


def run_own_loop(family):
    """A loop of the user's own, with gradients left on as such loops often do, and columns taken back in the middle."""
    eager, model, cache = make(family)
    inputs = left_padded(LENGTHS)
    want = greedy(eager, inputs)[0]
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    tokens = []
    for step in range(NEW_TOKENS):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, **{cache.keyword: cache})
        if step in (3, 4):
            # as if the step were a draft that was not accepted: it is computed again
            cache.crop(-1) if step == 3 else cache.crop(cache.get_seq_length() - 1)
            out = model(input_ids=ids, attention_mask=mask, position_ids=positions, **{cache.keyword: cache})
        ids = out.logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        tokens.append(ids)
    assert torch.cat(tokens, 1).tolist() == want.tolist()
    with pytest.raises(RuntimeError, match="inference"):
        out.logits.sum().backward()
    return True


def test_a_loop_of_the_users_own_equals_eager(ranks):
    assert ranks(2).run(run_own_loop, "gemma2", timeout_s=TIMEOUT_S) == [True, True]


def run_sharded_weights(family, kvp, tp):
    from distdec.hf import DistributedCache
    from distdec.hf.parallel import shard
    from distdec.mesh import Mesh

    mesh = Mesh.create(kvp, tp)
    model = shard(tiny_model(family, "distdec"), mesh)
    cache = DistributedCache(model, mesh, **OPTIONS)
    inputs = left_padded(LENGTHS)
    check_equal(greedy(model, inputs, cache), greedy(tiny_model(family, "eager"), inputs))
    return cache.core.pool.k.shape[2], cache.core.local_tokens()


@pytest.mark.parametrize(("family", "kvp", "tp"), [("llama", 2, 1), ("llama", 1, 2), ("gpt_oss", 1, 2)])
def test_weights_may_be_sharded_too(ranks, family, kvp, tp):
    stored = sum(LENGTHS) + len(LENGTHS) * (NEW_TOKENS - 1)
    (heads, first), (_, second) = ranks(2).run(run_sharded_weights, family, kvp, tp, timeout_s=TIMEOUT_S)
    assert heads == 2 // tp
    assert (first + second, first == second) == ((stored, False) if kvp == 2 else (2 * stored, True))


def run_full(family):
    from distdec.cache.kv_cache import CacheFull

    eager, model, cache = make(family, max_tokens=None, num_frames=(6, 6))
    inputs = left_padded(LENGTHS)
    with pytest.raises(CacheFull, match="frames"):
        greedy(model, inputs, cache)
    # nothing was reserved: what fits still runs, with another number of rows
    assert (cache.get_seq_length(), cache.core.local_tokens()) == (0, 0)
    small = left_padded((9, 7))
    check_equal(greedy(model, small, cache, max_new_tokens=4), greedy(eager, small, max_new_tokens=4))
    return True


def test_a_full_pool_is_said_on_every_rank_and_leaves_the_cache_usable(ranks):
    assert ranks(2).run(run_full, "llama", timeout_s=TIMEOUT_S) == [True, True]


def run_differing():
    import torch.distributed as dist

    with pytest.raises(RuntimeError, match="not the same on all ranks"):
        make("llama", max_tokens=4096 + 64 * dist.get_rank())
    return True


def test_ranks_that_make_different_caches_are_told_so(ranks):
    assert ranks(2).run(run_differing, timeout_s=TIMEOUT_S) == [True, True]

"""Sharded weights on a sharded cache give the tokens and logits of one process, in every layout, or are refused."""

import pytest
import torch
from hf_models import FAMILIES, tiny_model
from tp_inputs import error, generated, lively_model, packed, truth

pytestmark = pytest.mark.dist

# the first body on a worker imports transformers, which takes a while on busy cores
TIMEOUT_S = 150.0
# through three layers of float32, relative to the largest logit
TOLERANCE = 2e-5
LAYOUTS = [(2, 1), (1, 2), (4, 1), (2, 2)]
# of a step: how queries come to the kvp ranks, the merge in generate, the merge in the engine
WAYS = [
    ("replicate", "all_gather", "all_to_all"),
    ("gather", "reduce_scatter", "all_reduce"),
    ("replicate", "auto", "auto"),
    ("gather", "all_to_all", "reduce_scatter"),
]
FUSED = ("phi3",)


def errors(family, kvp, tp, ways, want, overrides=()):
    """Relative errors of the logits in generate and in the engine for each way; infinite where a token differs."""
    from distdec import shard
    from distdec.mesh import Mesh

    found = {}
    with Mesh.create(kvp, tp, device="cpu") as mesh:
        for queries, *merges in ways:
            model = shard(lively_model(family, "distdec", **dict(overrides)), mesh, queries=queries)
            found[queries, merges[0], "generate"] = error(generated(model, mesh, merge=merges[0]), want)
            found[queries, merges[1], "engine"] = error(packed(model, mesh, merges[1]), want)
    return found


def check(ranks, family, kvp, tp, ways, overrides=()):
    if family in FUSED:
        ways = [("replicate", *merges) for _, *merges in ways]
    for found in ranks(kvp * tp).run(
        errors, family, kvp, tp, ways, truth(family, overrides), overrides, timeout_s=TIMEOUT_S
    ):
        assert len(found) == 2 * len(ways)
        assert not {way: e for way, e in found.items() if not e <= TOLERANCE}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_equals_eager_with_heads_and_sequence_split(ranks, family):
    check(ranks, family, 2, 2, WAYS[3:])


@pytest.mark.parametrize(("kvp", "tp"), LAYOUTS)
def test_every_layout_equals_eager(ranks, kvp, tp):
    check(ranks, "llama", kvp, tp, WAYS[:2])


@pytest.mark.parametrize(("kvp", "tp"), [(4, 1), (2, 2)])
def test_biases_everywhere_are_added_once(ranks, kvp, tp):
    check(ranks, "llama", kvp, tp, WAYS[1:2], (("attention_bias", True), ("mlp_bias", True)))


def test_norms_of_each_head_are_cut_with_the_heads(ranks):
    check(ranks, "cohere", 2, 2, WAYS[1:2], (("use_qk_norm", True),))


@pytest.mark.slow
@pytest.mark.parametrize(("kvp", "tp"), LAYOUTS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_in_every_layout_and_way_equals_eager(ranks, family, kvp, tp):
    check(ranks, family, kvp, tp, WAYS)


# two KV heads, sizes that divide by 8
WIDE = (("hidden_size", 64), ("intermediate_size", 128), ("vocab_size", 104), ("tie_word_embeddings", False))
SHARDED = ("embed_tokens", "lm_head", "o_proj", "gate_proj", "up_proj", "down_proj")


def shares(kvp, tp, queries, prompts, want):
    """Error of the logits; this rank's elements of each kind of weight; tokens and KV bytes that it holds."""
    from distdec import shard
    from distdec.hf import merge_for
    from distdec.mesh import Mesh

    with Mesh.create(kvp, tp, device="cpu") as mesh:
        model = shard(tiny_model("llama", "distdec", **dict(WIDE)), mesh, queries=queries)
        held = {}
        for name, parameter in model.named_parameters():
            kind = next((part for part in (*SHARDED, "q_proj", "k_proj", "v_proj") if part in name), "norm")
            held[kind] = held.get(kind, 0) + parameter.numel()
        *got, cache = packed(model, mesh, "auto", prompts, 3, max_tokens=4096)
        wrong = error(got, want)
        # the attention output is not replicated where it need not be
        assert not merge_for(model, mesh, "auto").replicated
        tokens = [cache.kv.local_length(seq, mesh.kvp_rank) for seq in range(len(prompts))]
        stored = torch.isfinite(cache.pool.k[:, :, :, 0]).sum().item()
        return wrong, held, tokens, stored * 2 * 16 * 4


def whole_sizes():
    held = {}
    for name, parameter in tiny_model("llama", "eager", **dict(WIDE)).named_parameters():
        kind = next((part for part in (*SHARDED, "q_proj", "k_proj", "v_proj") if part in name), "norm")
        held[kind] = held.get(kind, 0) + parameter.numel()
    return held


def unpadded_truth(prompts, new_tokens):
    model = tiny_model("llama", "eager", **dict(WIDE))
    tokens, logits = [], torch.empty(new_tokens, len(prompts), 104)
    for row, prompt in enumerate(prompts):
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens.append(out.sequences[0, len(prompt) :].tolist())
        logits[:, row] = torch.cat(out.logits)
    return tokens, logits


def check_shares(ranks, kvp, tp, queries):
    """Two KV heads on more ranks than that: weights, keys and values are divided by the number of ranks."""
    world = kvp * tp
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 104, (n,), generator=generator).tolist() for n in (203, 64)]
    want = unpadded_truth(prompts, 3)
    whole = whole_sizes()
    results = ranks(world).run(shares, kvp, tp, queries, prompts, want, timeout_s=TIMEOUT_S)
    lengths = [len(prompt) + 2 for prompt in prompts]
    # three layers, two KV heads of 16, keys and values in float32
    per_token = 3 * 2 * 16 * 2 * 4
    assert sum(kv for *_, kv in results) == sum(lengths) * per_token
    for wrong, held, tokens, kv in results:
        assert wrong <= TOLERANCE
        for length, local in zip(lengths, tokens, strict=True):
            assert abs(local - length / kvp) <= 8  # max_chunk
        assert abs(kv - sum(lengths) * per_token / world) <= len(prompts) * 8 * per_token / tp
        for kind, size in whole.items():
            ranks_of = world if kind in SHARDED else tp
            if kind == "q_proj" and queries == "gather":
                ranks_of = world
            if kind == "norm":
                ranks_of = 1
            assert held[kind] == pytest.approx(size / ranks_of, rel=0.05), kind


@pytest.mark.parametrize(("kvp", "tp", "queries"), [(4, 1, "replicate"), (2, 2, "gather")])
def test_two_kv_heads_on_four_ranks_are_not_repeated(ranks, kvp, tp, queries):
    check_shares(ranks, kvp, tp, queries)


@pytest.mark.slow
@pytest.mark.parametrize(("kvp", "tp", "queries"), [(8, 1, "replicate"), (8, 1, "gather"), (4, 2, "gather")])
def test_two_kv_heads_on_eight_ranks_are_not_repeated(ranks, kvp, tp, queries):
    check_shares(ranks, kvp, tp, queries)


# (KV heads, query heads of each): every count of KV heads up to the number of ranks, groups of one and of several
HEADS = [(1, 1), (1, 8), (2, 1), (2, 3), (3, 1), (3, 3), (4, 1), (4, 2), (5, 3), (6, 1), (7, 1), (8, 1), (8, 2)]


def with_heads(num_kv_heads, group_size):
    num_q_heads = num_kv_heads * group_size
    sizes = {"num_key_value_heads": num_kv_heads, "num_attention_heads": num_q_heads, "head_dim": 8}
    return (*sizes.items(), ("hidden_size", 8 * num_q_heads), ("num_hidden_layers", 1))


def every_head_count(kvp, tp, wants):
    """For each head count: the error of the logits, or what the refusal says; sharded, then as a whole model."""
    from distdec import shard
    from distdec.mesh import Mesh

    found = []
    with Mesh.create(kvp, tp, device="cpu") as mesh:
        for heads, want in zip(HEADS, wants, strict=True):
            model = lively_model("llama", "distdec", **dict(with_heads(*heads)))
            for prepare in (lambda model: model, lambda model: shard(model, mesh)):
                try:
                    *got, _ = packed(prepare(model), mesh, "auto", new_tokens=2)
                except ValueError as refusal:
                    found.append(str(refusal))
                    continue
                found.append(error(got, want))
    return found[0::2], found[1::2]


def check_layouts(ranks, world):
    wants = []
    for heads in HEADS:
        tokens, logits = truth("llama", with_heads(*heads))
        wants.append(([made[:2] for made in tokens], logits[:2]))
    for tp in range(1, world + 1):
        if world % tp:
            continue
        kvp = world // tp
        for whole, sharded in ranks(world).run(every_head_count, kvp, tp, wants, timeout_s=TIMEOUT_S):
            for (num_kv_heads, group_size), of_whole, result in zip(HEADS, whole, sharded, strict=True):
                layout = (kvp, tp, num_kv_heads, group_size)
                if num_kv_heads % tp:
                    told = f"kvp={kvp}, tp={tp}, num_q_heads={num_kv_heads * group_size}, num_kv_heads={num_kv_heads}"
                    assert told in result
                    assert told in of_whole
                    continue
                assert result <= TOLERANCE, layout
                if tp > 1:
                    assert f"{num_kv_heads} KV heads on this rank" in of_whole, layout
                else:
                    assert of_whole <= TOLERANCE, layout


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_layout_is_right_or_refused(ranks, world):
    check_layouts(ranks, world)


@pytest.mark.slow
@pytest.mark.parametrize("world", [5, 6, 7, 8])
def test_a_layout_of_many_ranks_is_right_or_refused(ranks, world):
    check_layouts(ranks, world)


def made_for_whole_model():
    """What is told of a model that nobody sharded where a cache and an engine binding are made on a mesh with tp 2."""
    from distdec.attention import DistributedAttention
    from distdec.hf import DistributedCache, bind_engine
    from distdec.mesh import Mesh
    from distdec.sharded_cache import ShardedCache

    with Mesh.create(1, 2, device="cpu") as mesh:
        model = tiny_model("llama", "distdec")
        with pytest.raises(ValueError) as cache:
            DistributedCache(model, mesh, max_tokens=64)
        core = ShardedCache(mesh, num_layers=3, num_kv_heads=1, head_dim=16, max_tokens=64)
        with pytest.raises(ValueError) as binding:
            bind_engine(model, DistributedAttention(mesh, core))
        return str(cache.value), str(binding.value)


def test_a_whole_model_is_refused_where_its_cache_or_binding_is_made(ranks):
    for told in ranks(2).run(made_for_whole_model, timeout_s=TIMEOUT_S):
        for refusal in told:
            assert "2 KV heads on this rank, a rank of kvp 1 x tp 2 has 1: distdec.shard" in refusal


def places(kvp, tp):
    """(query heads, KV heads, kvp rank) that this rank's weights and cache have, from the weights' values."""
    from distdec import shard
    from distdec.mesh import Mesh

    model = tiny_model("llama", "distdec")
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        # every row of a head's projection holds the head's number
        for part, heads in (("q_proj", 8), ("k_proj", 2), ("v_proj", 2)):
            numbers = torch.arange(heads).repeat_interleave(16)
            getattr(attention, part).weight.copy_(numbers[:, None].expand(-1, 48))
    with Mesh.create(kvp, tp, device="cpu") as mesh:
        shard(model, mesh)
        found = [sorted(set(getattr(attention, p).weight.flatten().int().tolist())) for p in ("q_proj", "k_proj")]
        assert torch.equal(attention.k_proj.weight, attention.v_proj.weight)
        return mesh.rank, mesh.kvp_rank, mesh.tp_rank, *found


@pytest.mark.parametrize(("kvp", "tp"), [(4, 1), (2, 2)])
def test_ranks_of_a_kvp_group_have_the_same_heads_as_the_map_says(ranks, kvp, tp):
    from distdec.hf import rank_map

    found = ranks(kvp * tp).run(places, kvp, tp, timeout_s=TIMEOUT_S)
    told = [(r.rank, r.kvp_rank, r.tp_rank, list(r.q_heads), list(r.kv_heads)) for r in rank_map(kvp, tp, 8, 2)]
    assert found == told


def chosen(layouts):
    """What `queries="auto"` came to on this rank in each layout, small and with a projection worth dividing."""
    from distdec.hf.parallel import shard
    from distdec.hf.sharding import sharding_of
    from distdec.mesh import Mesh

    big = {"hidden_size": 6144, "num_attention_heads": 96, "num_key_value_heads": 4, "head_dim": 128}
    big |= {"num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 16}
    found = []
    for kvp, tp in layouts:
        with Mesh.create(kvp, tp, device="cpu") as mesh:
            small = shard(tiny_model("llama", "distdec"), mesh, queries="auto")
            wide = tiny_model("llama", "distdec", device="meta", **big)
            mesh.device = torch.device("meta")
            found.append((sharding_of(small).queries, sharding_of(shard(wide, mesh)).queries))
    return found


def test_all_ranks_choose_the_same_way_for_queries(ranks):
    found = ranks(4).run(chosen, [(4, 1), (2, 2)], timeout_s=TIMEOUT_S)
    assert found == [[("replicate", "gather"), ("replicate", "gather")]] * 4


def loaded_by_the_runtime(folder, queries):
    from distdec.config import CacheConfig, Config, ParallelConfig
    from distdec.hf.sharding import sharding_of
    from distdec.mesh import Mesh
    from distdec.runner import Runner

    config = Config(parallel=ParallelConfig(queries=queries), cache=CacheConfig(max_tokens=1024))
    with Mesh.create(device="cpu") as mesh:
        runner = Runner.load(folder, mesh, config)
        return sharding_of(runner.model).queries, runner.attention.merge.replicated


@pytest.mark.parametrize(("queries", "want"), [("gather", "gather"), ("auto", "replicate")])
def test_the_runtime_scatters_and_takes_queries_as_asked(ranks, tmp_path, queries, want):
    tiny_model("llama", "eager").save_pretrained(tmp_path)
    found = ranks(2).run(loaded_by_the_runtime, str(tmp_path), queries, timeout_s=TIMEOUT_S)
    assert found == [(want, False)] * 2

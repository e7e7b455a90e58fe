"""Sharding without any process group: the map of heads, one validator, and what is refused with which reason."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hf_models import tiny_config, tiny_model
from test_weights import rank_of

from distdec.degrees import legal_layouts, validate_layout
from distdec.hf import UnsupportedModel, check_model, rank_map, shard
from distdec.hf.experts import split_range
from distdec.hf.linears import GatherLinear, RowLinear, SplitNorm
from distdec.hf.sharding import check_mesh, merge_for, sharding_of
from distdec.mesh import Mesh
from distdec.planner import ModelShape, Workload, rank_layouts


def test_the_map_gives_kvp_groups_the_same_heads_and_tp_groups_all_of_them():
    found = rank_map(3, 2, 8, 4)
    assert [(r.rank, r.kvp_rank, r.tp_rank) for r in found] == [
        (0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 0, 1), (4, 1, 1), (5, 2, 1),
    ]  # fmt: skip
    assert [(r.q_heads, r.kv_heads) for r in found] == [(range(4), range(2))] * 3 + [(range(4, 8), range(2, 4))] * 3
    with pytest.raises(
        ValueError, match=r"tp = 3 does not divide the 4 KV heads.*legal \(kvp, tp\): \(6, 1\), \(3, 2\)"
    ):
        rank_map(2, 3, 8, 4)


def test_all_that_takes_a_layout_agrees_with_the_validator():
    for num_kv_heads in (1, 2, 3, 4, 6, 8):
        sizes = {"num_key_value_heads": num_kv_heads, "num_attention_heads": 24}
        model = tiny_model("llama", "distdec", device="meta", hidden_size=48, num_hidden_layers=1, **sizes)
        shape = ModelShape.from_config(model.config)
        for tp in range(1, 17):
            if (3, tp) in legal_layouts(3 * tp, 24, num_kv_heads):
                validate_layout(3 * tp, 3, tp, 24, num_kv_heads)
                sharded = shard(copy.deepcopy(model), on_meta(rank_of(3, tp, 1)))
                assert check_model(sharded, on_meta(rank_of(3, tp, 1))).num_kv_heads == num_kv_heads // tp
                assert (3, tp) in [(p.kvp, p.tp) for p in rank_layouts(shape, Workload(100), 3 * tp)]
                continue
            told = f"tp = {tp} does not divide the {num_kv_heads} KV heads"
            with pytest.raises(ValueError, match=told):
                validate_layout(3 * tp, 3, tp, 24, num_kv_heads)
            assert (3, tp) not in [(p.kvp, p.tp) for p in rank_layouts(shape, Workload(100), 3 * tp)]
            mesh = on_meta(rank_of(3, tp, 0))
            for refuse in (check_model, check_mesh, shard):
                with pytest.raises(ValueError, match=told):
                    refuse(model, mesh)


def on_meta(mesh):
    mesh.device = torch.device("meta")
    return mesh


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_whole_model_is_refused_where_heads_are_split(family):
    model = tiny_model(family, "distdec")
    check_mesh(model, rank_of(4, 1, 2))
    with pytest.raises(ValueError, match=r"2 KV heads on this rank, a rank of kvp 2 x tp 2 has 1: distdec\.shard"):
        check_model(model, rank_of(2, 2, 1))
    # a model of somebody else's tensor parallelism has its heads already
    for layer in model.model.layers:
        for name, linear in layer.self_attn.named_children():
            if name in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
                linear.weight = torch.nn.Parameter(linear.weight[: linear.out_features // 2])
    check_model(model, rank_of(2, 2, 1))
    with pytest.raises(ValueError, match="1 KV heads on this rank, a rank of kvp 4 x tp 1 has 2"):
        check_model(model, rank_of(4, 1, 1))


def test_more_query_parallel_ranks_than_heads_are_refused_with_the_legal_sizes():
    # eight ranks for tensors, four for the sequence, on eight ranks
    with pytest.raises(
        ValueError, match=r"4 x 8 = 32 is not the number of ranks, 8.*legal \(kvp, tp\): \(8, 1\), \(4, 2\)"
    ):
        validate_layout(8, 4, 8, 32, 2)


def parts_of_a_layer(model, mesh, x):
    """What one rank adds to the sums after the output projection and the MLP, seeing all tokens, as along kvp."""
    layer = model.model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v = (
        getattr(attention, name)(x).unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)
    start, stop = attention.o_proj.columns if mesh.world_size > 1 else (0, out.shape[1])
    wide = F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    return F.linear(out[:, start:stop], attention.o_proj.weight), F.linear(wide, mlp.down_proj.weight)


def check_parts(model, kvp, tp, x, want):
    sums, words = [0, 0], []
    for rank in range(kvp * tp):
        mesh = rank_of(kvp, tp, rank)
        mine = shard(copy.deepcopy(model), mesh, queries="replicate")
        sums = [total + part for total, part in zip(sums, parts_of_a_layer(mine, mesh, x), strict=True)]
        words += [mine.lm_head.weight]
    for total, whole in zip(sums, want, strict=True):
        torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.cat(words), model.lm_head.weight)


@pytest.mark.parametrize("num_kv_heads", range(1, 9))
def test_every_layout_up_to_eight_ranks_adds_up_or_is_refused(num_kv_heads):
    torch.manual_seed(1)
    tried = 0
    for group_size in (1, 3, 8):
        num_q_heads, hidden = num_kv_heads * group_size, 2 * num_kv_heads * group_size
        sizes = {"num_key_value_heads": num_kv_heads, "num_attention_heads": num_q_heads, "head_dim": 8}
        model = tiny_model("llama", "distdec", hidden_size=hidden, num_hidden_layers=1, **sizes)
        x = torch.randn(5, hidden)
        with torch.no_grad():
            want = parts_of_a_layer(model, Mesh.single(), x)
            for kvp in range(1, 9):
                for tp in range(1, 8 // kvp + 1):
                    if num_kv_heads % tp == 0:
                        tried += 1
                        check_parts(model, kvp, tp, x, want)
                        continue
                    told = f"kvp={kvp}, tp={tp}, num_q_heads={num_q_heads}, num_kv_heads={num_kv_heads}"
                    for refuse in (shard, check_model):
                        with pytest.raises(ValueError, match=told):
                            refuse(model, rank_of(kvp, tp, 0))
    # all kvp with tp 1, and what divides
    assert tried == 3 * sum(8 // tp for tp in range(1, 9) if num_kv_heads % tp == 0)


def test_ranges_cover_everything_once():
    for size in (0, 1, 5, 101, 1536):
        for ranks in (1, 2, 3, 5, 8):
            ranges = [split_range(size, ranks, rank) for rank in range(ranks)]
            assert [i for start, stop in ranges for i in range(start, stop)] == list(range(size))
            widths = {stop - start for start, stop in ranges}
            assert max(widths) - min(widths) <= 1


def foreign(model):
    """Rename what attention modules are recognised by."""
    for layer in model.model.layers:
        layer.self_attn.dense = layer.self_attn.o_proj
        del layer.self_attn.o_proj


def low_rank(model):
    for layer in model.model.layers:
        layer.self_attn.v_proj = torch.nn.Sequential(torch.nn.Linear(48, 4), torch.nn.Linear(4, 32))


def packed_bits(model):
    layer = model.model.layers[1].mlp.gate_proj
    layer.weight = torch.nn.Parameter(torch.zeros(64 * 48 // 2, 1, dtype=torch.uint8), requires_grad=False)


@pytest.mark.parametrize(
    ("family", "edit", "queries", "told"),
    [
        ("llama", foreign, "auto", r"0 of 3 layers have an attention that is recognised .* 3 an MLP"),
        ("llama", low_rank, "auto", r"layers\.0\.self_attn\.v_proj: Sequential is not a plain linear layer"),
        ("llama", packed_bits, "auto", r"layers\.1\.mlp\.gate_proj: Linear is not a plain linear layer"),
        ("phi3", None, "gather", r"needs a query projection of its own; this model's is fused \(qkv_proj\)"),
        ("llama", None, "both", "queries must be 'auto', 'replicate' or 'gather', got 'both'"),
    ],
)
def test_what_is_not_recognised_is_refused(family, edit, queries, told):
    model = tiny_model(family, "distdec")
    if edit is not None:
        edit(model)
    with pytest.raises(ValueError, match=told):
        shard(model, rank_of(2, 1, 1), queries=queries)


def test_norms_of_an_unknown_kind_over_all_heads_are_refused_where_heads_are_split():
    model = tiny_model("olmo2", "distdec")
    for layer in model.model.layers:
        layer.self_attn.k_norm = torch.nn.LayerNorm(32)
    shard(tiny_model("olmo2", "distdec"), rank_of(1, 2, 0))
    with pytest.raises(ValueError, match=r"k_norm \(LayerNorm\) normalises over 32 features.*tp=2; use tp=1"):
        shard(model, rank_of(1, 2, 0))


def test_latent_attention_is_refused_with_the_reason():
    config = tiny_config("deepseek_v3", num_experts_per_tok=2, n_routed_experts=4, n_group=1, topk_group=1)
    assert config.kv_lora_rank
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="distdec")
    with pytest.raises(UnsupportedModel, match=r"multi-head latent attention \(MLA\) caches latents"):
        check_model(model)
    with pytest.raises(ValueError, match="0 of 3 layers have an attention that is recognised"):
        shard(model, on_meta(rank_of(2, 1, 0)))


def test_a_model_is_sharded_once_and_stays_on_its_mesh():
    model = shard(tiny_model("llama", "distdec"), rank_of(2, 2, 3), queries="gather")
    assert sharding_of(model) == (2, 2, 3, "gather", "")
    with pytest.raises(ValueError, match="is sharded already"):
        shard(model, rank_of(2, 2, 3))
    check_mesh(model, rank_of(2, 2, 3))
    for other in (rank_of(2, 2, 2), rank_of(4, 1, 3), Mesh.single()):
        with pytest.raises(ValueError, match="rank 3 of kvp 2 x tp 2, the cache's mesh is rank"):
            check_mesh(model, other)
        with pytest.raises(ValueError, match="rank 3 of kvp 2 x tp 2"):
            merge_for(model, other, "all_gather")


def test_only_a_sharded_projection_takes_scattered_columns():
    mesh = Mesh.single()
    whole = tiny_model("llama", "distdec")
    assert merge_for(whole, mesh, "auto").replicated
    with pytest.raises(ValueError, match=r"merge='all_to_all' scatters the output.*distdec\.shard"):
        merge_for(whole, mesh, "all_to_all")
    assert not merge_for(shard(whole, mesh), mesh, "all_to_all").replicated


def test_a_row_linear_refuses_other_widths():
    full = torch.randn(4, 10)
    linear = RowLinear(full[:, 3:7].clone(), None, 10, (3, 7), None)
    x = torch.randn(5, 10)
    torch.testing.assert_close(linear(x), x[:, 3:7] @ full[:, 3:7].T)
    torch.testing.assert_close(linear(x[:, 3:7]), x[:, 3:7] @ full[:, 3:7].T)
    with pytest.raises(ValueError, match="expected 10 input features or columns 3 to 7, got 8"):
        linear(x[:, :8])


def test_parts_of_one_rank_are_the_whole():
    weight = torch.randn(6, 4)
    x = torch.randn(3, 4)
    torch.testing.assert_close(GatherLinear(weight, None, [6], None)(x), x @ weight.T)
    norm = SplitNorm(torch.randn(4), 4, 1e-6, None)
    want = norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(x), want)


def test_the_package_offers_sharding_without_importing_it():
    import subprocess
    import sys

    code = "import sys, distdec; assert 'torch' not in sys.modules; print(distdec.shard, distdec.load_sharded)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.count("<function") == 2
    import distdec

    with pytest.raises(AttributeError, match="no attribute 'shards'"):
        distdec.shards  # noqa: B018

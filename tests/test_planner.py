"""The plan's bytes are sums that can be done by hand, and its choices go the way the bytes do."""

from types import SimpleNamespace

import pytest

from distdec.planner import (
    Hardware,
    ModelShape,
    Workload,
    break_even_tokens,
    dtypes_that_fit,
    layout_plan,
    merge_us,
    query_mode,
    rank_layouts,
    ranks_to_fit,
)

LLAMA_8B = ModelShape(32, 4096, 32, 8, 128, 128256, 3 * 4096 * 14336, 3 * 4096 * 14336)
LLAMA_70B = ModelShape(80, 8192, 64, 8, 128, 128256, 3 * 8192 * 28672, 3 * 8192 * 28672)


def test_weights_and_kv_of_one_rank_are_the_whole_model():
    plan = layout_plan(LLAMA_8B, Workload(131072), 1, 1)
    assert plan.weight_bytes == pytest.approx(16.06e9, rel=0.002)
    assert plan.kv_bytes == 131072 * 131072
    assert plan.merge_us == 0
    assert plan.merge == "none"


def test_kv_halves_with_the_ranks_and_qkv_stays():
    one, two = (layout_plan(LLAMA_8B, Workload(131072), kvp, 1) for kvp in (1, 2))
    assert two.kv_bytes * 2 == one.kv_bytes
    shared = LLAMA_8B.num_layers * (LLAMA_8B.q_weights + LLAMA_8B.kv_weights) * 2
    assert two.weight_bytes == pytest.approx((one.weight_bytes - shared) / 2 + shared, rel=1e-6)


def test_a_million_tokens_need_two_gpus():
    assert ranks_to_fit(LLAMA_8B, Workload(1_000_000)) == 2
    assert ranks_to_fit(LLAMA_8B, Workload(100_000)) == 1
    assert ranks_to_fit(LLAMA_8B, Workload(10**9), limit=4) is None


def test_float32_kv_does_not_fit_where_bfloat16_does():
    assert dtypes_that_fit(LLAMA_8B, Workload(1_000_000), 2) == ["bfloat16", "float16"]


def test_small_query_projections_are_replicated_and_large_ones_gathered():
    assert query_mode(LLAMA_8B, 2, 1) == "replicate"
    assert query_mode(LLAMA_70B, 8, 1) == "gather"
    assert query_mode(LLAMA_70B, 1, 8) == "replicate"


def test_break_even_is_where_the_saved_read_pays_the_merge():
    tokens = break_even_tokens(4096, 2)
    saved = tokens * 4096 / 2 / Hardware().read_bandwidth
    assert saved == pytest.approx(merge_us("one_shot", 2, 0), rel=1e-3)
    assert break_even_tokens(4096, 2, merge="all_reduce") > 4 * tokens
    assert break_even_tokens(4096, 1) == 0


def test_more_ranks_than_kv_heads_have_layouts_and_illegal_ones_are_left_out():
    shape = ModelShape(2, 64, 8, 2, 8, 100, 64, 64)
    assert sorted((p.kvp, p.tp) for p in rank_layouts(shape, Workload(100), 8)) == [(4, 2), (8, 1)]
    with pytest.raises(ValueError, match="ranks=0"):
        rank_layouts(shape, Workload(100), 0)


def test_layouts_that_fit_come_first():
    plans = rank_layouts(LLAMA_70B, Workload(8192), 1)
    assert not plans[0].fits
    plans = rank_layouts(LLAMA_70B, Workload(8192, batch=4), 8)
    assert plans[0].fits
    assert [p.step_us for p in plans if p.fits] == sorted(p.step_us for p in plans if p.fits)


def test_shape_of_a_mixture_of_experts_counts_all_and_active_experts():
    config = SimpleNamespace(
        hidden_size=10, num_attention_heads=5, num_hidden_layers=3, vocab_size=7, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=4, intermediate_size=99, num_key_value_heads=1,
    )  # fmt: skip
    shape = ModelShape.from_config(config)
    assert (shape.mlp_weights, shape.active_mlp_weights) == (6 * 120, 2 * 120)
    assert shape.head_dim == 2
    with pytest.raises(ValueError, match="vocab_size"):
        ModelShape.from_config(
            SimpleNamespace(hidden_size=1, num_attention_heads=1, num_hidden_layers=1, intermediate_size=1)
        )


def test_unknown_merge_is_refused():
    with pytest.raises(ValueError, match="one_shot"):
        merge_us("magic", 2, 0)

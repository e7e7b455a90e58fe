"""What the transformers integration refuses, when, and with which words; and its arithmetic on masks."""

import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hf_models import left_padded, tiny_config, tiny_model


def make_cache(model, **options):
    from distdec.hf import DistributedCache
    from distdec.mesh import Mesh

    return DistributedCache(model, Mesh.single(), **{"max_tokens": 512, "min_chunk": 4, "max_chunk": 8, **options})


def refused_at_load(match, family="llama", *, attention="distdec", **changes):
    from distdec.hf import UnsupportedModel, bind_engine
    from distdec.mesh import Mesh

    model = tiny_model(family, attention, device="meta", **changes)
    with pytest.raises(UnsupportedModel, match=match):
        make_cache(model)
    with pytest.raises(UnsupportedModel, match=match):
        bind_engine(model, SimpleNamespace(mesh=Mesh.single()))


MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}


@pytest.mark.parametrize(
    ("match", "family", "changes"),
    [
        ("chunked_attention", "llama4_text", {"num_local_experts": 2, "intermediate_size_mlp": 32}),
        ("latent attention", "deepseek_v3", {**MLA, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}),
        ("share keys and values", "gemma3n_text", {"num_kv_shared_layers": 1}),
        ("bidirectional", "gemma3_text", {"use_bidirectional_attention": True}),
        ("output_attentions", "llama", {"output_attentions": True}),
        ("linear_attention", "qwen3_next", {}),
        ("differ between layers", "llama", {"global_head_dim": 32}),
    ],
)
def test_models_that_need_other_attention_are_refused_from_their_config(match, family, changes):
    from distdec.hf.support import config_reasons

    reasons = config_reasons(tiny_config(family, **changes))
    assert any(match in reason for reason in reasons), reasons


def test_models_are_refused_at_load_with_every_reason():
    refused_at_load("bidirectional attention", "gemma3_text", use_bidirectional_attention=True)
    refused_at_load("runs attention 'sdpa'.*set_attn_implementation", attention="sdpa")
    refused_at_load("shares? keys and values.*runs attention 'eager'", attention="eager", num_kv_shared_layers=2)


def test_encoder_decoder_and_multimodal_models_are_refused():
    from transformers import AutoConfig

    from distdec.hf.support import config_reasons

    assert "encoder-decoder" in config_reasons(AutoConfig.for_model("t5"))[0]
    assert "vision_config" in config_reasons(AutoConfig.for_model("gemma3"))[0]


def test_a_model_whose_attention_cannot_be_replaced_is_refused():
    from transformers import AutoModelForCausalLM

    from distdec.hf import UnsupportedModel

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("bloom", n_layer=1, n_head=2))
    with pytest.raises(UnsupportedModel, match="_supports_attention_backend"):
        make_cache(model)


def test_kv_heads_that_do_not_split_are_refused_with_the_legal_sizes():
    from test_weights import rank_of

    from distdec.hf import check_model

    model = tiny_model("llama", "distdec", device="meta")
    assert check_model(model, rank_of(3, 1, 0)).num_kv_heads == 2
    with pytest.raises(ValueError, match=r"tp = 4 does not divide the 2 KV heads; .*kvp.*: \(8, 1\), \(4, 2\)"):
        check_model(model, rank_of(2, 4, 0))


def test_shares_for_ranks_that_do_not_exist_are_refused():
    model = tiny_model("llama", "distdec", device="meta")
    for shares in ({"weights": (3, 1)}, {"max_tokens": None, "num_frames": (8, 8)}):
        with pytest.raises(ValueError, match="each of the 1 kvp ranks, got 2"):
            make_cache(model.to_empty(device="cpu"), **shares)


def test_geometry_names_every_window_once():
    from distdec.hf import check_model

    assert check_model(tiny_model("gemma2", "distdec", device="meta")) == (3, 2, 16, (7,), 4)
    assert check_model(tiny_model("qwen2", "distdec", device="meta")).windows == ()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_cache_fails_loudly_under_another_attention(attention):
    from distdec.hf import UnsupportedModel

    model = tiny_model("llama", "distdec")
    cache = make_cache(model)
    model.set_attn_implementation(attention)
    with pytest.raises(UnsupportedModel, match="attn_implementation"):
        model.generate(**left_padded((4, 6)), max_new_tokens=2, **{cache.keyword: cache})


def test_a_model_that_works_on_keys_after_the_update_fails_at_first_use():
    from distdec.hf import UnsupportedModel

    model = tiny_model("diffllama", "eager")
    model.config._attn_implementation = "distdec"
    with pytest.raises(UnsupportedModel):
        cache = make_cache(model)
        model.generate(**left_padded((4, 6)), max_new_tokens=2, **{cache.keyword: cache})


@pytest.mark.parametrize(
    "options", [{}, {"use_cache": False}, {"cache_implementation": "static"}], ids=["dynamic", "none", "static"]
)
def test_generating_without_our_cache_is_refused(options):
    from distdec.hf import UnsupportedModel

    model = tiny_model("llama", "distdec")
    with pytest.raises(UnsupportedModel, match="needs a DistributedCache"):
        model.generate(**left_padded((4, 6)), max_new_tokens=2, **options)


@pytest.mark.parametrize("implementation", ["static", "quantized"])
def test_another_cache_implementation_next_to_ours_is_refused(implementation):
    model = tiny_model("llama", "distdec")
    cache = make_cache(model)
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(
            **left_padded((4, 6)), max_new_tokens=2, cache_implementation=implementation, **{cache.keyword: cache}
        )


def forward(model, cache, ids, mask=None, **options):
    return model(input_ids=ids, attention_mask=mask, **{cache.keyword: cache}, **options)


def test_call_arguments_that_cannot_be_served_are_refused():
    from distdec.hf import UnsupportedModel

    model = tiny_model("llama", "distdec")
    ids = left_padded((5, 5))["input_ids"]
    with pytest.raises(UnsupportedModel, match="output_attentions"):
        forward(model, make_cache(model), ids, output_attentions=True)
    with pytest.raises(UnsupportedModel, match="position_bias"):
        forward(model, make_cache(model), ids, position_bias=torch.zeros(1))
    with pytest.raises(UnsupportedModel, match="training"):
        forward(model.train(), make_cache(model), ids)


def test_packed_sequences_without_an_engine_are_refused():
    from distdec.hf import UnsupportedModel

    model = tiny_model("llama", "distdec")
    ids = torch.randint(3, 99, (1, 6))
    with pytest.raises(UnsupportedModel, match="packed"):
        model(input_ids=ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)


def test_masks_with_overlays_are_refused():
    from transformers import masking_utils as m

    from distdec.hf import UnsupportedModel
    from distdec.hf.support import refuse_mask_pattern

    causal = m.causal_mask_function
    block = lambda b, h, q, k: q // 4 == k // 4  # noqa: E731
    refuse_mask_pattern(causal)
    refuse_mask_pattern(m.sliding_window_causal_mask_function(7))
    for foreign in (
        m.bidirectional_mask_function,
        m.or_masks(causal, block),
        m.and_masks(causal, block),
        m.and_masks(m.and_masks(m.sliding_window_overlay(7), causal), block),
        m.chunked_causal_mask_function(4, torch.zeros(1)),
    ):
        with pytest.raises(UnsupportedModel, match="causal attention"):
            refuse_mask_pattern(foreign)


def test_a_layer_that_leaves_its_window_to_the_mask_is_refused():
    from distdec.hf import UnsupportedModel
    from distdec.hf.attention import attention_forward

    query = torch.zeros(1, 8, 1, 16)
    sliding = tiny_model("mistral", "distdec").model.layers[1].self_attn
    with pytest.raises(UnsupportedModel, match="sliding_window=None, its config says 7"):
        attention_forward(sliding, query, query, query, None)
    full = tiny_model("gemma2", "distdec").model.layers[1].self_attn
    with pytest.raises(UnsupportedModel, match=r"layer 1 .*sliding_window=7, its config says None"):
        attention_forward(full, query, query, query, None, sliding_window=7)


def test_the_mask_decides_which_tokens_are_new():
    from distdec.hf.padding import new_tokens

    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]])
    assert new_tokens(None, [0, 0], 0, 4) == [4, 4]
    assert new_tokens(mask, [0, 0, 0], 0, 4) == [4, 2, 0]
    assert new_tokens(mask.bool(), [2, 0, 0], 2, 2) == [2, 2, 0]
    longer = torch.cat([mask, torch.ones(3, 1, dtype=torch.int64)], 1)
    assert new_tokens(longer, [4, 2, 0], 4, 1) == [1, 1, 1]


@pytest.mark.parametrize(
    ("match", "mask", "cached", "past", "new"),
    [
        (r"0\*1\*", [[1, 1, 1, 0], [0, 0, 1, 1]], [0, 0], 0, 4),
        (r"row 1.*0\*1\*", [[1, 1, 1, 1], [0, 1, 0, 1]], [0, 0], 0, 4),
        (r"must be \[2, 5\]", [[1, 1, 1, 1], [0, 0, 1, 1]], [4, 2], 4, 1),
        ("contradicts", [[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]], [4, 2], 4, 1),
        ("contradicts", [[1, 1, 1, 1, 1], [0, 0, 0, 0, 1]], [4, 2], 4, 1),
        ("contradicts", [[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]], [4, 0], 4, 1),
        ("hand the mask on", None, [4, 2], 4, 1),
    ],
)
def test_masks_that_are_not_pads_before_tokens_are_refused(match, mask, cached, past, new):
    from distdec.hf.padding import new_tokens

    with pytest.raises(ValueError, match=match):
        new_tokens(None if mask is None else torch.tensor(mask), cached, past, new)


def test_a_refused_mask_leaves_the_cache_as_it_was():
    model = tiny_model("llama", "distdec")
    cache = make_cache(model)
    ids = left_padded((6, 6))["input_ids"]
    with torch.no_grad():
        want = forward(model, cache, ids, torch.ones_like(ids)).logits
        with pytest.raises(ValueError, match="must be"):
            forward(model, cache, ids[:, :1], torch.ones(2, 4))
        assert cache.get_seq_length() == 6
        cache.crop(-6)
        torch.testing.assert_close(forward(model, cache, ids).logits, want, rtol=0, atol=0)


def test_a_custom_four_dimensional_mask_is_refused():
    model = tiny_model("llama", "distdec")
    ids = left_padded((6, 6))["input_ids"]
    with pytest.raises(ValueError, match="attention_mask must be"):
        forward(model, make_cache(model), ids, torch.zeros(2, 1, 6, 6))


def test_a_forward_that_stopped_in_the_middle_is_noticed():
    model = tiny_model("llama", "distdec")
    cache = make_cache(model)
    ids = left_padded((6, 6))["input_ids"]
    handle = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            forward(model, cache, ids)
        handle.remove()
        with pytest.raises(RuntimeError, match=r"after 2 of 3 layers; crop\(-6\)"):
            forward(model, cache, ids)
        cache.crop(-6)
        got = forward(model, cache, ids).logits
        want = forward(model, make_cache(model), ids).logits
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_columns_are_taken_back_in_every_form_that_releases_use():
    model = tiny_model("llama", "distdec")
    cache = make_cache(model)
    inputs = left_padded((12, 4))
    with torch.no_grad():
        forward(model, cache, inputs["input_ids"], inputs["attention_mask"])
    seen = []
    for removed in (0, -1, torch.tensor(-2), torch.tensor(0), 50, 7, -3):
        cache.crop(removed)
        seen.append((cache.get_seq_length(), [cache.core.kv.length(row) for row in cache.rows]))
    assert seen == [
        (12, [12, 4]),
        (11, [11, 3]),
        (9, [9, 1]),
        (9, [9, 1]),
        (9, [9, 1]),
        # the second row starts in column 8: nothing of it is left
        (7, [7, 0]),
        (4, [4, 0]),
    ]
    # releases from 5.10 on hand over a tensor; one that got into the allocator would fail much later
    assert type(cache.num_columns) is int


def test_another_number_of_rows_needs_a_reset():
    model = tiny_model("llama", "distdec")
    cache = make_cache(model)
    with torch.no_grad():
        forward(model, cache, left_padded((6, 6))["input_ids"])
        with pytest.raises(ValueError, match="holds 2 rows, this forward has 3"):
            forward(model, cache, left_padded((6, 6, 6))["input_ids"])
        cache.reset()
        forward(model, cache, left_padded((6, 6, 6))["input_ids"])
    assert cache.batch_size == 3


def test_rows_are_selected_repeated_and_freed_without_leaks():
    model = tiny_model("llama", "distdec")
    cache = make_cache(model)
    inputs = left_padded((7, 3, 5))
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        forward(model, cache, inputs["input_ids"], inputs["attention_mask"], position_ids=positions)
        held = [cache.core.kv.length(row) for row in cache.rows]
        assert held == [7, 3, 5]
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 0, 0, 2]))
        assert [cache.core.kv.length(row) for row in cache.rows] == [5, 7, 7, 3]
        cache.batch_select_indices(torch.tensor([True, False, True, False]))
        assert [cache.core.kv.length(row) for row in cache.rows] == [5, 7]
        cache.core.kv.check_integrity()
        mask = torch.cat([inputs["attention_mask"][[2, 0]], torch.ones(2, 1, dtype=torch.int64)], 1)
        got = forward(model, cache, torch.tensor([[9], [8]]), mask, position_ids=torch.tensor([[5], [7]])).logits
        plain = tiny_model("llama", "eager")
        for row, last in enumerate((9, 8)):
            source = (2, 0)[row]
            text = inputs["input_ids"][source][inputs["attention_mask"][source].bool()]
            want = plain(torch.cat([text, torch.tensor([last])])[None]).logits[0, -1]
            torch.testing.assert_close(got[row, -1], want, rtol=1e-5, atol=1e-5)
    cache.reset()
    assert cache.core.kv.sequences() == []
    cache.core.kv.check_integrity()


def test_nothing_is_kept_between_caches_of_one_model():
    # two caches filled in turn through the same layers: what is handed on travels with the call alone
    model = tiny_model("gpt_oss", "distdec")
    eager = tiny_model("gpt_oss", "eager")
    one, two = make_cache(model), make_cache(model)
    a, b = left_padded((9, 4)), left_padded((12,), seed=5)
    steps = {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        forward(model, one, a["input_ids"][:, :4], a["attention_mask"][:, :4])
        got_b = model.generate(**b, **steps, **{two.keyword: two})
        got_a = model.generate(**a, **steps, **{one.keyword: one})
    assert got_a.tolist() == eager.generate(**a, **steps).tolist()
    assert got_b.tolist() == eager.generate(**b, **steps).tolist()


def test_importing_the_package_does_not_import_transformers():
    code = "import sys, distdec.hf; assert 'transformers' not in sys.modules; distdec.hf.UnsupportedModel"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_bound_key_cannot_be_mistaken_for_a_tensor():
    from distdec.hf import UnsupportedModel
    from distdec.hf.attention import KVPair

    pair = KVPair(None, 0, torch.zeros(1), torch.zeros(1))
    for use in (lambda: pair.shape, lambda: pair[0], lambda: torch.matmul(torch.zeros(1, 1), pair), lambda: pair + 1):
        with pytest.raises((UnsupportedModel, TypeError)):
            use()


def test_the_example_of_the_documentation_runs(tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "<unk>", "a", "long", "prompt", "short"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(tmp_path)
    tiny_model("llama", "eager").save_pretrained(tmp_path)
    page = (pathlib.Path(__file__).parents[1] / "docs" / "transformers.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    seen = {}
    exec(program.replace("/models/M", str(tmp_path)), seen)
    assert seen["tokens"].shape == (2, 3 + 20)
    assert [seen["cache"].core.kv.length(row) for row in seen["cache"].rows] == [22, 20]
    eager = tiny_model("llama", "eager")
    assert seen["tokens"].tolist() == eager.generate(**seen["inputs"], max_new_tokens=20, do_sample=False).tolist()

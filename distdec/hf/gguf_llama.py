"""GGUF to a Hugging Face folder: dequantise a Llama once, so that everything else sees plain float32 safetensors.

transformers loads GGUF files too, but refuses to save what it loaded, and drops the digit rule of the `smollm`
pre-tokenizer. The package `gguf` is needed here and nowhere else; it comes with the extra `demo`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# what the Llama family of GGUF files calls a tensor -> what transformers calls it
GGUF_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
GGUF_OUTER_NAMES = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
}


def unpermute_rotary(weight: Any, num_heads: int) -> Any:
    """Undo GGUF's interleaving of the rotary halves of a q or k projection.

    Within a head, GGUF stores rows as pairs (0, D/2), (1, D/2 + 1), ...; transformers wants the first halves of all
    pairs, then the second ones. With D = 4 the rows [0, 2, 1, 3] become [0, 1, 2, 3].

    Shapes:
        weight: [num_heads * D, hidden] float32; the result has the same shape.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def read_gguf_llama(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a Llama GGUF: keyword arguments for LlamaConfig, and a float32 state dict.

    All heads stay as they are (9 query and 3 KV heads here): a cache sharded along the sequence does not need the heads
    to divide by the number of ranks.

    Raises:
        ValueError: The file is of another architecture or holds a tensor without a known name.
    """
    import gguf
    import numpy as np
    import torch

    reader = gguf.GGUFReader(str(path))

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    if (architecture := value("general.architecture")) != "llama":
        raise ValueError(f"{path} holds architecture {architecture!r}, only 'llama' can be converted")
    num_q_heads, num_kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    hidden = value("llama.embedding_length")
    config = {
        "vocab_size": value("llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": num_q_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden // num_q_heads,
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
    }
    heads_of = {"attn_q": num_q_heads, "attn_k": num_kv_heads}
    state: dict[str, Any] = {}
    for tensor in reader.tensors:
        # a copy: the reader's arrays are views of the mapped file
        weight = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        parts = tensor.name.split(".")
        try:
            if parts[0] == "blk":
                name = f"model.layers.{parts[1]}.{GGUF_LAYER_NAMES[parts[2]]}.weight"
                if parts[2] in heads_of:
                    weight = np.ascontiguousarray(unpermute_rotary(weight, heads_of[parts[2]]))
            else:
                name = GGUF_OUTER_NAMES[parts[0]]
        except (KeyError, IndexError):
            raise ValueError(f"{path} holds a tensor {tensor.name!r} that a Llama does not have") from None
        state[name] = torch.from_numpy(weight)
    config["tie_word_embeddings"] = "lm_head.weight" not in state
    return config, state


def write_llama_folder(gguf_path: Path, folder: Path) -> None:
    """Write config, float32 safetensors and tokenizer of a Llama GGUF into `folder`.

    Raises:
        ValueError: The file does not describe a whole Llama.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings, state = read_gguf_llama(gguf_path)
    config = LlamaConfig(**settings)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{gguf_path} does not hold a whole Llama: {error}") from None
    model.tie_weights()
    model.config.dtype = torch.float32
    model.generation_config.pad_token_id = config.pad_token_id
    model.save_pretrained(folder)
    gguf_tokenizer(gguf_path).save_pretrained(folder)


def gguf_tokenizer(gguf_path: Path) -> Any:
    """Return the tokenizer of a GGUF file of the `smollm` kind, with its digit rule.

    transformers reads vocabulary and merges, but drops the rule of `tokenizer.ggml.pre = smollm` that splits every
    digit off before the GPT-2 pattern. Without it numbers get other ids than the model was trained on.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    return tokenizer

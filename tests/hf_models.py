"""Tiny random models of the families that the transformers integration claims, and their truth in one process."""

from __future__ import annotations

import torch

# 8 query and 2 KV heads of 16, three layers: two of them sliding where a family mixes windows
_SMALL = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # wide weights, so that a wrong attention output changes the tokens of a random model
    "initializer_range": 0.2,
}
_MOE = {"num_experts_per_tok": 2}

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 7},
    "gemma2": {"sliding_window": 7, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gpt_oss": {"sliding_window": 7, "num_local_experts": 4, **_MOE},
    "phi3": {"sliding_window": 9},
    "mixtral": {"num_local_experts": 4, **_MOE},
    "olmo2": {},
    "cohere": {},
    "granite": {},
    "smollm3": {},
    "glm4": {},
    "gemma3_text": {
        "sliding_window": 7,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, **_MOE},
}
MAIN = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss", "phi3", "mixtral")
FURTHER = tuple(name for name in FAMILIES if name not in MAIN)


def tiny_config(family: str, **changes):
    """A small config of a family."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**_SMALL, **FAMILIES.get(family, {}), **changes})


def tiny_model(family, attention, *, seed=0, device="cpu", dtype=torch.float32, **changes):
    """A tiny model; the same weights for the same seed, whatever its attention."""
    from transformers import AutoModelForCausalLM

    from distdec.hf import register

    register()
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            tiny_config(family, **changes), attn_implementation=attention, dtype=dtype
        )
    for name, parameter in model.named_parameters():
        # sinks start at small random numbers or uninitialised, which releases differ on; make them matter
        if name.endswith("sinks") and device != "meta":
            torch.nn.init.normal_(parameter, mean=1.0)
    return model.eval()


def left_padded(lengths, *, seed: int = 1, pad: int = 0):
    """Random prompts of these lengths, padded on the left: `{"input_ids", "attention_mask"}` of shape [B, longest]."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.full((len(lengths), width), pad)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(3, _SMALL["vocab_size"], (length,), generator=generator)
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}

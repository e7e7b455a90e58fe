"""The models of the benchmarks: their configs, and random weights of a rank's part of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import benchlib  # noqa: F401  puts the repository on the path
import torch

from distdec.hf.parallel import parallelise
from distdec.mesh import Mesh

LLAMA = {"rms_norm_eps": 1e-5, "max_position_embeddings": 1 << 22, "vocab_size": 128256, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-3-70b": {
        **LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    # the attention of Qwen3-235B (64 query and 4 KV heads of 128) under a narrow MLP, so that it fits one GPU
    "four-kv-heads": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "one-kv-head": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 1,
        "head_dim": 128,
    },
    "tiny": {
        **LLAMA,
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
}
HEADS = ("num_attention_heads", "num_key_value_heads")


def sizes(name: str, smoke: bool = False) -> dict[str, Any]:
    """Return a model's config; in a smoke run the heads are the model's and the rest is tiny."""
    if not smoke:
        return MODELS[name]
    return {**MODELS["tiny"], "head_dim": 16, **{key: MODELS[name][key] for key in HEADS}}


def model_config(name: str, smoke: bool = False) -> Any:
    """Return transformers' config of a model of the table; see `sizes`."""
    from transformers import LlamaConfig

    return LlamaConfig(**sizes(name, smoke))


def random_weight(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a parameter's random values, the same for the same name, shape and kind of device."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if "norm" in name:
        return out.fill_(1.0)
    seed = zlib.crc32(name.encode())
    return out.normal_(0.0, 0.02, generator=torch.Generator(device).manual_seed(seed))


def build(name: str, mesh: Mesh, dtype: torch.dtype, *, smoke: bool = False) -> torch.nn.Module:
    """Build the model with this rank's part of random weights."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights():
        config = model_config(name, smoke)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="distdec").eval()
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}

    def fetch(param: str, cut: Any) -> torch.Tensor:
        shape, label = list(shapes[param]), param
        if cut is not None:
            size = sum(stop - start for start, stop in cut.ranges)
            # ranks with the same part hold the same values, and the whole is what one rank has
            label += "" if size == shape[cut.dim] else str(cut.ranges)
            shape[cut.dim] = size
        return random_weight(label, shape, dtype, mesh.device)

    parallelise(model, mesh, fetch)
    return model.to(mesh.device)

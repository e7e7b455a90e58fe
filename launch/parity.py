"""The yardstick: greedy tokens and logits of single-process transformers with its own eager attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

PREFILL_CHUNK = 512
"""Eager attention builds scores of chunk x context; a whole prompt at once would take gigabytes at 8k tokens."""


def load_reference(folder: str | Path, dtype: str, device: Any) -> Any:
    """Load the whole model with eager attention, all of transformers' own making."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
    return model.to(device).eval()


def reference_tokens(model: Any, prompt_ids: Sequence[int], count: int, repetition_penalty: float = 1.0) -> list[int]:
    """Return `count` greedy tokens of `model.generate`, not stopping at any end-of-sequence token."""
    import torch
    from transformers import GenerationConfig

    # a config of its own: the folder's may ask for sampling
    options = GenerationConfig(
        max_new_tokens=count,
        do_sample=False,
        # None would mean the model's own; no token is this one
        eos_token_id=-1,
        pad_token_id=0,
        repetition_penalty=repetition_penalty,
        prefill_chunk_size=PREFILL_CHUNK if len(prompt_ids) > PREFILL_CHUNK else None,
    )
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
    return out[0, len(prompt_ids) :].tolist()


def reference_logits(model: Any, token_ids: Sequence[int], first: int) -> Any:
    """Return the logits after tokens `first`, `first + 1`, ... of a text, from one plain forward a chunk.

    Shapes:
        returns [len(token_ids) - first, vocabulary]
    """
    import torch
    from transformers import DynamicCache

    cache, parts = DynamicCache(config=model.config), []
    with torch.no_grad():
        for start in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = torch.tensor([list(token_ids[start : start + PREFILL_CHUNK])], device=model.device)
            logits = model(input_ids=chunk, past_key_values=cache, use_cache=True).logits[0]
            parts.append(logits[max(0, first - start) :])
    return torch.cat(parts)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, None if the sequences are equal."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))

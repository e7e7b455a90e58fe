"""Hugging Face transformers models on a sequence-sharded cache.

Names resolve on first use, so that importing this package does not import transformers.
"""

import importlib
from typing import Any

_NAMES = {
    "DistributedCache": "cache",
    "EngineBinding": "attention",
    "UnsupportedModel": "support",
    "bind_engine": "attention",
    "cache_argument": "cache",
    "check_model": "support",
    "load_sharded": "weights",
    "merge_for": "sharding",
    "rank_map": "sharding",
    "register": "attention",
    "shard": "parallel",
}
__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "load_sharded":
        # it builds the model with attn_implementation="distdec", which this registers
        importlib.import_module(f"{__name__}.attention")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)

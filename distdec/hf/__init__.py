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
    "register": "attention",
}
__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)

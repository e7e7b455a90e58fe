"""distdec: decoding with a KV cache that is sharded along the sequence over the GPUs of one or more hosts."""

import importlib
from typing import Any

__version__ = "0.1.0"

# resolved on first use, so that importing the package imports neither torch nor transformers
_NAMES = {"load_sharded": "distdec.hf.weights", "shard": "distdec.hf.parallel"}
__all__ = ["__version__", *_NAMES]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)

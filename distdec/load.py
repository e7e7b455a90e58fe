"""Load a model folder as an engine runs it: this rank's weights, in the dtype of the options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from distdec.config import Config
from distdec.hf.support import check_model
from distdec.hf.weights import load_sharded
from distdec.mesh import Mesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(name: str, device: torch.device) -> str:
    """Return the dtype's name that `auto` means on a device."""
    if name != "auto":
        return name
    return "bfloat16" if device.type == "cuda" else "float32"


def load_model(
    folder: str | Path, mesh: Mesh, config: Config, progress: Callable[[str], None] | None = None
) -> torch.nn.Module:
    """Load this rank's part of a model folder's weights.

    Args:
        config: its sections model and parallel are read.
        progress: called with each parameter's name once it is in place.

    Raises:
        ValueError: the model cannot run on a sharded cache, or not in this layout.
    """
    dtype = DTYPES[resolve_dtype(config.model.dtype, mesh.device)]
    how = config.parallel
    model = load_sharded(folder, mesh, dtype=dtype, queries=how.queries, experts=how.experts, progress=progress)
    check_model(model, mesh, engine=True)
    _read_generation_config(model, folder)
    return model


def _read_generation_config(model: Any, folder: str | Path) -> None:
    """Take the folder's generation config where there is one: it may name more end-of-sequence tokens."""
    if (Path(folder) / "generation_config.json").exists():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder)

"""Load a model folder so that each rank reads only its own part of the weights.

The model is built on the meta device (accelerate), `parallel.parallelise` says which part of each parameter this rank
holds, and the part is read as a slice of the safetensors file: bytes of other ranks are never touched, and host memory
never holds the full model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distdec.hf.parallel import Cut, Fetch, parallelise
from distdec.mesh import Mesh

# a fused expert parameter and the per-expert names that checkpoints store it under: (pattern, names to stack, by dim 0)
_EXPERTS = (
    (
        r"(.*)\.mlp\.experts\.gate_up_proj$",
        ("{0}.block_sparse_moe.experts.{e}.w1.weight", "{0}.block_sparse_moe.experts.{e}.w3.weight"),
    ),
    (r"(.*)\.mlp\.experts\.down_proj$", ("{0}.block_sparse_moe.experts.{e}.w2.weight",)),
    (
        r"(.*)\.mlp\.experts\.gate_up_proj$",
        ("{0}.mlp.experts.{e}.gate_proj.weight", "{0}.mlp.experts.{e}.up_proj.weight"),
    ),
    (r"(.*)\.mlp\.experts\.down_proj$", ("{0}.mlp.experts.{e}.down_proj.weight",)),
)
_RENAMED = ((".mlp.", ".block_sparse_moe."),)


class Checkpoint:
    """The tensors of a folder of safetensors files, one file or several with an index, read by slices.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and the files that it names.

    Raises:
        FileNotFoundError: no safetensors in the folder; other formats are not read, since they may run code.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.exists():
            self._file_of = {k: folder / v for k, v in json.loads(index.read_text())["weight_map"].items()}
            missing = sorted({str(f) for f in self._file_of.values() if not f.exists()})
            if missing:
                raise FileNotFoundError(f"{index} names files that are missing: {', '.join(missing)}")
            self._single = None
        elif single.exists():
            self._file_of = {}
            self._single = single
        else:
            raise FileNotFoundError(f"no model.safetensors or model.safetensors.index.json in {folder}")
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}
        self.bytes_read = 0
        if self._single is not None:
            self._file_of = dict.fromkeys(self._handle(self._single).keys(), self._single)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, cut: Cut | None) -> Tensor:
        """Read a tensor, or the ranges of it that `cut` names."""
        part = self._handle(self._file_of[name]).get_slice(name)
        if cut is None:
            out = part[:]
        else:
            lead = (slice(None),) * cut.dim
            pieces = [part[(*lead, slice(start, stop))] for start, stop in cut.ranges]
            out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dim)
        self.bytes_read += out.numel() * out.element_size()
        return out

    def _handle(self, path: Path) -> Any:
        from safetensors import safe_open

        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        return self._open[path]


def load_sharded(
    folder: str | Path,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    queries: str = "replicate",
    progress: Callable[[str], None] | None = None,
) -> nn.Module:
    """Load a causal LM with this rank's part of the weights, ready for `hf.attention`.

    Args:
        folder: a transformers model folder with safetensors weights.
        dtype: of the parameters.
        queries: as in `parallel.shard`.
        progress: called with each parameter's name once it is in place.

    Raises:
        FileNotFoundError: no folder or no safetensors.
        ValueError: a layout or a model that cannot be sharded; a parameter that the checkpoint lacks.

    Notes:
        Collective: none. Memory: this rank's part, plus one parameter in flight.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="distdec").eval()
    # moving each parameter to meta by itself has parted those that the model shares
    model.tie_weights()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with Checkpoint(folder) as checkpoint:
        fetch = _fetch_from(checkpoint, model, tied)

        def fetch_to_device(name: str, cut: Cut | None) -> Tensor:
            value = fetch(name, cut).to(device=mesh.device, dtype=dtype)
            if progress is not None:
                progress(name)
            return value

        parallelise(model, mesh, fetch_to_device, queries=queries)
        model.bytes_read = checkpoint.bytes_read
    left = [n for n, p in model.named_parameters() if p.is_meta]
    if left:
        raise ValueError(f"parameters left without weights: {', '.join(left[:5])}")
    # buffers (rotary frequencies) were made for real; they only have to move
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(mesh.device)
    return model


def _fetch_from(checkpoint: Checkpoint, model: nn.Module, tied: bool) -> Fetch:
    out_name = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
    in_name = next(n for n, m in model.named_modules() if m is model.get_input_embeddings())
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}

    def fetch(name: str, cut: Cut | None) -> Tensor:
        if tied and name == f"{out_name}.weight" and name not in checkpoint:
            name = f"{in_name}.weight"
        for old, new in (("", ""), *_RENAMED):
            if name.replace(old, new) in checkpoint:
                return checkpoint.read(name.replace(old, new), cut)
        for pattern, names in _EXPERTS:
            match = re.match(pattern, name)
            if match and names[0].format(match[1], e=0) in checkpoint:
                return _stack_experts(checkpoint, [n.replace("{0}", match[1]) for n in names], shapes[name], cut)
        raise ValueError(f"the checkpoint has no tensor for parameter {name}")

    return fetch


def _stack_experts(checkpoint: Checkpoint, names: list[str], shape: tuple[int, ...], cut: Cut | None) -> Tensor:
    """Read a fused expert parameter [E, rows, columns] from per-expert matrices.

    `names` are stacked along the rows: for gate above up, a cut along dim 1 with one range in each half reads one range
    of each of the two. A cut along dim 2 reads those columns of each.
    """
    num_experts, rows = shape[0], shape[1] // len(names)
    out = []
    for expert in range(num_experts):
        parts = []
        for i, name in enumerate(names):
            if cut is None:
                local = None
            elif cut.dim == 1:
                start, stop = cut.ranges[i]
                local = Cut(0, ((start - i * rows, stop - i * rows),))
            else:
                local = Cut(cut.dim - 1, cut.ranges)
            parts.append(checkpoint.read(name.format(e=expert), local))
        out.append(torch.cat(parts) if len(parts) > 1 else parts[0])
    return torch.stack(out)

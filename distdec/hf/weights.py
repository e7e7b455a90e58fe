"""Load a model folder so that each rank reads only its own part of the weights.

The model is built on the meta device (accelerate), `parallel.parallelise` says which part of each parameter this rank
holds, and the part is copied out of the memory-mapped safetensors file: host memory never holds the full model, not
even as mapped pages.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distdec.hf.parallel import Cut, parallelise
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
# in old checkpoints; models compute these themselves
_COMPUTED = (r"rotary_emb\.inv_freq$", r"attention\.bias$", r"masked_bias$")
# a file is mapped anew after reads from tensors of this many bytes, so that its pages do not pile up in memory
_MAPPED_BYTES = 16 << 20


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
        if not index.exists() and not single.exists():
            pickled = next((p.name for p in sorted(folder.glob("*.bin"))), None) if folder.is_dir() else None
            hint = f"; {pickled} is not read: unpickling it may run code. Convert it with save_pretrained"
            raise FileNotFoundError(
                f"no model.safetensors or model.safetensors.index.json in {folder}{hint if pickled else ''}"
            )
        self._open: dict[Path, Any] = {}
        self._mapped: dict[Path, int] = {}
        self.bytes_read = 0
        if index.exists():
            self._file_of = {k: folder / v for k, v in json.loads(index.read_text())["weight_map"].items()}
            missing = sorted({str(f) for f in self._file_of.values() if not f.exists()})
            if missing:
                raise FileNotFoundError(f"{index} names files that are missing: {', '.join(missing)}")
        else:
            self._file_of = dict.fromkeys(self._handle(single).keys(), single)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open = {}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; nothing of it is read."""
        return tuple(self._handle(self._file_of[name]).get_slice(name).get_shape())

    def read(self, name: str, cut: Cut | None, device: torch.device | str = "cpu", dtype: Any = None) -> Tensor:
        """Copy a tensor, or the ranges of it that `cut` names, out of the file.

        Args:
            dtype: of the copy; None is the file's.
        """
        path = self._file_of[name]
        part = self._handle(path).get_slice(name)
        lead = (slice(None),) * (0 if cut is None else cut.dim)
        ranges = ((None, None),) if cut is None else cut.ranges
        out = []
        for start, stop in ranges:
            piece = part[(*lead, slice(start, stop))]
            self.bytes_read += piece.numel() * piece.element_size()
            # a view of the mapped file would change, or end, with it
            out.append(piece.to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format))
            self._mapped[path] += math.prod(part.get_shape()) * piece.element_size()
        del part, piece
        if self._mapped[path] > _MAPPED_BYTES:
            self._open.pop(path).__exit__(None, None, None)
        return out[0] if len(out) == 1 else torch.cat(out, 0 if cut is None else cut.dim)

    def _handle(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if path not in self._open:
            try:
                self._open[path] = safe_open(str(path), framework="pt", device="cpu").__enter__()
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged or was copied in part: {error}") from None
            self._mapped[path] = 0
        return self._open[path]


def load_sharded(
    folder: str | Path,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    queries: str = "auto",
    experts: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> nn.Module:
    """Load a causal LM with this rank's part of the weights, ready for `hf.attention`.

    Args:
        folder: a transformers model folder with safetensors weights.
        dtype: of the parameters, whatever the checkpoint's.
        queries, experts: as in `parallel.shard`.
        progress: called with each parameter's name once it is in place.

    Raises:
        FileNotFoundError: no folder or no safetensors.
        ValueError: a layout or a model that cannot be sharded; a quantised checkpoint; tensors that the checkpoint
            lacks, has in another shape, or has beyond the model's, named.

    Notes:
        Collective: none. Memory: this rank's part, plus one parameter in flight.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    from distdec.hf.attention import register

    register()
    config = AutoConfig.from_pretrained(folder)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ValueError(f"{folder} holds quantised weights ({method}); only plain floating-point weights are read")
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="distdec").eval()
    # moving each parameter to meta by itself has parted those that the model shares
    model.tie_weights()
    with Checkpoint(folder) as checkpoint:
        sources = _sources(checkpoint, model)

        def fetch(name: str, cut: Cut | None) -> Tensor:
            value = _read(checkpoint, sources[name], cut, mesh.device, dtype)
            if progress is not None:
                progress(name)
            return value

        parallelise(model, mesh, fetch, queries=queries, experts=experts)
        model.bytes_read = checkpoint.bytes_read
    left = [n for n, p in model.named_parameters() if p.is_meta]
    assert not left, f"parameters left without weights: {left[:5]}"
    # buffers (rotary frequencies) were made for real; they only have to move
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to(mesh.device)
    return model


class _Source(NamedTuple):
    """Where a parameter comes from: tensors to stack along the rows, for each expert if `experts` is not 0."""

    names: tuple[str, ...]
    experts: int = 0


def _sources(checkpoint: Checkpoint, model: nn.Module) -> dict[str, _Source]:
    """Find every parameter's tensors before anything is read, and check that they are all and no more.

    Raises:
        ValueError: tensors missing, of another shape, or left over.
    """
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    out_name = next(f"{n}.weight" for n, m in model.named_modules() if m is head)
    in_name = next(f"{n}.weight" for n, m in model.named_modules() if m is embedding)
    tied = head.weight is embedding.weight
    sources: dict[str, _Source] = {}
    missing, wrong = [], []
    for name, shape in shapes.items():
        source = _source(checkpoint, in_name if tied and name == out_name else name, shape)
        if source is None:
            missing.append(name)
            continue
        sources[name] = source
        rows = shape[1] // len(source.names) if source.experts else 0
        want = (rows, shape[2]) if source.experts else shape
        for tensor in _tensors(source):
            if tensor not in checkpoint:
                missing.append(tensor)
            elif checkpoint.shape(tensor) != want:
                wrong.append(f"{tensor} is {list(checkpoint.shape(tensor))}, the model needs {list(want)}")
    used = {tensor for source in sources.values() for tensor in _tensors(source)} | ({out_name} if tied else set())
    ignored = [*_COMPUTED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    extra = [n for n in sorted(checkpoint.names() - used) if not any(re.search(pattern, n) for pattern in ignored)]
    faults = [
        f"{what} {len(names)}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        for what, names in (("missing", missing), ("of another shape", wrong), ("not part of the model", extra))
        if names
    ]
    if faults:
        raise ValueError(f"the checkpoint does not fit {type(model).__name__}: tensors {'; '.join(faults)}")
    return sources


def _source(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> _Source | None:
    for old, new in (("", ""), *_RENAMED):
        if name.replace(old, new) in checkpoint:
            return _Source((name.replace(old, new),))
    for pattern, names in _EXPERTS:
        match = re.match(pattern, name)
        full = tuple(n.replace("{0}", match[1]) for n in names) if match else ()
        if full and full[0].format(e=0) in checkpoint:
            return _Source(full, shape[0])
    return None


def _tensors(source: _Source) -> list[str]:
    if not source.experts:
        return list(source.names)
    return [name.format(e=expert) for expert in range(source.experts) for name in source.names]


def _read(checkpoint: Checkpoint, source: _Source, cut: Cut | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    if source.experts:
        return _stack_experts(checkpoint, source, cut, device, dtype)
    return checkpoint.read(source.names[0], cut, device, dtype)


def _stack_experts(
    checkpoint: Checkpoint, source: _Source, cut: Cut | None, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Read a fused expert parameter [E, rows, columns] from per-expert matrices.

    A source's names are stacked along the rows: for gate above up, a cut along dim 1 has one range in each half, and
    reads one range of each of the two. A cut along dim 2 reads those columns of each, one along dim 0 those experts.
    """
    out, wanted = [], range(source.experts)
    if cut is not None and cut.dim == 0:
        [(start, stop)] = cut.ranges
        wanted, cut = range(start, stop), None
    for expert in wanted:
        parts = []
        for i, name in enumerate(source.names):
            tensor = name.format(e=expert)
            local = None
            if cut is not None and cut.dim == 1:
                start, stop = cut.ranges[i]
                above = i * checkpoint.shape(tensor)[0]
                local = Cut(0, ((start - above, stop - above),))
            elif cut is not None:
                local = Cut(cut.dim - 1, cut.ranges)
            parts.append(checkpoint.read(tensor, local, device, dtype))
        out.append(torch.cat(parts) if len(parts) > 1 else parts[0])
    return torch.stack(out)

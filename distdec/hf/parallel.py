"""Shard a transformers model's weights over the ranks of a mesh, with plain local tensors and explicit collectives.

What goes where, for a mesh of `world = kvp x tp` ranks:

- query, key and value projections over the tp axis, in whole KV heads with their query heads; along kvp they are the
  same on all ranks, since every kvp rank needs the step's queries, and stores the keys that fall to it. The query
  projection may also be split along kvp and gathered (`queries="gather"`).
- output projection, MLP, experts, embedding and head over ALL ranks. Widths need not divide: rank r of W takes
  `[n * r // W, n * (r + 1) // W)`, and the output projection the columns that the scattered merges hand it.

Modules are found by their shape in the tree (an attention module has `o_proj` next to `q_proj` or `qkv_proj`, an MLP
has `down_proj`), because a model's own plan does not name the fused and the expert forms; what is not recognised is
refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distdec.merge import column_range
from distdec.mesh import Mesh, all_gather, validate_layout


class Cut(NamedTuple):
    """Which part of a full parameter a rank holds: these ranges of `dim`, one after the other."""

    dim: int
    ranges: tuple[tuple[int, int], ...]

    def of(self, full: Tensor) -> Tensor:
        """Copy the part out of the full tensor."""
        parts = [full.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)


Fetch = Callable[[str, Cut | None], Tensor]
"""Returns a rank's part of the parameter of this name (None: the whole of it)."""


def split_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return rank's range of `size` items over `ranks` ranks; sizes differ by at most one.

    Example: 1536 over 5 ranks: 307, 307, 307, 307, 308.
    """
    return size * rank // ranks, size * (rank + 1) // ranks


def shard(model: nn.Module, mesh: Mesh, *, queries: str = "replicate") -> nn.Module:
    """Replace a loaded model's weights by this rank's part of them, in place.

    Args:
        model: a transformers causal LM with all its weights, the same on every rank.
        queries: `replicate` computes a tp group's queries on each of its kvp ranks, `gather` splits their projection
            along kvp and gathers the result.

    Raises:
        ValueError: heads that do not split over tp, or a module that cannot be sharded, named.

    Notes:
        Collective: none here; the forward then all-reduces over all ranks once after each output projection, MLP and
        embedding, and all-gathers the logits.
    """
    params = dict(model.named_parameters(remove_duplicate=False))

    def fetch(name: str, cut: Cut | None) -> Tensor:
        full = params[name].detach()
        return full if cut is None else cut.of(full)

    return parallelise(model, mesh, fetch, queries=queries)


def parallelise(model: nn.Module, mesh: Mesh, fetch: Fetch, *, queries: str = "replicate") -> nn.Module:
    """Give every parameter of `model` this rank's part, from `fetch`, and put the collectives in.

    Args:
        model: parameters may be on the meta device; those that are not sharded are fetched whole.
        fetch: where the parts come from, a loaded model or a checkpoint.
    """
    if queries not in ("replicate", "gather"):
        raise ValueError(f"queries must be 'replicate' or 'gather', got {queries!r}")
    sharder = _Sharder(model, mesh, fetch, queries == "gather" and mesh.kvp_size > 1)
    sharder.run()
    return model


def local_heads(config: object, mesh: Mesh) -> tuple[int, int]:
    """Return (query heads, KV heads) of this rank.

    Raises:
        ValueError: tp does not divide the KV heads.
    """
    num_q = int(getattr(config, "num_attention_heads"))  # noqa: B009 - configs are typed as object here
    num_kv = int(getattr(config, "num_key_value_heads", None) or num_q)
    validate_layout(mesh.world_size, mesh.kvp_size, mesh.tp_size, num_q, num_kv)
    return num_q // mesh.tp_size, num_kv // mesh.tp_size


class RowLinear(nn.Module):
    """A linear map whose input features are split over ranks: local product, then a sum over the group.

    Shapes:
        x: [..., width] or [..., local columns]; returns [..., out_features], the same on all ranks
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, columns: tuple[int, int], group: object | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.columns = columns
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        start, stop = self.columns
        if x.shape[-1] != stop - start:
            x = x[..., start:stop]
        y = F.linear(x, self.weight)
        if self.group is not None:
            dist.all_reduce(y, group=self.group)
        # the bias goes on after the sum, once
        return y if self.bias is None else y + self.bias


class GatherLinear(nn.Module):
    """A linear map whose output features are split over ranks and gathered.

    Shapes:
        x: [..., in_features]; returns [..., sum(sizes)], the same on all ranks of the group
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: list[int], group: object | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.sizes = sizes
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if self.group is None:
            return y
        widest, rows = max(self.sizes), x.numel() // x.shape[-1]
        if rows == 0:
            # a step that only prefills wants no logits; every rank knows, so none waits for the gather
            return y.new_empty(*x.shape[:-1], sum(self.sizes))
        send = y.new_zeros(rows, widest)
        send[:, : y.shape[-1]] = y.reshape(rows, y.shape[-1])
        parts = send.new_empty(len(self.sizes) * rows, widest)
        all_gather(parts, send, self.group)
        parts = parts.view(len(self.sizes), rows, widest)
        full = torch.cat([parts[r, :, :n] for r, n in enumerate(self.sizes)], -1)
        return full.view(*x.shape[:-1], -1)


class VocabEmbedding(nn.Module):
    """An embedding whose rows are split over ranks: each looks up its own tokens, and the results are summed."""

    def __init__(self, weight: Tensor, rows: tuple[int, int], scale: Tensor | float, group: object | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.rows = rows
        self.group = group
        if isinstance(scale, Tensor):
            self.register_buffer("scale", scale, persistent=False)
        else:
            self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        start, stop = self.rows
        if stop > start:
            mine = (ids >= start) & (ids < stop)
            out = F.embedding((ids - start).clamp(0, stop - start - 1), self.weight)
            out = out.masked_fill(~mine[..., None], 0)
        else:
            out = self.weight.new_zeros(*ids.shape, self.weight.shape[1])
        if self.group is not None:
            dist.all_reduce(out, group=self.group)
        scale = self.scale
        return out * (scale.to(out.dtype) if isinstance(scale, Tensor) else scale)


class _Sharder:
    """One walk over the module tree."""

    def __init__(self, model: nn.Module, mesh: Mesh, fetch: Fetch, gather_queries: bool) -> None:
        self.model = model
        self.mesh = mesh
        self.fetch = fetch
        self.gather_queries = gather_queries
        self.config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        self.q_heads, self.kv_heads = local_heads(self.config, mesh)
        self.world = mesh.group if mesh.world_size > 1 else None
        self.done: set[str] = set()

    def run(self) -> None:
        tied = self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight
        modules = dict(self.model.named_modules())
        for name, module in modules.items():
            children = dict(module.named_children())
            own = dict(module.named_parameters(recurse=False))
            if "o_proj" in children:
                self._attention(name, module)
            elif isinstance(children.get("down_proj"), nn.Linear):
                self._mlp(name, module)
            elif "down_proj" in own and "gate_up_proj" in own:
                self._experts(name, module)
        self._vocabulary(modules, tied)
        for name, param in list(self.model.named_parameters(remove_duplicate=False)):
            if name not in self.done:
                self._set(name, self.fetch(name, None), like=param)

    def _set(self, name: str, value: Tensor, like: Tensor | None = None) -> None:
        if like is not None and value.dtype != like.dtype:
            value = value.to(like.dtype)
        path, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))
        self.done.add(name)

    def _cut(self, name: str, cut: Cut) -> None:
        self._set(name, self.fetch(name, cut), like=self.model.get_parameter(name))

    def _replace(self, name: str, module: nn.Module) -> None:
        path, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(path), leaf, module)
        self.done.update(f"{name}.{n}" for n, _ in module.named_parameters())

    def _row_linear(self, name: str, width: int, cut: tuple[int, int], columns: tuple[int, int]) -> None:
        linear = self.model.get_submodule(name)
        if linear.in_features != width:
            raise ValueError(f"cannot shard {name}: {linear.in_features} input features, expected {width}")
        dtype = linear.weight.dtype
        weight = self.fetch(f"{name}.weight", Cut(1, (cut,))).to(dtype)
        bias = None if linear.bias is None else self.fetch(f"{name}.bias", None).to(dtype)
        self._replace(name, RowLinear(weight, bias, columns, self.world))

    def _columns(self, name: str, ranges: tuple[tuple[int, int], ...]) -> None:
        linear = self.model.get_submodule(name)
        self._cut(f"{name}.weight", Cut(0, ranges))
        if linear.bias is not None:
            self._cut(f"{name}.bias", Cut(0, ranges))
        linear.out_features = linear.weight.shape[0]

    def _attention(self, name: str, module: nn.Module) -> None:
        mesh = self.mesh
        children = dict(module.named_children())
        tp, t = mesh.tp_size, mesh.tp_rank
        head_dim = module.head_dim
        self._check_norms(name, children, head_dim)
        q_width, kv_width = self.q_heads * head_dim, self.kv_heads * head_dim
        q_range = (t * q_width, (t + 1) * q_width)
        kv_range = (t * kv_width, (t + 1) * kv_width)
        if "qkv_proj" in children:
            k0, v0 = tp * q_width, tp * (q_width + kv_width)
            k_range, v_range = ((base + kv_range[0], base + kv_range[1]) for base in (k0, v0))
            self._columns(f"{name}.qkv_proj", (q_range, k_range, v_range))
            # the fused forward splits by these counts
            module.config = copy.copy(module.config)
            module.config.num_attention_heads = self.q_heads
            module.num_key_value_heads = self.kv_heads
        else:
            self._queries(f"{name}.q_proj", q_range)
            self._columns(f"{name}.k_proj", (kv_range,))
            self._columns(f"{name}.v_proj", (kv_range,))
        if "sinks" in dict(module.named_parameters(recurse=False)):
            self._cut(f"{name}.sinks", Cut(0, ((t * self.q_heads, (t + 1) * self.q_heads),)))
        columns = column_range(q_width, mesh.kvp_size, mesh.kvp_rank)
        cut = (t * q_width + columns[0], t * q_width + columns[1])
        self._row_linear(f"{name}.o_proj", tp * q_width, cut, columns)

    def _queries(self, name: str, q_range: tuple[int, int]) -> None:
        mesh = self.mesh
        linear = self.model.get_submodule(name)
        if not self.gather_queries or not isinstance(linear, nn.Linear):
            self._columns(name, (q_range,))
            return
        width = q_range[1] - q_range[0]
        bounds = [split_range(width, mesh.kvp_size, r) for r in range(mesh.kvp_size)]
        start, stop = bounds[mesh.kvp_rank]
        cut = Cut(0, ((q_range[0] + start, q_range[0] + stop),))
        dtype = linear.weight.dtype
        weight = self.fetch(f"{name}.weight", cut).to(dtype)
        bias = None if linear.bias is None else self.fetch(f"{name}.bias", cut).to(dtype)
        self._replace(name, GatherLinear(weight, bias, [b - a for a, b in bounds], mesh.kvp_group))

    def _check_norms(self, name: str, children: dict[str, nn.Module], head_dim: int) -> None:
        for norm in ("q_norm", "k_norm"):
            weight = getattr(children.get(norm), "weight", None)
            if self.mesh.tp_size > 1 and weight is not None and weight.numel() != head_dim:
                raise ValueError(
                    f"{name}.{norm} normalises over {weight.numel()} features, more than one head of {head_dim}: it "
                    f"cannot be split over tp={self.mesh.tp_size}; use tp=1 and more kvp ranks"
                )

    def _mlp(self, name: str, module: nn.Module) -> None:
        children = dict(module.named_children())
        width = children["down_proj"].in_features
        start, stop = split_range(width, self.mesh.world_size, self.mesh.rank)
        if "gate_up_proj" in children:
            self._columns(f"{name}.gate_up_proj", ((start, stop), (width + start, width + stop)))
        else:
            for part in ("gate_proj", "up_proj"):
                if part in children:
                    self._columns(f"{name}.{part}", ((start, stop),))
        self._row_linear(f"{name}.down_proj", width, (start, stop), (start, stop))

    def _experts(self, name: str, module: nn.Module) -> None:
        gate_up, down = module.gate_up_proj, module.down_proj
        world, rank = self.mesh.world_size, self.mesh.rank
        # [E, 2I, H] and [E, H, I] (gate above up), or transposed [E, H, 2I] and [E, I, H] with gate and up interleaved
        interleaved = gate_up.shape[2] == 2 * down.shape[1] and gate_up.shape[1] == down.shape[2]
        width = down.shape[1] if interleaved else down.shape[2]
        start, stop = split_range(width, world, rank)
        if interleaved:
            self._cut(f"{name}.gate_up_proj", Cut(2, ((2 * start, 2 * stop),)))
            self._cut(f"{name}.down_proj", Cut(1, ((start, stop),)))
            if hasattr(module, "gate_up_proj_bias"):
                self._cut(f"{name}.gate_up_proj_bias", Cut(1, ((2 * start, 2 * stop),)))
        else:
            self._cut(f"{name}.gate_up_proj", Cut(1, ((start, stop), (width + start, width + stop))))
            self._cut(f"{name}.down_proj", Cut(2, ((start, stop),)))
        if hasattr(module, "down_proj_bias") and rank:
            # each rank would add it to its own part of the sum
            bias = self.fetch(f"{name}.down_proj_bias", None)
            self._set(f"{name}.down_proj_bias", torch.zeros_like(bias), like=module.down_proj_bias)
        if self.world is not None:
            module.register_forward_hook(_sum_over(self.world))

    def _vocabulary(self, modules: dict[str, nn.Module], tied: bool) -> None:
        embedding = self.model.get_input_embeddings()
        head = self.model.get_output_embeddings()
        names = {id(m): n for n, m in modules.items()}
        in_name, out_name = names[id(embedding)], names[id(head)]
        world, rank = self.mesh.world_size, self.mesh.rank
        bounds = [split_range(embedding.weight.shape[0], world, r) for r in range(world)]
        cut = Cut(0, (bounds[rank],))
        dtype = embedding.weight.dtype
        weight = self.fetch(f"{in_name}.weight", cut).to(dtype)
        scale = getattr(embedding, "embed_scale", 1.0)
        new = VocabEmbedding(weight, bounds[rank], scale, self.world)
        self._replace(in_name, new)
        head_weight = new.weight.data if tied else self.fetch(f"{out_name}.weight", cut).to(dtype)
        bias = None if head.bias is None else self.fetch(f"{out_name}.bias", cut).to(dtype)
        self._replace(out_name, GatherLinear(head_weight, bias, [b - a for a, b in bounds], self.world))


def _sum_over(group: object) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    def hook(_module: nn.Module, _args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        dist.all_reduce(out, group=group)
        return out

    return hook

"""Shard a transformers model's weights over the ranks of a mesh, with plain local tensors and explicit collectives.

What goes where, for a mesh of `world = kvp x tp` ranks:

- query, key and value projections over the tp axis, in whole KV heads with their query heads; along kvp they are the
  same on all ranks, since every kvp rank needs the step's queries, and stores the keys that fall to it. The query
  projection may also be split along kvp and gathered (`queries="gather"`).
- output projection, MLP, experts, embedding and head over ALL ranks. Widths need not divide: rank r of W takes
  `[n * r // W, n * (r + 1) // W)`, and the output projection the columns that the scattered merges hand it. Experts
  are split by width too, or the experts themselves are (`experts="expert"`).

Modules are found by their shape in the tree (an attention module has `o_proj` next to `q_proj` or `qkv_proj`, an MLP
has `down_proj`), because a model's own plan does not name the fused and the expert forms; what is not recognised is
refused.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distdec.hf.experts import ExpertShapes, own_experts, split_range, width_range
from distdec.hf.linears import GatherLinear, RowLinear, SplitNorm, VocabEmbedding
from distdec.hf.sharding import Sharding, local_heads, mark, sharding_of
from distdec.merge import column_range
from distdec.mesh import Mesh
from distdec.planner import ModelShape, expert_mode, query_mode
from distdec.rank_sum import RankSum

# norms whose root mean square runs over all heads: x / sqrt(mean(x^2) + variance_epsilon), times the weight
_NORMS_OVER_HEADS = ("Olmo2RMSNorm", "Olmo3RMSNorm")


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


def shard(model: nn.Module, mesh: Mesh, *, queries: str = "auto", experts: str = "auto") -> nn.Module:
    """Replace a loaded model's weights by this rank's part of them, in place, and move it to `mesh.device`.

    Args:
        model: a transformers causal LM with all its weights, the same on every rank; it may still be on the CPU.
        queries: `replicate` computes a tp group's queries on each of its kvp ranks, `gather` splits their projection
            along kvp and gathers the result; `auto` takes what `planner.query_mode` estimates to be faster.
        experts: `width` gives each rank a stretch of every expert's width, `expert` a stretch of the experts; `auto`
            takes what `planner.expert_mode` finds to divide. Models without experts have no use for it.

    Returns:
        The same model. Give it to a `DistributedCache` on the same mesh; `generate` is then used as before.

    Raises:
        ValueError: heads that do not split over tp, or a module that cannot be sharded, named. The model may be in
            parts by then: load it again.

    Notes:
        Collective: none here; the forward then all-reduces over all ranks once after each output projection, MLP and
        embedding, and all-gathers the logits.
    """
    if sharding_of(model) is not None:
        raise ValueError(f"the model is sharded already: {sharding_of(model)}")
    params = dict(model.named_parameters(remove_duplicate=False))

    def fetch(name: str, cut: Cut | None) -> Tensor:
        full = params[name].detach()
        return (full if cut is None else cut.of(full)).to(mesh.device)

    return parallelise(model, mesh, fetch, queries=queries, experts=experts).to(mesh.device)


def parallelise(
    model: nn.Module, mesh: Mesh, fetch: Fetch, *, queries: str = "auto", experts: str = "auto"
) -> nn.Module:
    """Give every parameter of `model` this rank's part, from `fetch`, and put the collectives in.

    Args:
        model: parameters may be on the meta device; those that are not sharded are fetched whole.
        fetch: where the parts come from, a loaded model or a checkpoint.

    Raises:
        ValueError: as `shard`.
    """
    if queries not in ("auto", "replicate", "gather"):
        raise ValueError(f"queries must be 'auto', 'replicate' or 'gather', got {queries!r}")
    if experts not in ("auto", "width", "expert"):
        raise ValueError(f"experts must be 'auto', 'width' or 'expert', got {experts!r}")
    sharder = _Sharder(model, mesh, fetch, queries, experts)
    sharder.run()
    experts = "+".join(sharder.expert_modes)
    mark(model, Sharding(mesh.kvp_size, mesh.tp_size, mesh.rank, sharder.queries, experts), sharder.sum)
    return model


class _Sharder:
    """One walk over the module tree."""

    def __init__(self, model: nn.Module, mesh: Mesh, fetch: Fetch, queries: str, experts: str) -> None:
        self.model = model
        self.mesh = mesh
        self.fetch = fetch
        self.config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        self.q_heads, self.kv_heads = local_heads(self.config, mesh)
        self.queries = self._query_mode(queries)
        self.experts = experts
        self.expert_modes: set[str] = set()
        self.world = mesh.group if mesh.world_size > 1 else None
        self.sum = None if self.world is None else RankSum(self.world)
        self.done: set[str] = set()
        self.num_attentions = self.num_mlps = 0

    def run(self) -> None:
        tied = self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight
        modules = dict(self.model.named_modules())
        for name, module in modules.items():
            children = dict(module.named_children())
            own = dict(module.named_parameters(recurse=False))
            if "o_proj" in children and not {"q_proj", "qkv_proj"}.isdisjoint(children):
                self._attention(name, module)
                self.num_attentions += 1
            elif isinstance(children.get("down_proj"), nn.Linear):
                self._mlp(name, module)
                self.num_mlps += 1
            elif "down_proj" in own and "gate_up_proj" in own:
                self._experts(name, module)
                self.num_mlps += 1
        layers = self.config.num_hidden_layers
        if self.num_attentions != layers or self.num_mlps < layers:
            raise ValueError(
                f"cannot shard {type(self.model).__name__}: {self.num_attentions} of {layers} layers have an "
                f"attention that is recognised (o_proj next to q_proj or qkv_proj), {self.num_mlps} an MLP (down_proj)"
            )
        if self.experts == "expert" and not self.expert_modes:
            raise ValueError(f"experts='expert' needs fused experts, which {type(self.model).__name__} does not have")
        self._vocabulary(modules, tied)
        for name, param in list(self.model.named_parameters(remove_duplicate=False)):
            if name not in self.done:
                self._set(name, self.fetch(name, None), like=param)

    def _query_mode(self, queries: str) -> str:
        mesh = self.mesh
        fused = any(n.endswith(".qkv_proj") for n, _ in self.model.named_modules())
        if queries == "gather" and fused:
            raise ValueError("queries='gather' needs a query projection of its own; this model's is fused (qkv_proj)")
        if queries == "auto" and not fused:
            # from the config alone, so that every rank comes to the same answer
            size = self.model.get_input_embeddings().weight.element_size()
            shape = ModelShape.from_config(self.config)
            queries = query_mode(shape, mesh.kvp_size, mesh.tp_size, dtype_bytes=size)
        return "gather" if queries == "gather" and mesh.kvp_size > 1 else "replicate"

    def _linear(self, name: str) -> nn.Linear:
        linear = self.model.get_submodule(name)
        shape = tuple(getattr(getattr(linear, "weight", None), "shape", ()))
        # quantised and adapted layers also call themselves linear, but their weights are not [out, in]
        if not isinstance(linear, nn.Linear) or shape != (linear.out_features, linear.in_features):
            raise ValueError(f"cannot shard {name}: {type(linear).__name__} is not a plain linear layer")
        return linear

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

    def _row_linear(self, name: str, width: int, cut: tuple[int, int], inputs: int, columns: tuple[int, int]) -> None:
        linear = self._linear(name)
        if linear.in_features != width:
            raise ValueError(f"cannot shard {name}: {linear.in_features} input features, expected {width}")
        dtype = linear.weight.dtype
        weight = self.fetch(f"{name}.weight", Cut(1, (cut,))).to(dtype)
        bias = None if linear.bias is None else self.fetch(f"{name}.bias", None).to(dtype)
        self._replace(name, RowLinear(weight, bias, inputs, columns, self.sum))

    def _columns(self, name: str, ranges: tuple[tuple[int, int], ...]) -> None:
        linear = self._linear(name)
        self._cut(f"{name}.weight", Cut(0, ranges))
        if linear.bias is not None:
            self._cut(f"{name}.bias", Cut(0, ranges))
        linear.out_features = linear.weight.shape[0]

    def _attention(self, name: str, module: nn.Module) -> None:
        mesh = self.mesh
        children = dict(module.named_children())
        tp, t = mesh.tp_size, mesh.tp_rank
        head_dim = module.head_dim
        self._norms(name, children, head_dim)
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
        self._row_linear(f"{name}.o_proj", tp * q_width, cut, q_width, columns)

    def _queries(self, name: str, q_range: tuple[int, int]) -> None:
        mesh = self.mesh
        linear = self._linear(name)
        if self.queries == "replicate":
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

    def _norms(self, name: str, children: dict[str, nn.Module], head_dim: int) -> None:
        """Cut the norms of queries and keys, where they have a weight for each head."""
        tp, t = self.mesh.tp_size, self.mesh.tp_rank
        for leaf, heads in (("q_norm", self.q_heads), ("k_norm", self.kv_heads)):
            norm = children.get(leaf)
            weight = getattr(norm, "weight", None)
            if weight is None or weight.numel() == head_dim or tp == 1:
                continue
            if tuple(weight.shape) == (heads * tp, head_dim):
                self._cut(f"{name}.{leaf}.weight", Cut(0, ((t * heads, (t + 1) * heads),)))
            elif weight.numel() == heads * tp * head_dim and type(norm).__name__ in _NORMS_OVER_HEADS:
                width = heads * head_dim
                part = self.fetch(f"{name}.{leaf}.weight", Cut(0, ((t * width, (t + 1) * width),))).to(weight.dtype)
                new = SplitNorm(part, weight.numel(), norm.variance_epsilon, self.mesh.tp_group)
                self._replace(f"{name}.{leaf}", new)
            else:
                raise ValueError(
                    f"{name}.{leaf} ({type(norm).__name__}) normalises over {weight.numel()} features, more than one "
                    f"head of {head_dim}: it cannot be split over tp={tp}; use tp=1 and more kvp ranks"
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
        self._row_linear(f"{name}.down_proj", width, (start, stop), width, (start, stop))

    def _experts(self, name: str, module: nn.Module) -> None:
        """Cut fused experts; their outputs are parts of the sum that is then taken over all ranks."""
        shapes = ExpertShapes.of(name, module)
        mode = self._expert_mode(name, module, shapes)
        if mode == "expert":
            start, stop = split_range(shapes.num_experts, self.mesh.world_size, self.mesh.rank)
            for leaf in dict(module.named_parameters(recurse=False)):
                self._cut(f"{name}.{leaf}", Cut(0, ((start, stop),)))
            module.forward = functools.partial(own_experts, module, start)
        else:
            self._expert_widths(name, module, shapes)
        if self.sum is not None:
            module.register_forward_hook(_summed_by(self.sum))

    def _expert_mode(self, name: str, module: nn.Module, shapes: ExpertShapes) -> str:
        world = self.mesh.world_size
        # what `own_experts` needs to know of the step between the two products
        known = hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")
        if self.experts == "auto":
            mode = expert_mode(shapes.num_experts, shapes.width, world) if known else "width"
        else:
            mode = self.experts
        if mode == "expert" and (shapes.num_experts < world or not known):
            fault = f"{shapes.num_experts} experts are fewer than {world} ranks" if known else "its gate is not known"
            raise ValueError(f"cannot shard {name} ({type(module).__name__}) by expert: {fault}; use experts='width'")
        self.expert_modes.add(mode)
        return mode

    def _expert_widths(self, name: str, module: nn.Module, shapes: ExpertShapes) -> None:
        world, rank = self.mesh.world_size, self.mesh.rank
        width = shapes.width
        start, stop = width_range(width, world, rank)
        if shapes.interleaved:
            self._cut(f"{name}.gate_up_proj", Cut(2, ((2 * start, 2 * stop),)))
            self._cut(f"{name}.down_proj", Cut(1, ((start, stop),)))
            if hasattr(module, "gate_up_proj_bias"):
                self._cut(f"{name}.gate_up_proj_bias", Cut(1, ((2 * start, 2 * stop),)))
        else:
            self._cut(f"{name}.gate_up_proj", Cut(1, ((start, stop), (width + start, width + stop))))
            self._cut(f"{name}.down_proj", Cut(2, ((start, stop),)))
        if hasattr(module, "down_proj_bias") and rank:
            # each rank would add it to its own part of the sum
            bias = module.down_proj_bias
            self._set(f"{name}.down_proj_bias", torch.zeros(bias.shape, dtype=bias.dtype, device=self.mesh.device))

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
        new = VocabEmbedding(weight, bounds[rank], scale, self.sum)
        self._replace(in_name, new)
        head_weight = new.weight if tied else self.fetch(f"{out_name}.weight", cut).to(dtype)
        bias = None if head.bias is None else self.fetch(f"{out_name}.bias", cut).to(dtype)
        new_head = GatherLinear(head_weight, bias, [b - a for a, b in bounds], self.world)
        if tied:
            new_head.weight = new.weight
        self._replace(out_name, new_head)


def _summed_by(total: RankSum) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    def hook(_module: nn.Module, _args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return total(out)

    return hook

"""Experts in parts: what the ranks compute adds up to the whole, whatever the routing, and odd modules are refused."""

import pytest
import torch
import torch.nn.functional as F
from hf_models import FAMILIES, tiny_model
from test_weights import rank_of

from distdec.hf import shard
from distdec.hf.experts import own_experts, split_range, width_range
from distdec.hf.sharding import sharding_of
from distdec.planner import expert_mode

MOE = ("mixtral", "qwen3_moe", "gpt_oss")


def with_experts(family, num_experts):
    key = next(name for name in FAMILIES[family] if name in ("num_experts", "num_local_experts"))
    return ((key, num_experts),)


def experts_of(model):
    return [m for m in model.modules() if "gate_up_proj" in dict(m.named_parameters(recurse=False))]


def family_model(family, num_experts):
    model = tiny_model(family, "distdec", **dict(with_experts(family, num_experts)))
    torch.manual_seed(2)
    with torch.no_grad():
        for module in experts_of(model):
            for parameter in module.parameters():
                parameter.normal_(0, 0.5)
    return model


def parts(family, num_experts, ranks, hidden, index, weights):
    """The output of the first layer's experts on each rank, before the sum."""
    found = []
    for rank in range(ranks):
        model = shard(family_model(family, num_experts), rank_of(1, 1, 0))
        module = experts_of(model)[0]
        start, stop = split_range(num_experts, ranks, rank)
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, torch.nn.Parameter(parameter[start:stop].clone(), requires_grad=False))
        found.append(own_experts(module, start, hidden, index, weights))
    return found


def routed(case, num_tokens, num_experts):
    if case == "spread":
        return torch.stack([torch.randperm(num_experts)[:2] for _ in range(num_tokens)])
    # all to the first and the last expert, so that ranks between them have nothing to do
    return torch.tensor([[num_experts - 1, 0]]).expand(num_tokens, 2).contiguous()


@pytest.mark.parametrize("case", ["spread", "crowded"])
@pytest.mark.parametrize("family", MOE)
def test_the_parts_of_all_ranks_are_the_whole(monkeypatch, family, case):
    honest = F.grouped_mm

    def poisoning(x, weight, *, offs):
        out = honest(x, weight, offs=offs)
        # what the real one leaves in rows that no expert has
        out[int(offs[-1]) :] = float("nan")
        return out

    monkeypatch.setattr(F, "grouped_mm", poisoning)
    torch.manual_seed(4)
    hidden, index = torch.randn(7, 48), routed(case, 7, 6)
    weights = torch.rand(7, 2)
    want = experts_of(family_model(family, 6))[0](hidden, index, weights)
    for ranks in (1, 4):
        found = parts(family, 6, ranks, hidden, index, weights)
        torch.testing.assert_close(sum(found), want.detach(), rtol=1e-5, atol=1e-5)
    if case == "crowded":
        assert [bool(part.any()) for part in found] == [True, False, False, True]


def test_nothing_waits_for_the_device():
    with torch.device("meta"):
        hidden, index, weights = torch.empty(7, 48), torch.empty(7, 2, dtype=torch.int64), torch.empty(7, 2)
        module = experts_of(tiny_model("gpt_oss", "distdec", device="meta", dtype=torch.bfloat16))[0]
    out = own_experts(module, 2, hidden.bfloat16(), index, weights)
    assert (out.shape, out.dtype) == ((7, 48), torch.bfloat16)


def test_nan_stays_in_its_row():
    torch.manual_seed(4)
    hidden, index = torch.randn(7, 48), routed("spread", 7, 6)
    hidden[3] = float("nan")
    for part in parts("mixtral", 6, 4, hidden, index, torch.rand(7, 2)):
        assert torch.isfinite(part[[0, 1, 2, 4, 5, 6]]).all()


def test_widths_are_cut_in_steps_that_grouped_products_take():
    for width, ranks in ((768, 5), (2880, 8), (1408, 3), (64, 4), (97, 4), (12, 5), (3, 4)):
        ranges = [width_range(width, ranks, rank) for rank in range(ranks)]
        assert [i for start, stop in ranges for i in range(start, stop)] == list(range(width))
        if width % 8 == 0:
            assert all(start % 8 == 0 and stop > start for start, stop in ranges)


def test_the_choice_is_width_unless_only_experts_divide():
    assert expert_mode(128, 768, 8) == "width"
    assert expert_mode(60, 1408, 5) == "expert"
    assert expert_mode(60, 1408, 7) == "width"


@pytest.mark.parametrize(("experts", "found"), [("auto", "width"), ("width", "width"), ("expert", "expert")])
def test_the_mark_says_how_experts_are_split(experts, found):
    model = shard(family_model("qwen3_moe", 4), rank_of(2, 1, 1), experts=experts)
    assert sharding_of(model).experts == found
    held = experts_of(model)[0].gate_up_proj.shape
    assert held == ((2, 64, 48) if found == "expert" else (4, 32, 48))


def test_the_runtime_splits_experts_as_asked(tmp_path):
    from distdec.config import Config, ParallelConfig
    from distdec.load import load_model
    from distdec.mesh import Mesh

    tiny_model("qwen3_moe", "eager").save_pretrained(tmp_path)
    for experts in ("expert", "width"):
        model = load_model(tmp_path, Mesh.single(), Config(parallel=ParallelConfig(experts=experts)))
        assert sharding_of(model).experts == experts
    with pytest.raises(ValueError, match=r"parallel\.experts must be one of auto, width, expert, got 'both'"):
        ParallelConfig(experts="both")


def gateless(module):
    module.__dict__.pop("is_transposed")


def post_norm(module):
    module.has_post_expert_norm = True


def side_by_side(module):
    module.is_concatenated = True


@pytest.mark.parametrize(
    ("family", "ranks", "edit", "experts", "told"),
    [
        ("mixtral", 5, None, "expert", r"by expert: 4 experts are fewer than 5 ranks; use experts='width'"),
        ("mixtral", 2, gateless, "expert", r"\(MixtralExperts\) by expert: its gate is not known"),
        ("mixtral", 2, post_norm, "auto", "a norm of each expert's output needs all of its parts"),
        ("gpt_oss", 2, side_by_side, "width", "transposed experts with gate beside up"),
        ("llama", 2, None, "expert", "experts='expert' needs fused experts, which LlamaForCausalLM does not have"),
        ("mixtral", 2, None, "both", "experts must be 'auto', 'width' or 'expert', got 'both'"),
    ],
)
def test_what_cannot_be_split_is_refused(family, ranks, edit, experts, told):
    model = tiny_model(family, "distdec")
    for module in experts_of(model):
        if edit is not None:
            edit(module)
    with pytest.raises(ValueError, match=told):
        shard(model, rank_of(ranks, 1, 0), experts=experts)

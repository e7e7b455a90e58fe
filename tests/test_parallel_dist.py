"""Sharded weights give the whole model's logits, on every rank, for every legal layout."""

import pytest
import torch
from tests.hf_models import FAMILIES, tiny_model


def whole_and_sharded(family, kvp, tp, queries, overrides):
    """Return (largest error, largest logit, share of the parameters held), eager attention on both sides."""
    from distdec.hf.parallel import shard
    from distdec.mesh import Mesh

    ids = torch.arange(3, 24).remainder(97).view(3, 7)
    with Mesh.create(kvp, tp) as mesh, torch.no_grad():
        whole = tiny_model(family, **overrides)
        want = whole(ids).logits
        size = sum(p.numel() for p in whole.parameters())
        model = shard(tiny_model(family, **overrides), mesh, queries=queries)
        got = model(ids).logits
        held = sum(p.numel() for p in model.parameters())
        return (got - want).abs().max().item(), want.abs().max().item(), held / size


@pytest.mark.dist
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_sharded_weights_give_the_whole_models_logits(ranks, family):
    for kvp, tp in [(1, 2), (2, 1)]:
        if family == "olmo2" and tp > 1:
            continue
        for error, size, share in ranks(2).run(whole_and_sharded, family, kvp, tp, "replicate", {}):
            assert error <= 1e-5 * max(1.0, size), (family, kvp, tp, error, size)
            assert share < 0.8

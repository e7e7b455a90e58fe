"""Mixtures of experts split by expert over real ranks give the tokens and logits of one process."""

import pytest
from test_experts import MOE, with_experts
from tp_inputs import error, generated, lively_model, packed, truth

pytestmark = pytest.mark.dist

TIMEOUT_S = 150.0
TOLERANCE = 2e-5


def errors(family, kvp, tp, want, overrides):
    """Relative errors of the logits in generate and in the engine; infinite where a token differs."""
    from distdec import shard
    from distdec.hf.sharding import sharding_of
    from distdec.mesh import Mesh

    with Mesh.create(kvp, tp, device="cpu") as mesh:
        model = shard(lively_model(family, "distdec", **dict(overrides)), mesh, experts="expert")
        assert sharding_of(model).experts == "expert"
        return error(generated(model, mesh), want), error(packed(model, mesh, "auto"), want)


# experts that divide, and that do not: 2 + 3 on two ranks, 1 + 2 + 1 + 2 on four
@pytest.mark.parametrize(("kvp", "tp", "num_experts"), [(2, 1, 5), (1, 2, 4), (4, 1, 4), (2, 2, 6)])
@pytest.mark.parametrize("family", MOE)
def test_every_family_equals_eager_by_expert(ranks, family, kvp, tp, num_experts):
    overrides = with_experts(family, num_experts)
    want = truth(family, overrides)
    for found in ranks(kvp * tp).run(errors, family, kvp, tp, want, overrides, timeout_s=TIMEOUT_S):
        assert max(found) <= TOLERANCE

"""Sharded weights on a sharded cache give the tokens and logits of one process, in every layout, or are refused."""

import pytest
from hf_models import FAMILIES, tiny_model
from tp_inputs import error, generated, packed, truth

pytestmark = pytest.mark.dist

# the first body on a worker imports transformers, which takes a while on busy cores
TIMEOUT_S = 150.0
# through three layers of float32, relative to the largest logit
TOLERANCE = 2e-5
LAYOUTS = [(2, 1), (1, 2), (4, 1), (2, 2)]
# of a step: how queries come to the kvp ranks, the merge in generate, the merge in the engine
WAYS = [
    ("replicate", "all_gather", "all_to_all"),
    ("gather", "reduce_scatter", "all_reduce"),
    ("replicate", "auto", "auto"),
    ("gather", "all_to_all", "reduce_scatter"),
]
FUSED = ("phi3",)


def errors(family, kvp, tp, ways, want, overrides=()):
    """Relative errors of the logits in generate and in the engine for each way; infinite where a token differs."""
    from distdec import shard
    from distdec.mesh import Mesh

    found = {}
    with Mesh.create(kvp, tp, device="cpu") as mesh:
        for queries, *merges in ways:
            model = shard(tiny_model(family, "distdec", **dict(overrides)), mesh, queries=queries)
            found[queries, merges[0], "generate"] = error(generated(model, mesh, merge=merges[0]), want)
            found[queries, merges[1], "engine"] = error(packed(model, mesh, merges[1]), want)
    return found


def check(ranks, family, kvp, tp, ways, overrides=()):
    if family in FUSED:
        ways = [("replicate", *merges) for _, *merges in ways]
    for found in ranks(kvp * tp).run(
        errors, family, kvp, tp, ways, truth(family, overrides), overrides, timeout_s=TIMEOUT_S
    ):
        assert len(found) == 2 * len(ways)
        assert not {way: e for way, e in found.items() if not e <= TOLERANCE}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_equals_eager_with_heads_and_sequence_split(ranks, family):
    check(ranks, family, 2, 2, WAYS[3:])


@pytest.mark.parametrize(("kvp", "tp"), LAYOUTS)
def test_every_layout_equals_eager(ranks, kvp, tp):
    check(ranks, "llama", kvp, tp, WAYS[:2])


@pytest.mark.slow
@pytest.mark.parametrize(("kvp", "tp"), LAYOUTS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_in_every_layout_and_way_equals_eager(ranks, family, kvp, tp):
    check(ranks, family, kvp, tp, WAYS)

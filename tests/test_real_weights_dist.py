"""SmolLM2 with its real weights, nine query and three KV heads, divided over ranks that do not divide the heads."""

import pytest
import torch

from launch import assets

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TEXTS = (
    "The three rules of a good experiment are",
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness",
)
NEW_TOKENS = 32


def inputs(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer(list(TEXTS), padding=True, return_tensors="pt")


def decoded(folder, kvp, tp, queries, merge):
    """Greedy tokens of a sharded model, the bytes read, and this rank's share of the tokens."""
    from distdec import load_sharded
    from distdec.hf import DistributedCache, cache_argument
    from distdec.mesh import Mesh

    with Mesh.create(kvp, tp, device="cpu") as mesh:
        model = load_sharded(folder, mesh, dtype=torch.float32, queries=queries)
        cache = DistributedCache(model, mesh, max_tokens=1024, min_chunk=8, max_chunk=8, page_size=8, merge=merge)
        prompt = inputs(folder)
        out = model.generate(
            **prompt, **cache_argument(cache), min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, do_sample=False
        )
        return out[:, prompt["input_ids"].shape[1] :].tolist(), model.bytes_read, cache.core.local_tokens()


@pytest.mark.parametrize(
    ("kvp", "tp", "queries", "merge"),
    [(2, 1, "replicate", "auto"), (4, 1, "gather", "reduce_scatter"), (1, 3, "auto", "auto")],
)
def test_sharded_smollm2_continues_as_eager_does(ranks, kvp, tp, queries, merge):
    from transformers import AutoModelForCausalLM

    folder = str(assets.smollm2_folder())
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = inputs(folder)
    want = whole.generate(**prompt, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, do_sample=False)
    want = want[:, prompt["input_ids"].shape[1] :].tolist()
    total = 4 * sum(p.numel() for p in whole.parameters())
    del whole
    results = ranks(kvp * tp).run(decoded, folder, kvp, tp, queries, merge, timeout_s=300)
    stored = int(prompt["attention_mask"].sum()) + len(TEXTS) * (NEW_TOKENS - 1)
    assert sum(local for *_, local in results) == stored * tp
    for tokens, read, local in results:
        assert tokens == want
        assert local > 0
        # all but the q/k/v projections and norms is divided by all ranks
        assert total / (kvp * tp) <= read <= total / (kvp * tp) + 0.11 * total

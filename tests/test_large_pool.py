"""A pool of more than 2^31 elements a layer: its last tokens are stored and read through 64-bit offsets."""

import pytest
import torch
import torch.nn.functional as F

from distdec.attention import DistributedAttention
from distdec.mesh import Mesh
from distdec.sharded_cache import ShardedCache

HEADS, DIM = 8, 128
TOKENS = 2_300_000


def attended(q, k, v):
    """Causal attention of the last queries over all keys, in float32; [T, Hq, D] each."""
    length, count = len(k), len(q)
    mask = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count)
    heads = [x.float().transpose(0, 1)[None] for x in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1).flatten(1)


@pytest.mark.gpu
def test_the_last_tokens_of_a_pool_beyond_31_bits():
    cache = ShardedCache(
        Mesh.single("cuda"), num_layers=1, num_kv_heads=HEADS, head_dim=DIM, max_tokens=TOKENS, dtype=torch.bfloat16
    )
    assert cache.pool.k.numel() > 2**31
    layer = DistributedAttention(cache.mesh, cache)
    # all but the last thousands of tokens belong to another sequence
    cache.kv.add(0)
    cache.kv.extend(0, TOKENS - 4096)
    cache.kv.add(1)
    generator = torch.Generator("cuda").manual_seed(1)
    made = []
    for count in (301, 1, 5):
        batch = cache.begin_step([(1, count)])
        assert int(batch.slot_mapping.max()) * HEADS * DIM > 2**31
        q, k, v = (
            torch.randn(count, heads, DIM, generator=generator, device="cuda").bfloat16()
            for heads in (4 * HEADS, HEADS, HEADS)
        )
        made.append((k, v))
        got = layer(q, k, v, batch, 0).out
        want = attended(q, *(torch.cat(parts) for parts in zip(*made, strict=True)))
        assert (got.float() - want).abs().max() < 2e-2

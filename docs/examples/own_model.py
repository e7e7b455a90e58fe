"""The layer inside a tensor-parallel model written by hand: one attention block, its projections cut by rank.

torchrun --standalone --nproc-per-node 4 docs/examples/own_model.py 2        # tp 2, so kvp 2: more ranks than KV heads
torchrun --standalone --nproc-per-node 2 docs/examples/own_model.py          # kvp 2
"""

import sys

import torch
import torch.distributed as dist

from distdec.attention import DistributedAttention
from distdec.merge import column_range
from distdec.mesh import Mesh
from distdec.sharded_cache import ShardedCache

HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM = 64, 8, 2, 16


class Block:
    """Queries, keys and values cut over tp; the output projection cut over all ranks, where the merge scatters to."""

    def __init__(self, mesh: Mesh, cache: ShardedCache, full: dict[str, torch.Tensor]) -> None:
        self.mesh = mesh
        self.attention = DistributedAttention(mesh, cache, merge="all_to_all")
        self.q, self.k, self.v = (full[name].chunk(mesh.tp_size)[mesh.tp_rank] for name in ("q", "k", "v"))
        # the columns of this tp rank's heads that the merge leaves on this kvp rank
        width = Q_HEADS * HEAD_DIM // mesh.tp_size
        start, stop = column_range(width, mesh.kvp_size, mesh.kvp_rank)
        first = mesh.tp_rank * width
        self.o = full["o"][:, first + start : first + stop]

    def __call__(self, x, batch):
        """x [T, HIDDEN], the same on all ranks -> the same shape, the same on all ranks."""
        q, k, v = ((x @ w.T).view(len(x), -1, HEAD_DIM) for w in (self.q, self.k, self.v))
        out = self.attention(q, k, v, batch, layer=0).out @ self.o.T
        if self.mesh.world_size > 1:
            dist.all_reduce(out, group=self.mesh.group)
        return out


def main(tp: int = 1) -> float:
    """Run three steps of two sequences; return the largest difference from one process, whole and dense."""
    with Mesh.create(tp=tp) as mesh:
        torch.manual_seed(0)  # the same weights and inputs on every rank
        rows = {"q": Q_HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        full = {name: torch.randn(n, HIDDEN, device=mesh.device) / 8 for name, n in rows.items()}
        full["o"] = torch.randn(HIDDEN, Q_HEADS * HEAD_DIM, device=mesh.device) / 8
        cache = ShardedCache(
            mesh, num_layers=1, num_kv_heads=KV_HEADS // mesh.tp_size, head_dim=HEAD_DIM, max_tokens=2048
        )
        block = Block(mesh, cache, full)
        texts = [torch.zeros(0, HIDDEN, device=mesh.device) for _ in range(2)]
        for sequence in (0, 1):
            cache.kv.add(sequence)
        worst = 0.0
        for counts in ((300, 17), (1, 1), (1, 1)):
            new = [torch.randn(n, HIDDEN, device=mesh.device) for n in counts]
            texts = [torch.cat([text, x]) for text, x in zip(texts, new, strict=True)]
            got = block(torch.cat(new), cache.begin_step(list(enumerate(counts))))
            want = torch.cat([dense(text, full)[-n:] for text, n in zip(texts, counts, strict=True)])
            worst = max(worst, float((got - want).abs().max()))
        print(f"{mesh}: {cache.local_tokens()} tokens, off by {worst:.1e}")
        return worst


def dense(x, full):
    """Compute the same block in one process."""
    q, k, v = ((x @ full[name].T).view(1, len(x), -1, HEAD_DIM).transpose(1, 2) for name in ("q", "k", "v"))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1) @ full["o"].T


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))

"""A transformers model whose weights and KV cache are spread over all ranks; `generate` is called as always.

torchrun --standalone --nproc-per-node 4 docs/examples/shard_and_generate.py /models/M "Once upon a time"
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import distdec
from distdec.hf import DistributedCache, cache_argument
from distdec.mesh import Mesh


def main(folder: str, text: str) -> str:
    """Continue a text by 20 tokens, the same on every rank."""
    with Mesh.create() as mesh:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="distdec")
        distdec.shard(model, mesh)
        cache = DistributedCache(model, mesh, max_tokens=4096)

        inputs = tokenizer(text, return_tensors="pt").to(mesh.device)
        tokens = model.generate(**inputs, **cache_argument(cache), max_new_tokens=20, do_sample=False)
        answer = tokenizer.decode(tokens[0], skip_special_tokens=True)
        held = sum(p.numel() for p in model.parameters())
        print(f"rank {mesh.rank}: {held} parameters, {cache.core.local_tokens()} tokens")
        if mesh.is_leader:
            print(answer)
        return answer


if __name__ == "__main__":
    main(*sys.argv[1:3])

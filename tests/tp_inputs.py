"""What the tests of sharded weights share: truths in one process, and greedy decoding on a sharded model both ways."""

import functools

import torch
from hf_models import left_padded, tiny_model

NEW_TOKENS = 6
# longer than the windows, pairwise different, on both sides of a chunk edge
LENGTHS = (21, 5, 12)
SMALL_CHUNKS = {"max_tokens": 1024, "min_chunk": 4, "max_chunk": 8, "page_size": 4}


def lively_model(family, attention, **overrides):
    """A tiny model whose biases and norms are random too: at their first values, 0 and 1, a lost one shows nowhere."""
    model = tiny_model(family, attention, **overrides)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@functools.cache
def truth(family, overrides=()):
    """Greedy tokens [B][N] and logits [N, B, vocabulary] of the whole model under eager attention."""
    model = lively_model(family, "eager", **dict(overrides))
    out = model.generate(
        **left_padded(LENGTHS),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, max(LENGTHS) :].tolist(), torch.stack(out.logits)


def generated(model, mesh, **options):
    """Decode greedily through `generate` on a DistributedCache; as `truth`."""
    from distdec.hf import DistributedCache, cache_argument

    cache = poisoned(DistributedCache(model, mesh, **{**SMALL_CHUNKS, **options}))
    out = model.generate(
        **left_padded(LENGTHS),
        **cache_argument(cache),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[:, max(LENGTHS) :].tolist(), torch.stack(out.logits), cache.core


def poisoned(cache):
    """Fill the unused pool with NaN."""
    core = getattr(cache, "core", cache)
    core.pool.k.fill_(float("nan"))
    core.pool.v.fill_(float("nan"))
    return cache


def packed(model, mesh, merge, prompts=None, new_tokens=NEW_TOKENS, compiler=None, fetch=False, **options):
    """Decode greedily with packed rows, as an engine does: two prompts, then the third next to their decode rows.

    With a `compiler` the layers are compiled by that backend of torch.compile. `fetch`: as `fetch_following`.
    """
    from distdec.attention import DistributedAttention
    from distdec.hf import bind_engine, merge_for
    from distdec.hf.support import check_model
    from distdec.sharded_cache import ShardedCache

    shape = check_model(model, mesh, engine=True)
    cache = ShardedCache(
        mesh,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        windows=shape.windows,
        **{**SMALL_CHUNKS, **options},
    )
    poisoned(cache)
    binding = bind_engine(model, DistributedAttention(mesh, cache, merge=merge_for(model, mesh, merge)))
    if fetch:
        binding.fetch_following()
    if compiler is not None:
        binding.compile(backend=compiler, options=None)
    if prompts is None:
        inputs = left_padded(LENGTHS)
        prompts = [ids[-n:].tolist() for ids, n in zip(inputs["input_ids"], LENGTHS, strict=True)]
    texts, done, tokens, logits = [list(p) for p in prompts], [0] * len(prompts), [[] for _ in prompts], []
    for row in range(len(prompts)):
        cache.kv.add(row)

    def step(rows):
        rows = sorted(rows, key=lambda row: len(texts[row]) - done[row] > 1)
        spans = [(row, done[row], len(texts[row])) for row in rows]
        binding.set_step(cache.begin_step([(row, stop - start) for row, start, stop in spans]))
        ids = torch.tensor([t for row, start, stop in spans for t in texts[row][start:stop]])
        positions = torch.tensor([p for _, start, stop in spans for p in range(start, stop)])
        ends = torch.tensor([stop - start for _, start, stop in spans]).cumsum(0) - 1
        out = binding.forward(ids, positions, logits_to_keep=ends)
        for (row, _, stop), values in zip(spans, out, strict=True):
            done[row] = stop
            tokens[row].append(int(values.argmax()))
            texts[row].append(tokens[row][-1])
            logits.append((row, len(tokens[row]) - 1, values))

    with torch.no_grad():
        step(range(len(prompts) - 1))
        step(range(len(prompts)))
        while live := [row for row, made in enumerate(tokens) if len(made) < new_tokens]:
            step(live)
    binding.close()
    full = torch.empty(new_tokens, len(prompts), logits[0][2].numel())
    for row, n, values in logits:
        full[n, row] = values
    return tokens, full, cache


def error(got, want):
    """Largest difference of the logits, relative to the largest logit; infinity where the tokens differ."""
    if got[0] != want[0]:
        return float("inf")
    return float((got[1] - want[1]).abs().max() / want[1].abs().max())

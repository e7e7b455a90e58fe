"""Models run by an engine: rows of different requests packed in one line, without a transformers cache or a host sync.

On the meta device there are no values, so whatever would wait for one raises: `item()`, a tensor in an `if`, `nonzero`.
A forward that passes there can be captured in a graph.
"""

import contextlib

import pytest
import torch
from hf_models import FAMILIES, FURTHER, MAIN, left_padded, tiny_config, tiny_model

from distdec.mesh import Mesh
from distdec.ops.partial import Partial

# the first body on a worker imports transformers, which takes a while on busy cores
TIMEOUT_S = 150.0
NEW_TOKENS = 10
LENGTHS = (5, 21, 14)


class MetaAttention:
    """Stands in for `DistributedAttention` where no tensor has values; remembers what it was asked."""

    def __init__(self):
        self.mesh = Mesh.single("cpu")
        self.calls = []

    def __call__(self, q, k, v, batch, layer, *, scale, window, softcap, sinks, following):
        assert k.shape == (q.shape[0], 2, 16) and following is None
        self.calls.append((layer, window, softcap, None if sinks is None else tuple(sinks.shape)))
        return Partial(q.new_empty(q.shape[0], q.shape[1] * v.shape[-1]), None)


def meta_model(family, **changes):
    # the grouped product of experts exists only in bfloat16 there
    return tiny_model(family, "distdec", device="meta", dtype=torch.bfloat16, **changes)


def meta_integers(count):
    return torch.zeros(count, dtype=torch.int64, device="meta")


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_run_without_mask_cache_or_host_sync(family):
    from distdec.hf import bind_engine

    attention = MetaAttention()
    binding = bind_engine(meta_model(family), attention)
    binding.set_step(object())
    with torch.no_grad():
        logits = binding.forward(meta_integers(9), meta_integers(9), logits_to_keep=meta_integers(3))
    assert tuple(logits.shape) == (3, 101)
    config = tiny_config(family)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * 3
    windows = [window if kind == "sliding_attention" else 0 for kind in kinds]
    softcap = 5.0 if family == "gemma2" else 0.0
    sinks = (8,) if family == "gpt_oss" else None
    assert attention.calls == [(i, windows[i], softcap, sinks) for i in range(3)]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_without_the_four_dimensional_mask_there_is_a_host_sync(family):
    from distdec.hf import bind_engine

    model = meta_model(family)
    bind_engine(model, MetaAttention()).set_step(object())
    with torch.no_grad(), pytest.raises(RuntimeError, match="meta tensors"):
        model(input_ids=meta_integers(9)[None], position_ids=meta_integers(9)[None], use_cache=False)


def test_a_rope_that_follows_the_longest_row_is_refused_in_an_engine():
    from distdec.hf import UnsupportedModel, bind_engine, check_model

    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = tiny_model("llama", "distdec", rope_parameters=rope)
    check_model(model)
    with pytest.raises(UnsupportedModel, match="dynamic"):
        bind_engine(model, MetaAttention())


def test_a_model_is_bound_once_and_can_be_freed():
    from distdec.hf import bind_engine

    model = meta_model("llama")
    binding = bind_engine(model, MetaAttention())
    with pytest.raises(ValueError, match="already bound"):
        bind_engine(model, MetaAttention())
    with pytest.raises(RuntimeError, match="set_step"):
        binding.forward(meta_integers(2), meta_integers(2))
    binding.close()
    bind_engine(model, MetaAttention())


@contextlib.contextmanager
def no_sync(device):
    """On a GPU, whatever waits for the device raises."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_engine(family, merge, device="cpu"):
    """Greedy decoding in a hand-made engine: slices of prompts next to decode rows, from different rows' positions."""
    from distdec.attention import DistributedAttention
    from distdec.hf import bind_engine, check_model
    from distdec.mesh import Mesh
    from distdec.sharded_cache import ShardedCache

    on_cpu = device == "cpu"
    mesh = Mesh.create() if on_cpu else Mesh.single(device)
    model = tiny_model(family, "distdec").to(device)
    if not on_cpu and "num_experts_per_tok" in FAMILIES[family]:
        # torch's grouped product waits for the device in float32; in bfloat16 it does not
        model.set_experts_implementation("batched_mm")
    geometry = check_model(model, engine=True)
    cache = ShardedCache(
        mesh,
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        windows=geometry.windows,
        max_tokens=1024,
        # small chunks reach every edge; the kernels for GPUs need whole tiles
        **({"min_chunk": 4, "max_chunk": 8, "page_size": 4, "weights": (1, 3)} if on_cpu else {}),
    )
    cache.pool.k.fill_(float("nan"))
    cache.pool.v.fill_(float("nan"))
    binding = bind_engine(model, DistributedAttention(mesh, cache, merge=merge))
    prompts = [left_padded((n,), seed=n)["input_ids"][0] for n in LENGTHS]
    texts = [prompt.tolist() for prompt in prompts]
    done = [0] * len(texts)
    for row in range(len(texts)):
        cache.kv.add(row)

    def step(counts):
        # decode rows first, then slices of prompts
        rows = sorted((row for row, n in enumerate(counts) if n), key=lambda row: counts[row] > 1)
        binding.set_step(cache.begin_step([(row, counts[row]) for row in rows]))
        spans = [(row, done[row], done[row] + counts[row]) for row in rows]
        ids = torch.tensor([t for row, start, stop in spans for t in texts[row][start:stop]], device=device)
        positions = torch.tensor([p for _, start, stop in spans for p in range(start, stop)], device=device)
        ends = torch.tensor([counts[row] for row in rows], device=device).cumsum(0) - 1
        with no_sync(device):
            logits = binding.forward(ids, positions, logits_to_keep=ends)
        for (row, _, stop), token in zip(spans, logits.argmax(-1).tolist(), strict=True):
            done[row] = stop
            if stop == len(texts[row]):
                texts[row].append(token)

    with torch.no_grad():
        step([5, 9, 0])
        step([1, 12, 3])
        step([1, 1, 11])
        while any(len(text) < len(prompt) + NEW_TOKENS for text, prompt in zip(texts, prompts, strict=True)):
            step([int(len(t) < len(p) + NEW_TOKENS) for t, p in zip(texts, prompts, strict=True)])
    binding.close()
    eager = tiny_model(family, "eager").to(device)
    for text, prompt in zip(texts, prompts, strict=True):
        want = eager.generate(prompt[None].to(device), max_new_tokens=NEW_TOKENS, do_sample=False)
        assert text == want[0].tolist()
    return [cache.kv.local_length(row, mesh.kvp_rank) for row in range(len(texts))]


@pytest.mark.dist
@pytest.mark.parametrize("family", MAIN)
def test_packed_rows_equal_eager_row_by_row(ranks, family):
    first, second = ranks(2).run(run_engine, family, "all_gather", timeout_s=TIMEOUT_S)
    # the last token of a row is never run
    assert [a + b for a, b in zip(first, second, strict=True)] == [n + NEW_TOKENS - 1 for n in LENGTHS]
    assert 0 < sum(first) < sum(second)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("family", FURTHER)
def test_packed_rows_of_further_families_equal_eager(ranks, family):
    test_packed_rows_equal_eager_row_by_row(ranks, family)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_on_a_gpu_equal_eager_and_never_wait(family):
    assert run_engine(family, "all_gather", device="cuda") == [n + NEW_TOKENS - 1 for n in LENGTHS]

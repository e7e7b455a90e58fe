"""Calls of the layer and the cache that cannot be right are refused before anything is stored or reserved."""

import os
import subprocess
import sys

import pytest
import torch

from distdec.attention import DistributedAttention
from distdec.cache.kv_cache import CacheFull
from distdec.mesh import Mesh
from distdec.sharded_cache import ShardedCache

T = 5


def make(**changed):
    options = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "max_tokens": 64, "min_chunk": 4, "max_chunk": 8}
    cache = ShardedCache(Mesh.single(), **{**options, "page_size": 4, **changed})
    return cache, DistributedAttention(cache.mesh, cache)


def tokens(count=T, q_heads=4):
    return torch.randn(count, q_heads, 16), torch.randn(count, 2, 16), torch.randn(count, 2, 16)


def begun():
    cache, attention = make()
    cache.kv.add(0)
    return cache, attention, cache.begin_step([(0, T)])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q, k, v: (q[:, :0], k, v), "multiple of 2 heads"),
        (lambda q, k, v: (q.long(), k, v), "expected floating q, k and v, got torch.int64"),
        (lambda q, k, v: (q, k.cfloat(), v), "expected floating q, k and v"),
        (lambda q, k, v: (q, k, v.to("meta")), "expected q, k and v on cpu, got cpu, cpu and meta"),
    ],
)
def test_tensors_of_another_kind_are_refused_also_after_good_ones(change, said):
    cache, attention, batch = begun()
    good = tokens()
    attention(*good, batch, 0)
    stored = cache.pool.k[1].clone()
    with pytest.raises(ValueError, match=said):
        attention(*change(*good), batch, 1)
    assert torch.equal(cache.pool.k[1].view(torch.int32), stored.view(torch.int32))


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_is_not_there_is_refused(layer):
    _, attention, batch = begun()
    with pytest.raises(IndexError, match=f"layer must be 0 to 1, got {layer}"):
        attention(*tokens(), batch, layer)


@pytest.mark.parametrize("options", [{"scale": -0.5}, {"softcap": -30.0}])
def test_negative_factors_are_refused(options):
    _, attention, batch = begun()
    with pytest.raises(ValueError, match="scale and softcap must not be negative"):
        attention(*tokens(), batch, 0, **options)


@pytest.mark.parametrize("sinks", [torch.zeros(4, device="meta"), torch.zeros(4, dtype=torch.int64)])
def test_sinks_of_another_kind_are_refused(sinks):
    _, attention, batch = begun()
    with pytest.raises(ValueError, match="expected floating sinks on cpu"):
        attention(*tokens(), batch, 0, sinks=sinks)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_gradient_through_the_cache_is_refused(which):
    _, attention, batch = begun()
    tensors = tokens()
    tensors[which].requires_grad_()
    with pytest.raises(RuntimeError, match=r"for inference: call it under torch.no_grad\(\)"):
        attention(*tensors, batch, 0)
    with torch.no_grad():
        assert not attention(*tensors, batch, 0).out.requires_grad


def test_the_batch_of_another_step_or_cache_is_refused():
    cache, attention, old = begun()
    cache.kv.add(1)
    new = cache.begin_step([(1, 1), (0, T - 1)])
    other = begun()[2]
    for wrong in (old, other):
        with pytest.raises(ValueError, match="is not what begin_step"):
            attention(*tokens(), wrong, 0)
    for layer in range(2):
        attention(*tokens(), new, layer)


@pytest.mark.parametrize(
    ("rows", "error", "said"),
    [
        ([(0, 3), (1, 1), (0, 1)], ValueError, "one row of a step only"),
        ([(0, 3), (1, -1)], ValueError, "num_tokens must be from 0 to"),
        ([(0, 3), (7, 1)], KeyError, "sequence 7 is not in the cache"),
        ([(0, 3), (1, 1.0)], TypeError, "integer"),
        ([(0, 3), (1, 500)], CacheFull, "are available"),
    ],
)
def test_a_step_that_cannot_be_reserves_nothing(rows, error, said):
    cache, _ = make()
    for seq in (0, 1):
        cache.kv.add(seq)
    with pytest.raises(error, match=said):
        cache.begin_step(rows)
    assert (cache.kv.length(0), cache.kv.length(1)) == (0, 0)


@pytest.mark.parametrize("q_len", [0, -1, 17])
def test_decode_rows_of_no_or_too_many_tokens_are_refused_before_the_step(q_len):
    cache, _ = make()
    cache.kv.add(0)
    with pytest.raises(ValueError, match=f"q_len must be 1 to 16, got {q_len}"):
        cache.begin_step([(0, 17)], q_len=q_len)
    assert cache.kv.length(0) == 0


@pytest.mark.parametrize("window", [-3, 2.5, True, 2**31, "8"])
def test_what_is_no_window_is_refused(window):
    with pytest.raises(ValueError, match="a sliding window must be an integer from 1 to 2147483647"):
        make(windows=[window])


def test_the_widest_window_hides_nothing():
    widest = 2**31 - 1
    cache, attention = make(windows=[widest])
    cache.kv.add(0)
    batch, tensors = cache.begin_step([(0, T)]), tokens()
    want, got = (attention(*tensors, batch, 0, window=window).out for window in (0, widest))
    assert torch.equal(want, got)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_layers": 0}, "num_layers must be an integer >= 1, got 0"),
        ({"num_kv_heads": -1}, "num_kv_heads must be an integer >= 1, got -1"),
        ({"head_dim": 1.5}, "head_dim must be an integer >= 1, got 1.5"),
        ({"max_tokens": -1}, "max_tokens must be an integer >= 0, got -1"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer >= 0, got 1.5"),
        ({"weights": [0]}, "weights must be an integer >= 1, got 0"),
        ({"min_chunk": 0}, "min_chunk must be an integer >= 1, got 0"),
        ({"dtype": torch.int32}, "are stored in float32, bfloat16 or float16, got torch.int32"),
        ({"dtype": torch.float8_e4m3fn}, "are stored in float32, bfloat16 or float16, got torch.float8_e4m3fn"),
    ],
)
def test_a_cache_of_impossible_sizes_is_refused(changed, said):
    with pytest.raises(ValueError, match=said):
        make(**changed)


def test_kernels_without_a_gpu_are_refused_by_name():
    code = "from distdec.ops.backends import get_backend; get_backend('triton', 'cpu')"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "ValueError: backend 'triton' needs a GPU; on the CPU take 'reference'" in done.stderr

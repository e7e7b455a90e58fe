"""Choosing ops by name, and the probe that refuses foreign ops with another LSE."""

import math

import pytest
import torch
from cases import DECODE_CASES, build, truth
from compare import close_partial

from distdec.cache.layout import CacheLayout
from distdec.ops.backends import OpsBackend, get_backend, register_backend
from distdec.ops.decode import decode
from distdec.ops.partial import Partial
from distdec.ops.prefill import prefill


def in_base_2(op):
    """Wrap an op so that its LSE comes in base 2."""

    def wrapped(*args, **kwargs):
        partial = op(*args, **kwargs)
        return Partial(partial.out, partial.lse / math.log(2))

    return wrapped


def test_auto_is_the_reference_without_a_gpu():
    assert get_backend("auto", "cpu").name == "reference"
    assert get_backend("auto", "cuda:1").name == "triton"


def test_unknown_names_are_refused_with_the_legal_ones():
    with pytest.raises(ValueError, match=r"unknown ops backend 'cudnn'; legal: 'auto', 'reference', 'triton'"):
        get_backend("cudnn", "cpu")


def test_a_backend_object_passes_through():
    backend = get_backend("reference", "cpu")
    assert get_backend(backend, "cpu") is backend
    assert isinstance(backend, OpsBackend)


def test_reference_tiles_are_whole_views():
    layout = CacheLayout((1,), max_chunk=512)
    assert get_backend("reference", "cpu").tile_tokens(layout) == 512
    for min_chunk, tiles in ((128, 128), (64, 64), (192, 64)):
        fixed = CacheLayout((1,), min_chunk=min_chunk, max_chunk=4 * min_chunk, deterministic=True)
        assert get_backend("reference", "cpu").tile_tokens(fixed) == min_chunk
        assert get_backend("triton", "cpu").tile_tokens(fixed) == tiles


def test_sound_foreign_ops_are_accepted_and_work():
    backend = register_backend("mine", decode=decode, prefill=prefill)
    inputs = build(DECODE_CASES[0])
    args = (inputs.q, inputs.k_pool, inputs.v_pool, inputs.tables, inputs.q_positions, 1)
    close_partial(backend.decode(*args, **inputs.options), truth(inputs))


def test_our_own_kernels_pass_the_probe():
    own = get_backend("triton", "cpu")
    register_backend("again", decode=own.decode, prefill=own.prefill, tile_tokens=own.preferred_tile_tokens)


def test_a_base_2_decode_is_refused():
    with pytest.raises(ValueError, match=r"'theirs' \(decode\).*natural log.*looks like base 2"):
        register_backend("theirs", decode=in_base_2(decode), prefill=prefill)


def test_a_base_that_depends_on_the_layout_is_refused():
    def only_single_tokens(*args, **kwargs):
        return (in_base_2(decode) if args[5] == 1 else decode)(*args, **kwargs)

    with pytest.raises(ValueError, match="one token a row"):
        register_backend("theirs", decode=only_single_tokens, prefill=prefill)

    def only_ragged(*args, **kwargs):
        lengths = args[5].diff()
        return (in_base_2(prefill) if (lengths != lengths[0]).any() else prefill)(*args, **kwargs)

    with pytest.raises(ValueError, match="prefill, ragged queries"):
        register_backend("theirs", decode=decode, prefill=only_ragged)


@pytest.mark.parametrize("value", [0.0, math.nan, 3.5])
def test_an_lse_other_than_minus_infinity_without_a_key_is_refused(value):
    def finite(*args, **kwargs):
        partial = prefill(*args, **kwargs)
        return Partial(partial.out, partial.lse.masked_fill(partial.lse == -math.inf, value))

    with pytest.raises(ValueError, match="-inf without a key"):
        register_backend("theirs", decode=decode, prefill=finite)


def test_rubbish_in_the_output_without_a_key_is_refused():
    def rubbish(*args, **kwargs):
        partial = decode(*args, **kwargs)
        return Partial(partial.out.masked_fill((partial.lse == -math.inf)[..., None], math.nan), partial.lse)

    with pytest.raises(ValueError, match="and 0 without a key"):
        register_backend("theirs", decode=rubbish, prefill=prefill)


def test_an_unscaled_lse_is_refused_in_half_precision_too():
    def shifted(*args, **kwargs):
        partial = decode(*args, **kwargs)
        return Partial(partial.out, partial.lse + 1e-3)

    with pytest.raises(ValueError, match="natural log"):
        register_backend("theirs", decode=shifted, prefill=prefill, dtype=torch.bfloat16)

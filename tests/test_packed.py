"""Packed partials: the layout, the kernels against the reference, and merges that run on the kernels."""

import importlib
import math

import pytest
import torch
from compare import nan_filled_empty
from merge_inputs import INF, NAN, assemble, in_8_bits, make_rows, same_bits, shard, truth_of

from distdec.merge import column_range, padded_columns, simulate
from distdec.merge_collective import advance, kernel_ops
from distdec.merge_modes import MODES, TRANSPORTS
from distdec.merge_place import Place
from distdec.ops.packed import Packing
from distdec.ops.partial import Partial

WIRES = TRANSPORTS
IMPLEMENTATIONS = ["packed", "packed_triton"]
wires = pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)


@wires
@pytest.mark.parametrize(("tokens", "heads", "columns"), [(3, 2, 16), (1, 1, 1), (5, 9, 63), (0, 4, 32)])
def test_parts_lie_apart_and_inside_the_message(wire, tokens, heads, columns):
    packing = Packing(tokens, heads, 8, columns, wire)
    # behind other memory
    memory = torch.zeros(4, packing.num_bytes, dtype=torch.uint8)
    messages = memory[1:]
    parts = [part for part in packing.parts(messages) if part is not None]
    for number, part in enumerate(parts):
        assert part.data_ptr() % 64 == messages.data_ptr() % 64
        part.copy_(torch.full_like(part, number + 1.0))
    for number, part in enumerate(parts):
        assert (part.float() == number + 1.0).all()
    assert packing.num_bytes % 64 == 0
    assert not memory[0].any()
    assert parts[0].shape == (3, tokens, heads)
    assert parts[-1].shape == (3, tokens, columns)


def test_the_documented_layout():
    assert (Packing(3, 2, 8, 16, torch.bfloat16).out_offset, Packing(3, 2, 8, 16, torch.bfloat16).num_bytes) == (
        64,
        192,
    )


def partial_with_faults(tokens, heads, dim):
    generator = torch.Generator().manual_seed(tokens)
    out = torch.randn(tokens, heads, dim, generator=generator) * 30
    lse = torch.randn(tokens, heads, generator=generator) * 5
    out[0, 0], lse[0, 0] = NAN, -INF
    out[1, 1, dim - 1], out[1, 2, 0], lse[1, 3], lse[2, 0] = NAN, INF, INF, NAN
    out[2, 1] = 0.0
    return out, lse


@wires
@pytest.mark.parametrize(("dim", "num_messages"), [(16, 1), (24, 3), (7, 2), (128, 5)])
@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_messages_hold_what_was_packed(module, wire, dim, num_messages):
    heads = 5
    out, lse = partial_with_faults(3, heads, dim)
    if wire.itemsize == 1:
        [(out, lse)] = in_8_bits([(out.nan_to_num(), lse)])
        out[1, 1, dim - 1], out[1, 2, 0] = NAN, INF
        out[2, 1] = 0.0
    total = heads * dim
    width = total if num_messages == 1 else padded_columns(total, num_messages)
    packing = Packing(3, heads, dim, width, wire)
    messages = torch.full((num_messages, packing.num_bytes), 0xFF, dtype=torch.uint8)
    # rows that are not dense
    importlib.import_module(f"distdec.ops.{module}").pack(out.mT.contiguous().mT, lse, messages, packing)
    want_lse, want = lse.clone(), out.clone()
    want[0, 0] = 0.0
    for token, head in ((1, 1), (1, 2), (1, 3), (2, 0)):
        want_lse[token, head], want[token, head] = NAN, 0.0
    lses, scales, outs = packing.parts(messages)
    got = outs.float()
    assert (scales is None) == (wire.itemsize > 1)
    if scales is not None:
        scale = (want.abs().amax(-1) / 448).masked_fill(want.abs().amax(-1) == 0.0, 1.0)
        torch.testing.assert_close(scales, scale.expand_as(scales), rtol=1e-6, atol=0.0)
        want = (want / scale[..., None]).clamp(-448, 448)
    for number in range(num_messages):
        assert same_bits(lses[number], want_lse)
        stop = min(total, (number + 1) * width)
        mine = want.flatten(1)[:, number * width : stop]
        # the interpreter cuts bits off where a device rounds
        rtol = 2**-7 if module == "packed_triton" and wire == torch.bfloat16 else 0.0
        torch.testing.assert_close(got[number, :, : mine.shape[1]], mine.to(wire).float(), rtol=rtol, atol=0.0)


def merge_on_kernels(mode, partials, transport, sinks=None, out_dtype=None):
    """Run a mode's program for all ranks on the kernels, in the interpreter, as `simulate` runs it on the reference."""
    size, ops = len(partials), kernel_ops()
    ranks = [
        MODES[mode].program(partial, Place(rank, size, WIRES[transport], ops), sinks, out_dtype)
        for rank, partial in enumerate(partials)
    ]
    sent = torch.stack([advance(rank, None)[0][1] for rank in ranks])
    with nan_filled_empty():
        return [advance(rank, sent if mode == "all_gather" else sent[:, r])[1] for r, rank in enumerate(ranks)]


@pytest.mark.parametrize("transport", sorted(WIRES))
@pytest.mark.parametrize("mode", ["all_gather", "all_to_all"])
@pytest.mark.parametrize(("num_ranks", "heads", "dim"), [(2, 6, 16), (3, 9, 7), (5, 4, 24)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_merges_on_kernels_are_those_of_the_reference(mode, transport, num_ranks, heads, dim, with_sinks):
    rows = make_rows([0, 1, 130, 17, 41], heads, dim)
    partials = shard(rows, num_ranks, poison=NAN)
    if transport == "float8_e4m3":
        partials = in_8_bits(partials)
    sinks = torch.linspace(-2, 40, heads) if with_sinks else None
    want = simulate(mode, partials, transport=transport, sinks=sinks)
    got = merge_on_kernels(mode, partials, transport, sinks)
    for rank, (mine, reference) in enumerate(zip(got, want, strict=True)):
        assert mine.columns == reference.columns
        # the interpreter cuts bits off where a device rounds
        atol = 2**-7 * max(p.out.nan_to_num().abs().max() for p in partials) if transport == "bfloat16" else 1e-5
        torch.testing.assert_close(mine.out, reference.out, rtol=1e-5, atol=float(atol))
        torch.testing.assert_close(mine.lse, reference.lse, rtol=1e-5, atol=1e-5)
        assert torch.equal(mine.lse, got[0].lse), rank
        assert mode == "all_to_all" or torch.equal(mine.out, got[0].out)
    if transport == "float32":
        out, lse = truth_of(rows, sinks)
        out[0], lse[0] = 0.0, -INF
        torch.testing.assert_close(assemble(got).double(), out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["all_gather", "all_to_all"])
def test_gathering_modes_on_kernels_agree_bit_by_bit(mode):
    partials = shard(make_rows([3, 30, 200], num_heads=9, head_dim=8), 3)
    whole = merge_on_kernels("all_gather", partials, "float32")
    assert torch.equal(assemble(merge_on_kernels(mode, partials, "float32")), whole[0].out)


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("mode", ["all_gather", "all_to_all"])
def test_a_fault_fails_its_row_on_every_rank_and_no_other(mode, culprit):
    partials = shard(make_rows([5, 60, 400], num_heads=6, head_dim=16), 3)
    for partial in partials:
        partial.lse[1] = 1.0
        partial.out[1] = 0.5
    clean = merge_on_kernels(mode, partials, "float32")
    partials[culprit].out[1, 2, 15] = NAN
    partials[culprit].out[1, 4, 0] = INF
    for mine, before in zip(merge_on_kernels(mode, partials, "float32"), clean, strict=True):
        start, stop = mine.columns
        failed = torch.zeros(3, 6, dtype=torch.bool)
        failed[1, [2, 4]] = True
        assert torch.equal(mine.lse.isnan(), failed)
        columns = failed[:, torch.arange(start, stop) // 16]
        assert torch.equal(mine.out.isnan(), columns)
        assert torch.equal(mine.out[~columns], before.out[~columns])


@pytest.mark.parametrize("mode", ["all_gather", "all_to_all"])
def test_the_output_has_the_callers_type_and_an_empty_step_no_rows(mode):
    partials = shard(make_rows([5, 60], num_heads=4, head_dim=8), 2)
    wide = merge_on_kernels(mode, partials, "float32")
    for mine, exact in zip(merge_on_kernels(mode, partials, "float32", out_dtype=torch.float16), wide, strict=True):
        assert torch.equal(mine.out, exact.out.half())
    nothing = Partial(torch.empty(0, 4, 8), torch.empty(0, 4))
    for rank, mine in enumerate(merge_on_kernels(mode, [nothing] * 2, "float32")):
        start, stop = (0, 32) if mode == "all_gather" else column_range(32, 2, rank)
        assert mine.out.shape == (0, stop - start) and mine.lse.shape == (0, 4)


@pytest.mark.gpu
@wires
def test_kernels_on_a_gpu_pack_and_fold_as_the_reference(wire):
    fold, pack = (importlib.import_module(f"distdec.ops.{name}") for name in ("combine", "packed"))
    kernels = kernel_ops()
    partials = shard(make_rows([0, 1, 130, 17, 41], 9, 24), 3, poison=NAN)
    sinks = torch.linspace(-2, 3, 9)
    for rank in range(3):
        start, stop = column_range(9 * 24, 3, rank)
        packing = Packing(5, 9, 24, padded_columns(9 * 24, 3), wire)
        merged = []
        for device, ops in (("cpu", (pack.pack, fold.fold_ranks)), ("cuda", kernels[:2])):
            sent = torch.full((3, 3, packing.num_bytes), 0xFF, dtype=torch.uint8, device=device)
            for messages, partial in zip(sent, partials, strict=True):
                ops[0](partial.out.to(device), partial.lse.to(device), messages, packing)
            lses, scales, outs = packing.parts(sent[:, rank].contiguous())
            out, lse = torch.empty(5, stop - start, device=device), torch.empty(5, 9, device=device)
            how = {"sinks": sinks.to(device), "scales": scales, "head_dim": 24, "first_column": start}
            ops[1](outs, lses, out=out, lse=lse, **how)
            merged.append((out.cpu(), lse.cpu()))
        # one rounding more or less on the wire, where the division by the scale differs in its last bit
        atol = 1e-5 if wire.itemsize > 1 else 0.1
        for mine, want in zip(merged[1], merged[0], strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-5, atol=atol)
        assert math.isfinite(merged[0][0].sum())

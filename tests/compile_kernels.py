"""Compile kernels for a GPU that is not there and report what came out, one JSON object a kernel.

Run as a script, with TRITON_INTERPRET unset: under the interpreter there is nothing to compile. Every launcher is
called with recording kernels in place of the real ones, so that exactly the arguments of a real launch are compiled.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from distdec.ops import (
    combine_triton,
    decode_triton,
    fetch_triton,
    one_shot_sum_triton,
    one_shot_triton,
    one_shot_words_triton,
    packed_triton,
    prefill_triton,
    schedule_triton,
    spans_triton,
    store_kv_triton,
)
from distdec.ops.own import OwnTokens
from distdec.ops.packed import Packing
from distdec.ops.slab_triton import Slab
from distdec.ops.splits import Splits
from distdec.ops.tables import KVTables

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}
"""Triton's names of pointer types."""


class Recorder:
    """Stands in for a kernel: takes `kernel[grid](*args, **options)` and keeps what was asked for."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((self.kernel, args, options))


def record(module, names, call):
    """Run a launcher with its kernels replaced by recorders; return the launches."""
    launches = []
    kernels = {name: getattr(module, name) for name in names}
    try:
        for name, kernel in kernels.items():
            setattr(module, name, Recorder(kernel, launches))
        call()
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)
    return launches


def record_all(kernels, call):
    """Record the launches of kernels in several modules, each as (module, name)."""
    if not kernels:
        call()
        return []
    (module, name), *rest = kernels
    inner = []
    outer = record(module, [name], lambda: inner.extend(record_all(rest, call)))
    return outer + inner


def compile_launch(kernel, args, options, arch):
    """Compile one launch as Triton's own launcher would specialise it."""
    signature, constants, attributes = {}, {}, {}
    for index, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", None
        elif isinstance(value, TensorDescriptor):
            block = ", ".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype][1:]}[{block}]>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources(compiled):
    """Return registers and spilled bytes of a compiled kernel, by the assembler's own count."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin = Path(f"{sys.argv[1]}/kernel.cubin")
    cubin.write_bytes(compiled.asm["cubin"])
    text = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def product_order(ptx):
    """Return the order of warp-group products (M, a run of them is one), waits for them (W) and barriers (B)."""
    found = re.findall(r"(wgmma\.mma_async)|(wgmma\.wait_group)|(bar\.sync)", ptx)
    return re.sub("M+", "M", "".join("MWB"[[bool(x) for x in groups].index(True)] for groups in found))


def exchange_order(ptx):
    """Return the order of what an exchange between ranks is made of.

    Wide (S, L) and narrow (s, l) stores and reads of slabs, those of words of 8 bytes (W, w), barriers (B), raised
    flags (R), looks at flags (A), and what no exchange should have (X): fences of their own, multicast.
    """
    found = re.findall(
        r"(st\.global\.v4)|(ld\.volatile\.global\.v4)|(st\.global\.b64)|(ld\.volatile\.global\.b64)|(st\.global\.[bv])"
        r"|(ld\.volatile)|(bar\.sync)|(atom\.global\.sys\.release)|(ld\.global\.sys\.acquire|atom\.global\.sys\.acquire)"
        r"|(membar|fence|multimem)",
        ptx,
    )
    return "".join("SLWwslBRAX"[[bool(x) for x in groups].index(True)] for groups in found)


def tables(rows, tiles):
    """Tables of the right shapes; what they hold does not matter to a compiler."""
    return KVTables(
        torch.zeros(tiles, 4, dtype=torch.int32),
        torch.zeros(rows, 2, dtype=torch.int32),
        torch.zeros(rows + 1, dtype=torch.int32),
    )


HOPPER = decode_triton.DeviceLimits(132, 227 * 1024, True)
AMPERE = decode_triton.DeviceLimits(108, 163 * 1024, False)


def decode_launches(rows, q_len, heads, kv_heads, dim, dtype=torch.bfloat16, device=HOPPER, **options):
    """The launches of one decode call as it runs on a device."""
    q = torch.zeros(rows * q_len, heads, dim, dtype=dtype)
    pool = torch.zeros(64, kv_heads, dim, dtype=dtype)
    positions = torch.zeros(rows * q_len, dtype=torch.int32)
    limits, decode_triton.device_limits = decode_triton.device_limits, lambda _: device
    try:
        call = lambda: decode_triton.decode(  # noqa: E731
            q, pool, pool, tables(rows, 512), positions, q_len, scale=0.1, **options
        )
        calls = [(decode_triton, "decode_kernel"), (combine_triton, "combine_kernel")]
        return record_all([*calls, (spans_triton, "derive_spans_kernel")], call)
    finally:
        decode_triton.device_limits = limits


def prefill_launches(lens, heads, kv_heads, dim, dtype=torch.bfloat16, device=HOPPER, **options):
    """The launches of one prefill call."""
    tokens = sum(lens)
    q = torch.zeros(tokens, heads, dim, dtype=dtype)
    pool = torch.zeros(64, kv_heads, dim, dtype=dtype)
    positions = torch.zeros(tokens, dtype=torch.int32)
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32)
    limits, prefill_triton.device_limits = prefill_triton.device_limits, lambda _: device
    try:
        return record(
            prefill_triton,
            ["prefill_kernel", "combine_splits_kernel"],
            lambda: prefill_triton.prefill(
                q, pool, pool, tables(len(lens), 512), positions, indptr, max(lens), scale=0.1, **options
            ),
        )
    finally:
        prefill_triton.device_limits = limits


def small_launches():
    """The launches of the ops that only move numbers."""
    k = torch.zeros(4, 8, 128, dtype=torch.bfloat16)
    slots, heads = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 8)
    views = torch.zeros(64, 4, dtype=torch.int32)
    out, lse2, ranges = torch.zeros(8, 4, 128), torch.zeros(8, 4), torch.zeros(16, 2, dtype=torch.int32)
    q, splits = torch.zeros(4, 32, 128, dtype=torch.bfloat16), Splits(out, lse2, ranges, 4, 8, 1, 4, 256)
    own = OwnTokens.of(q, k, k, slots, (k, k), 0.1, 30.0)
    return [
        *record(store_kv_triton, ["store_kv_kernel"], lambda: store_kv_triton.store_kv(k, k, slots, k, k)),
        *record(
            schedule_triton,
            ["derive_tiles_kernel"],
            lambda: schedule_triton.derive_tiles(views, views[0, :1], 64, views),
        ),
        *record(combine_triton, ["combine_kernel"], lambda: combine_triton.combine(out, lse2, ranges, 8, 1, 4)),
        *record(
            combine_triton,
            ["combine_kernel"],
            lambda: combine_triton.combine_splits(splits, own=own, out=q, lse=heads, finish=True, sinks=heads[0]),
        ),
        *record(
            combine_triton,
            ["fold_ranks_kernel"],
            lambda: combine_triton.fold_ranks(k[None], heads[None], out=k, lse=heads, sinks=heads[0]),
        ),
    ]


def merge_launches(wire):
    """The launches of a merge of four ranks around its collective, whole rows and a share of the columns."""
    out, lse = torch.zeros(4, 8, 128), torch.zeros(4, 8)
    found = []
    for messages, columns in ((1, 1024), (4, 256)):
        packing = Packing(4, 8, 128, columns, wire)
        rows = torch.zeros(4, packing.num_bytes, dtype=torch.uint8)
        lses, scales, outs = packing.parts(rows)
        share = torch.zeros(4, columns, dtype=torch.bfloat16)
        how = {"sinks": lse[0], "scales": scales, "head_dim": 128, "first_column": columns % 1024}
        pack = lambda rows=rows[:messages], packing=packing: packed_triton.pack(out, lse, rows, packing)  # noqa: E731
        fold = lambda a=outs, b=lses, c=share, h=how: combine_triton.fold_ranks(a, b, out=c, lse=lse, **h)  # noqa: E731
        found += record(packed_triton, ["pack_kernel"], pack) + record(combine_triton, ["fold_ranks_kernel"], fold)
    return found


def sum_launches(num_ranks, numel, bulk=None):
    """The launch of a sum over ranks; with `bulk` True or False beside programs that ask for what is read next."""
    peers, state = torch.zeros(num_ranks + 1, dtype=torch.int64), torch.zeros(529, dtype=torch.int32)
    slab, y = Slab(peers, state, 0, num_ranks, 528, 2048), torch.zeros(numel, dtype=torch.bfloat16)
    following = None if bulk is None else torch.zeros(4096, 4096, dtype=torch.bfloat16)
    call = lambda: one_shot_sum_triton.one_shot_sum(slab, y, y, spin_limit=1000, following=following)  # noqa: E731
    fetch_of = one_shot_sum_triton.fetch_of
    try:
        if bulk is not None:
            one_shot_sum_triton.fetch_of = lambda tensor, slab, n: fetch_triton.sized(tensor.nbytes, bulk, slab, n)
        return record(one_shot_sum_triton, ["one_shot_sum_kernel"], call)
    finally:
        one_shot_sum_triton.fetch_of = fetch_of


def word_launches(num_ranks, rows, *, scatter=False, own=False):
    """The launch of a merge of few rows of 32 heads on 8 KV heads, plain or with all that may come with it."""
    peers, state = torch.zeros(num_ranks + 1, dtype=torch.int64), torch.zeros(529, dtype=torch.int32)
    slab = Slab(peers, state, 0, num_ranks, 528, 15872, one_shot_words_triton.WORD_BYTES)
    ranges = torch.zeros(rows * 8, 2, dtype=torch.int32)
    splits = Splits(torch.zeros(256, 4, 128), torch.zeros(256, 4), ranges, rows, 8, 1, 4, 256)
    out, lse = torch.zeros(rows, 4096, dtype=torch.bfloat16), torch.zeros(rows, 32)
    how = {"payload": torch.float32, "spin_limit": 1000, "columns": 4096 // num_ranks if scatter else 0}
    if own:
        q, k = (torch.zeros(rows, heads, 128, dtype=torch.bfloat16) for heads in (32, 8))
        own_tokens = OwnTokens.of(q, k, k, torch.zeros(rows, dtype=torch.int64), (k, k), 0.1, 30.0)
        how |= {"own": own_tokens, "sinks": lse[0]}
    call = lambda: one_shot_triton.one_shot(slab, splits, out, lse, **how)  # noqa: E731
    return record(one_shot_triton, ["one_shot_words_kernel"], call)


def launches(arch):
    """Everything that is compiled, by name."""
    device = HOPPER if arch == 90 else AMPERE
    configurations = {
        "decode, group 4": decode_launches(1, 1, 32, 8, 128, device=device),
        "decode, 8 rows": decode_launches(8, 1, 32, 8, 128, device=device),
        "decode, 16 rows": decode_launches(16, 1, 32, 8, 128, device=device),
        "decode, group 8, 32 rows": decode_launches(32, 1, 64, 8, 128, device=device),
        "decode, head size 64": decode_launches(8, 1, 9, 3, 64, device=device),
        "decode, head size 80": decode_launches(8, 1, 32, 32, 80, device=device),
        "decode, window and softcap": decode_launches(8, 1, 16, 8, 256, device=device, window=4096, softcap=50.0),
        "decode, 8 tokens": decode_launches(8, 8, 32, 8, 128, device=device),
        "decode, 16 tokens of 8": decode_launches(8, 16, 64, 8, 128, device=device),
        "decode, 8 tokens of 8": decode_launches(8, 8, 64, 8, 128, device=device),
        "decode, group 71": decode_launches(1, 1, 71, 1, 128, device=device),
        "decode, group 71, window": decode_launches(2, 1, 71, 1, 128, device=device, window=4096),
        "decode, group 71 of 64": decode_launches(2, 2, 71, 1, 64, device=device, window=4096, softcap=50.0),
        "decode, 5 tokens of 16": decode_launches(8, 5, 128, 8, 128, device=device),
        "decode, deterministic": decode_launches(8, 1, 32, 8, 128, device=device, split_tiles=16),
        "decode, float32": decode_launches(8, 1, 32, 8, 128, torch.float32, device=device),
        "prefill, long": prefill_launches([2048], 32, 8, 128, device=device),
        "prefill, short": prefill_launches([40, 100], 32, 8, 128, device=device),
        "prefill, window": prefill_launches([2048, 5], 32, 8, 64, device=device, window=1024),
        "prefill, head size 256": prefill_launches([2048, 5], 16, 8, 256, device=device, softcap=50.0),
        "prefill, float32": prefill_launches([256, 40], 32, 8, 128, torch.float32, device=device),
        "small": small_launches(),
        "sum, 2 ranks": sum_launches(2, 4096),
        "sum, 8 ranks": sum_launches(8, 528 * 1024),
        "sum, odd": sum_launches(3, 4097),
        "sum, fetching": sum_launches(2, 4096, bulk=arch >= 90),
        "words, 2 ranks": word_launches(2, 1),
        "words, 2 ranks, 8 rows": word_launches(2, 8),
        "words, 3 ranks, own": word_launches(3, 2, own=True),
        "words, 8 ranks, own, scatter": word_launches(8, 1, scatter=True, own=True),
        "merge": merge_launches(torch.float32),
        "merge, bfloat16": merge_launches(torch.bfloat16),
        # 8-bit numbers came to the hardware with sm_89
        "merge, float8": merge_launches(torch.float8_e4m3fn) if arch >= 89 else [],
    }
    return [(name, *launch) for name, calls in configurations.items() for launch in calls]


def main():
    """Compile all for the architecture of argv[2] and print the reports."""
    arch = int(sys.argv[2])
    seen = set()
    for name, kernel, args, options in launches(arch):
        shape = [a for a, p in zip(args, kernel.params, strict=True) if p.is_constexpr]
        key = (kernel.__name__, *map(str, shape), *map(str, options.values()))
        if key in seen:
            continue
        seen.add(key)
        compiled = compile_launch(kernel, args, options, arch)
        registers, spilled = resources(compiled)
        ptx = compiled.asm["ptx"]
        report = {
            "case": name,
            "kernel": kernel.__name__,
            "registers": registers,
            "spilled": spilled,
            "shared": compiled.metadata.shared,
            "cp_async": len(re.findall(r"cp\.async\.c[ag]\.shared", ptx)),
            "wait_groups": [int(n) for n in re.findall(r"cp\.async\.wait_group\s+(?:0x)?(\d+)", ptx)],
            "wgmma": ptx.count("wgmma.mma_async"),
            "order": product_order(ptx),
            "exchange": exchange_order(ptx),
            "asks": [ptx.count("prefetch.global.L2 ["), ptx.count("cp.async.bulk.prefetch.L2.global [")],
            "bulk": ptx.count("cp.async.bulk.tensor"),
            "mma": ptx.count("mma.sync"),
            "warps": compiled.metadata.num_warps,
            "options": {p.name: a for a, p in zip(args, kernel.params, strict=True) if p.is_constexpr},
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()

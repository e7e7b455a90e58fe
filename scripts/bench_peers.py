"""Other people's decode attention on the same keys and values: PyTorch's SDPA backends, FlexAttention, FlashInfer."""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from bench_inputs import Inputs
from bench_run import Variant
from bench_timing import compare
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

SDPA = {
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}
# FlexAttention's decoding kernel has one untuned configuration on this generation: these were found by trying
FLEX_TUNED: list[dict[str, Any]] = [
    {"BLOCK_N": 64, "num_stages": 3, "num_warps": 4},
    {"BLOCK_N": 128, "num_stages": 3, "num_warps": 4},
]


def checker(inputs: Inputs, q: Tensor) -> Callable[[Tensor], dict[str, Any]]:
    """Return a check of outputs [B, Hq, 1, D] or [B, Hq, D]; a peer's LSE is not looked at."""

    def check(out: Tensor) -> dict[str, Any]:
        return compare(out.reshape(q.shape), inputs.reference(q)[0], q.dtype)

    return check


def sdpa_peers(inputs: Inputs, q: Tensor, names: list[str], stacked: list[tuple[Tensor, Tensor]]) -> list[Variant]:
    """Return SDPA over contiguous [B, Hkv, S, D] keys and values, one variant a backend."""
    query = q[:, :, None]

    def make(name: str) -> Variant:
        def call(copy: int) -> Tensor:
            with sdpa_kernel(SDPA[name]):
                return F.scaled_dot_product_attention(query, *stacked[copy], enable_gqa=True)

        return Variant(name, call, checker(inputs, q), name, num_bytes=inputs.shape.kv_bytes, peer=True)

    return [make(name) for name in names]


def sdpa_store_peer(inputs: Inputs, q: Tensor, name: str, stacked: list[tuple[Tensor, Tensor]]) -> Variant:
    """Return SDPA that first writes the step's token into its cache, as our attention layer does."""
    query = q[:, :, None]
    new = [x.unflatten(0, (-1, 1)).transpose(1, 2).contiguous() for x in (inputs.k_new, inputs.v_new)]

    def call(copy: int) -> Tensor:
        k, v = stacked[copy]
        k[:, :, -1:].copy_(new[0])
        v[:, :, -1:].copy_(new[1])
        with sdpa_kernel(SDPA[name]):
            return F.scaled_dot_product_attention(query, k, v, enable_gqa=True)

    check = checker(inputs, q)
    return Variant(f"{name} + store", call, check, name, num_bytes=inputs.shape.kv_bytes, peer=True, rated=False)


def sdpa_row_peers(inputs: Inputs, q: Tensor, names: list[str]) -> list[Variant]:
    """Return SDPA called row by row, which is how it takes rows of different length without padding."""
    copies = inputs.row_copies()

    def make(name: str) -> Variant:
        def call(copy: int) -> Tensor:
            with sdpa_kernel(SDPA[name]):
                outs = [
                    F.scaled_dot_product_attention(q[i : i + 1, :, None], k[None], v[None], enable_gqa=True)
                    for i, (k, v) in enumerate(copies[copy])
                ]
            return torch.cat(outs)

        name_rows = f"{name}, row by row"
        return Variant(name_rows, call, checker(inputs, q), name, num_bytes=inputs.shape.kv_bytes, peer=True)

    return [make(name) for name in names]


def flex_peers(inputs: Inputs, q: Tensor, stacked: list[tuple[Tensor, Tensor]], *, tuned: bool) -> list[Variant]:
    """Return FlexAttention with a BlockMask of 128 tokens: its defaults, and options found by trying."""
    length = inputs.shape.lengths[0]

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j < length

    return _flex(inputs, q, q[:, :, None], stacked, visible, tuned)


def _flex(
    inputs: Inputs,
    q: Tensor,
    query: Tensor,
    copies: list[tuple[Tensor, Tensor]],
    visible: Callable[..., Tensor],
    tuned: bool,
) -> list[Variant]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # a configuration that does not compile is in the records; the compiler would print its whole source
    logging.getLogger("torch._inductor").setLevel(logging.CRITICAL)
    keys = copies[0][0]
    sizes = (len(query), None, query.shape[2], keys.shape[2])
    mask = create_block_mask(visible, *sizes, device=str(q.device), BLOCK_SIZE=128)
    torch._dynamo.reset()
    variants = []
    for options in [None, *(FLEX_TUNED if tuned else [])]:
        compiled = torch.compile(flex_attention, dynamic=False)

        def call(copy: int, options: Any = options, compiled: Any = compiled) -> Tensor:
            k, v = copies[copy]
            return compiled(query, k, v, block_mask=mask, enable_gqa=True, kernel_options=options)

        def check(out: Tensor) -> dict[str, Any]:
            return compare(out.transpose(1, 2).reshape(q.shape), inputs.reference(q)[0], q.dtype)

        name = "flex" if options is None else f"flex tuned BLOCK_N={options['BLOCK_N']}"
        fields = {"options": options or "default"}
        num_bytes = inputs.shape.kv_bytes
        variants.append(Variant(name, call, check, "flex_attention", num_bytes=num_bytes, peer=True, fields=fields))
    return variants


def flex_ragged_peers(inputs: Inputs, q: Tensor, *, tuned: bool) -> list[Variant]:
    """Return FlexAttention over rows of different length, laid end to end without padding.

    The rows' queries are the query tokens of one sequence, and the mask keeps each to its own row's keys. (Padded to
    the longest row, the keys pass 2^31 elements, where the decoding kernel of torch 2.11 does not compile.)
    """
    ends = torch.tensor(inputs.shape.lengths, device=q.device).cumsum(0).to(torch.int32)
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    copies = [tuple(torch.cat(rows, 1)[None] for rows in zip(*copy, strict=True)) for copy in inputs.row_copies()]

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= begins[i]) & (j < ends[i])

    return _flex(inputs, q, q.transpose(0, 1)[None].contiguous(), copies, visible, tuned)


def flashinfer_peers(inputs: Inputs, q: Tensor) -> list[Variant]:
    """Return FlashInfer's paged decode, page 16, over our own pool and our allocator's placement."""
    try:
        import flashinfer
    except ImportError:
        return []
    page, shape, pools = 16, inputs.shape, inputs.pools()
    cache = inputs.cache
    pages, counts = [], []
    for seq, length in enumerate(shape.lengths):
        slots = torch.as_tensor(cache.kv.slots(seq, 0, length, 0))
        pages.append(slots[::page] // page)
        counts.append(len(pages[-1]))
        # its kernels read a last page whole: what no token owns must be a number
        rest = torch.arange(int(slots[-1]) + 1, (int(slots[-1]) // page + 1) * page, device=q.device)
        cache.pool.k[:, rest] = 0
        cache.pool.v[:, rest] = 0
    indptr = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    last = torch.tensor([(n - 1) % page + 1 for n in shape.lengths], dtype=torch.int32)
    heads = (shape.num_q_heads, shape.num_kv_heads, shape.head_dim)

    def make(tensor_cores: bool) -> Variant:
        space = torch.zeros(128 << 20, dtype=torch.uint8, device=q.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=tensor_cores)
        where = (indptr.to(q.device), torch.cat(pages).to(torch.int32).to(q.device), last.to(q.device))
        wrapper.plan(*where, q.shape[1], *heads[1:], page, q_data_type=q.dtype, kv_data_type=q.dtype)

        def call(copy: int) -> Tensor:
            return wrapper.run(q, tuple(x.view(-1, page, *x.shape[1:]) for x in pools[copy]))

        name = f"flashinfer {'tensor cores' if tensor_cores else 'cuda cores'}"
        return Variant(name, call, checker(inputs, q), "flashinfer", num_bytes=shape.kv_bytes, peer=True)

    return [make(False), make(True)]

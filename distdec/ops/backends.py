"""Choose the ops by name, and refuse foreign ones that break the contract of `Partial`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from distdec.ops.partial import Partial
from distdec.ops.splits import Splits
from distdec.ops.tables import KVTables

PROBE_SCORES = (-3.0, 0.0, 7.0)


@dataclass(frozen=True)
class OpsBackend:
    """The five verbs that the attention layer calls; contracts in the modules of their names.

    `decode_splits`, where there is one, is `decode` without the join of its splits, for merges that do it themselves.
    `preferred_tile_tokens` is the tile that the kernels are built for; None means a tile may be as long as a view.
    The other optional ops come with `decode_splits`: `plan_spans` and `derive_spans` deal a step's tiles to programs,
    once for all layers; `finish_splits`, which adds a step's own tokens too (`own.py`), and `fold_ranks` turn partials
    into what a layer hands on. `fixed_splits`: decode takes `split_tiles`, and keeps what it promises.
    """

    name: str
    store_kv: Callable[..., None]
    decode: Callable[..., Partial]
    prefill: Callable[..., Partial]
    derive_tiles: Callable[..., None]
    preferred_tile_tokens: int | None = None
    decode_splits: Callable[..., Splits] | None = None
    plan_spans: Callable[..., int] | None = None
    derive_spans: Callable[..., None] | None = None
    finish_splits: Callable[..., Partial] | None = None
    fold_ranks: Callable[..., None] | None = None
    fixed_splits: bool = False

    def tile_tokens(self, layout: Any) -> int:
        """Return the tile size for a `CacheLayout`: the preferred one, or the longest view's tokens.

        In a deterministic layout one that divides a frame: tiles are then the same however frames make up chunks.
        """
        tokens: int = self.preferred_tile_tokens or layout.max_chunk
        return math.gcd(tokens, layout.min_chunk) if layout.deterministic else tokens


def get_backend(backend: str | OpsBackend, device: torch.device | str) -> OpsBackend:
    """Return the ops for a device.

    Args:
        backend: "reference", "triton", "auto" (Triton on CUDA, the reference elsewhere), or a backend object, such as
            `register_backend` returns.

    Raises:
        ValueError: unknown name, or Triton on the CPU without its interpreter.
    """
    if isinstance(backend, OpsBackend):
        return backend
    if backend == "auto":
        backend = "triton" if torch.device(device).type == "cuda" else "reference"
    if backend == "reference":
        return _reference()
    if backend == "triton":
        return _triton(torch.device(device))
    raise ValueError(f"unknown ops backend {backend!r}; legal: 'auto', 'reference', 'triton', or an OpsBackend")


def register_backend(
    name: str,
    *,
    decode: Callable[..., Partial],
    prefill: Callable[..., Partial],
    store_kv: Callable[..., None] | None = None,
    derive_tiles: Callable[..., None] | None = None,
    tile_tokens: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    group_size: int = 2,
) -> OpsBackend:
    """Probe foreign attention ops and return them as a backend to hand to the attention layer.

    A kernel library's LSE may be in base 2 or scaled, and may change with the layout of the queries. So both ops are
    run on rows of one key with scores -3, 0 and 7, dense and ragged, where the LSE must equal the score and the
    output the value, and on a row without a key. Nothing is kept in this module.

    Args:
        store_kv, derive_tiles: None takes those that fit the device.
        tile_tokens: longest tile that the ops take; None for any.
        device, dtype, head_dim, group_size: of the probe's tensors.

    Raises:
        ValueError: the ops break the contract; the message says which op, what was expected and what came.
    """
    own = get_backend("auto", device)
    backend = OpsBackend(name, store_kv or own.store_kv, decode, prefill, derive_tiles or own.derive_tiles, tile_tokens)
    _probe(backend, torch.device(device), dtype, head_dim, group_size)
    return backend


def _reference() -> OpsBackend:
    from distdec.ops.decode import decode
    from distdec.ops.prefill import prefill
    from distdec.ops.schedule import derive_tiles
    from distdec.ops.store_kv import store_kv

    return OpsBackend("reference", store_kv, decode, prefill, derive_tiles, fixed_splits=True)


def _triton(device: torch.device) -> OpsBackend:
    # imported here: the reference runs where Triton is not installed
    from distdec.ops.combine_triton import combine_splits, fold_ranks
    from distdec.ops.decode_triton import TILE_TOKENS, decode, decode_splits, plan_spans
    from distdec.ops.launch_triton import Plans, needs_gpu
    from distdec.ops.prefill_triton import prefill
    from distdec.ops.schedule_triton import derive_tiles
    from distdec.ops.spans_triton import derive_spans
    from distdec.ops.store_kv_triton import store_kv, store_kv_kernel

    if device.type == "cpu" and needs_gpu(store_kv_kernel):
        raise ValueError("backend 'triton' needs a GPU; on the CPU take 'reference' (or TRITON_INTERPRET=1, for tests)")
    plans = Plans()
    return OpsBackend(
        "triton",
        partial(store_kv, plans=plans),
        partial(decode, plans=plans),
        prefill,
        derive_tiles,
        TILE_TOKENS,
        partial(decode_splits, plans=plans),
        plan_spans,
        derive_spans,
        partial(combine_splits, plans=plans),
        partial(fold_ranks, plans=plans),
        fixed_splits=True,
    )


def _probe(backend: OpsBackend, device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> None:
    """Run one-key rows, and one row without a key, through both ops in dense and in ragged layout."""
    scores = [*PROBE_SCORES, -math.inf]
    rows = len(scores)
    # the key is the first unit vector and the scale 1, so that q[0] is the score, exact in every dtype
    k_pool = torch.full((rows + 1, 2, head_dim), torch.nan, dtype=dtype, device=device)
    v_pool = torch.full_like(k_pool, torch.nan)
    k_pool[:rows] = 0.0
    k_pool[:rows, :, 0] = 1.0
    v_pool[:rows] = torch.arange(1, rows + 1, dtype=dtype, device=device)[:, None, None]

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    counts = [0 if s == -math.inf else 1 for s in scores]
    ends = torch.tensor(counts).cumsum(0).tolist()
    tables = KVTables(
        ints([[row, 1, 0, 0] for row in range(rows)]),
        ints([[end - count, end] for end, count in zip(ends, counts, strict=True)]),
        ints([0, *ends]),
    )
    for layout, q_lens in (("dense", [2] * rows), ("ragged", [1, 3, 2, 5])):
        per_token = [s for s, n in zip(scores, q_lens, strict=True) for _ in range(n)]
        values = [row + 1.0 for row, n in enumerate(q_lens) for _ in range(n)]
        q = torch.zeros((len(per_token), 2 * group, head_dim), dtype=dtype, device=device)
        q[:, :, 0] = torch.tensor([0.0 if s == -math.inf else s for s in per_token], device=device)[:, None].to(dtype)
        positions = ints([0] * len(per_token))
        indptr = ints([0, *torch.tensor(q_lens).cumsum(0).tolist()])
        got = backend.prefill(q, k_pool, v_pool, tables, positions, indptr, max(q_lens), scale=1.0)
        _expect(backend.name, f"prefill, {layout} queries", got, per_token, values)
        if layout == "dense":
            got = backend.decode(q, k_pool, v_pool, tables, positions, 2, scale=1.0)
            _expect(backend.name, "decode", got, per_token, values)
            one = slice(None, None, 2)
            got = backend.decode(q[one].contiguous(), k_pool, v_pool, tables, positions[one].contiguous(), 1, scale=1.0)
            _expect(backend.name, "decode, one token a row", got, per_token[one], values[one])


def _expect(name: str, what: str, got: Partial, scores: list[float], values: list[float]) -> None:
    want = torch.tensor(scores, dtype=torch.float32)[:, None].expand(got.lse.shape)
    lse = got.lse.detach().float().cpu()
    if not torch.allclose(lse, want, rtol=1e-5, atol=1e-5):
        base2 = torch.allclose(lse, want / math.log(2.0), rtol=1e-3, atol=1e-3)
        hint = "; it looks like base 2, multiply it by ln 2" if base2 else ""
        raise ValueError(
            f"backend {name!r} ({what}): the LSE of a row with one key must be the natural log, that is the score, and "
            f"-inf without a key: expected {want[:, 0].tolist()}, got {lse[:, 0].tolist()}{hint}"
        )
    want = torch.tensor([0.0 if s == -math.inf else v for s, v in zip(scores, values, strict=True)])
    out = got.out.detach().float().cpu()
    if not torch.equal(out, want[:, None, None].expand(out.shape)):
        raise ValueError(
            f"backend {name!r} ({what}): the output of rows with one key must be its value, {want.tolist()}, and 0 "
            f"without a key; got {out[:, 0, 0].tolist()}"
        )

"""Shapes for the tests of the attention ops, their inputs, and the fp64 truth over the whole sequence.

A case deals every row's tokens into views of uneven length, keeps some of them on "this rank", and scatters those over
a pool in random order with gaps. Every slot that holds no token is NaN, and so are outputs before they are written.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from distdec.ops.partial import Partial
from distdec.ops.schedule import derive_tiles
from distdec.ops.tables import KVTables


@dataclass(frozen=True)
class Case:
    """One attention problem: `kv_lens[b]` tokens in row b, of which the last `q_lens[b]` are queries."""

    name: str
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int | None = None
    window: int = 0
    softcap: float = 0.0
    max_view: int = 40
    local: float = 1.0  # share of the views that this rank holds
    tile_tokens: int = 16
    padding: int = 0  # rows with positions -1 and no tiles, after the real ones


class Inputs(NamedTuple):
    """A case's tensors; `positions` and `keys` say per row which tokens this rank holds, in fp64."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    tables: KVTables
    q_positions: Tensor
    q_indptr: Tensor
    view_table: Tensor
    options: dict[str, float]
    local: list[tuple[Tensor, Tensor, Tensor]]


def uniform(name: str, kv_lens: tuple[int, ...], q_len: int, **kwargs: object) -> Case:
    """Return a case whose rows all have `q_len` query tokens."""
    return Case(name, kv_lens, (q_len,) * len(kv_lens), **kwargs)


# views and tiles as the default cache deals them
REAL = {"max_view": 1024, "tile_tokens": 64}

DECODE_CASES = [
    uniform("ragged rows", (37, 1, 130, 64), 1),
    uniform("empty shard among others", (50, 3, 81), 1, local=0.3),
    uniform("tile edges", (16, 15, 17, 32, 33), 1, max_view=16),
    uniform("views of one token", (9, 21), 1, max_view=1),
    uniform("long view", (257, 90), 1, max_view=300),
    uniform("three query tokens", (5, 70, 33), 3),
    uniform("sixteen query tokens", (16, 49), 16, num_q_heads=2),
    uniform("group of one", (20, 45), 1, num_q_heads=3, num_kv_heads=3),
    uniform("group of three, nine heads", (20, 45), 2, num_q_heads=9, num_kv_heads=3),
    uniform("group of seven", (20, 45), 1, num_q_heads=14, num_kv_heads=2),
    uniform("group of seventeen", (20, 45), 1, num_q_heads=17, num_kv_heads=1),
    uniform("group of seventy-one", (33, 18), 2, num_q_heads=71, num_kv_heads=1),
    uniform("group of seventy-one, one row", (150,), 1, num_q_heads=71, num_kv_heads=1),
    uniform("eight tokens of sixteen heads", (90, 41), 8, num_q_heads=32),
    uniform("head size eighty", (33, 18), 1, head_dim=80),
    uniform("value size unlike key size", (33, 18), 2, head_dim=24, v_head_dim=40),
    uniform("window inside a tile", (70, 41, 5), 1, window=5),
    uniform("window of one key", (70, 41, 5), 2, window=1),
    uniform("window at a tile edge", (64, 48, 32), 1, window=16, max_view=16),
    uniform("window past a tile edge", (64, 48, 33), 4, window=17, max_view=16),
    uniform("window over most of an uneven shard", (90, 61), 3, window=50, local=0.5),
    uniform("softcap", (37, 70), 2, softcap=3.0),
    uniform("softcap and window", (37, 70), 2, softcap=50.0, window=20),
    uniform("padding rows", (37, 70, 12), 2, padding=2),
]

GPU_DECODE_CASES = [
    uniform("gpu ragged", (9000, 17, 1, 4100), 1, num_q_heads=32, num_kv_heads=8, head_dim=128, **REAL),
    uniform(
        "gpu uneven shard", (9000, 17, 1, 4100), 1, num_q_heads=64, num_kv_heads=8, head_dim=128, local=0.3, **REAL
    ),
    uniform("gpu eight tokens", (3000, 70), 8, num_q_heads=32, num_kv_heads=8, head_dim=128, **REAL),
    uniform("gpu sixteen tokens of eight", (3000, 70), 16, num_q_heads=64, num_kv_heads=8, head_dim=128, **REAL),
    uniform("gpu gemma-like", (3000, 70), 1, num_q_heads=16, num_kv_heads=8, head_dim=256, softcap=50.0, **REAL),
    uniform("gpu window", (9000, 70), 2, num_q_heads=9, num_kv_heads=3, head_dim=64, window=1000, **REAL),
    uniform("gpu multi-query", (3000, 70), 1, num_q_heads=71, num_kv_heads=1, head_dim=64, **REAL),
    uniform("gpu one row of 71 heads", (9000,), 1, num_q_heads=71, num_kv_heads=1, head_dim=128, **REAL),
    uniform("gpu 71 heads, uneven", (9000, 70), 1, num_q_heads=71, num_kv_heads=1, head_dim=128, local=0.3, **REAL),
    uniform(
        "gpu eight tokens of 16 heads", (3000, 700), 8, num_q_heads=32, num_kv_heads=2, head_dim=128, window=900, **REAL
    ),
    uniform("gpu head size 192", (3000, 70), 1, num_q_heads=8, num_kv_heads=8, head_dim=192, v_head_dim=128, **REAL),
]

PREFILL_CASES = [
    Case("ragged slices", (37, 9, 130), (37, 3, 21)),
    Case("whole prompts", (40, 17, 1), (40, 17, 1)),
    Case("slice after a cached prefix", (150, 90), (20, 33), max_view=64),
    Case("row without queries", (30, 20, 40), (5, 0, 17)),
    Case("no local key for some", (50, 33, 70), (50, 5, 20), local=0.4),
    Case("views of one token", (12, 25), (12, 7), max_view=1),
    Case("groups of one", (44, 30), (21, 30), num_q_heads=2),
    Case("groups of three", (44, 30), (21, 30), num_q_heads=9, num_kv_heads=3),
    Case("group of seventeen", (44, 30), (7, 11), num_q_heads=17, num_kv_heads=1),
    Case("head size eighty", (44, 30), (21, 30), head_dim=80),
    Case("value size unlike key size", (44, 30), (21, 30), head_dim=24, v_head_dim=40),
    Case("window inside a tile", (70, 41), (30, 41), window=5),
    Case("window at a tile edge", (64, 48), (32, 16), window=16, max_view=16),
    Case("window over an uneven shard", (120, 61), (50, 3), window=40, local=0.5),
    Case("softcap", (44, 30), (21, 30), softcap=3.0),
]

GPU_PREFILL_CASES = [
    Case("gpu prompts", (2500, 300, 1), (2500, 300, 1), 32, 8, 128, **REAL),
    Case("gpu slice of a long prompt", (20000, 70), (512, 70), 32, 8, 128, **REAL),
    Case("gpu few queries, long context", (20000, 1100), (20, 33), 32, 8, 128, local=0.5, **REAL),
    Case("gpu gemma-like", (1500, 70), (300, 70), 16, 8, 256, softcap=50.0, **REAL),
    Case("gpu window", (5000, 1300), (2000, 1300), 9, 3, 64, window=1000, **REAL),
    Case("gpu head size 80", (1500, 70), (300, 70), 8, 8, 80, **REAL),
]


def case_id(case: Case) -> str:
    """Name a parametrised case in test output."""
    return case.name.replace(" ", "-")


def build(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Inputs:
    """Make a case's tensors; the same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    v_dim = case.v_head_dim or case.head_dim
    tokens = sum(case.kv_lens)
    k = torch.randn(tokens, case.num_kv_heads, case.head_dim, generator=generator).to(dtype)
    v = torch.randn(tokens, case.num_kv_heads, v_dim, generator=generator).to(dtype)
    views = _deal(case, generator)
    gaps = torch.randint(0, 5, (len(views),), generator=generator).tolist()
    slots = sum(n for _, _, n in views) + sum(gaps) + 7
    k_pool = torch.full((slots, case.num_kv_heads, case.head_dim), math.nan, dtype=dtype)
    v_pool = torch.full((slots, case.num_kv_heads, v_dim), math.nan, dtype=dtype)
    starts = [0] * len(views)
    at = 3
    for i in torch.randperm(len(views), generator=generator).tolist():
        starts[i] = at + gaps[i]
        at = starts[i] + views[i][2]
    row_starts = [sum(case.kv_lens[:b]) for b in range(len(case.kv_lens))]
    local: list[list[int]] = [[] for _ in case.kv_lens]
    for (row, token_start, length), slot in zip(views, starts, strict=True):
        source = slice(row_starts[row] + token_start, row_starts[row] + token_start + length)
        k_pool[slot : slot + length], v_pool[slot : slot + length] = k[source], v[source]
        local[row] += range(token_start, token_start + length)
    view_rows = [(slot, n, token_start) for (_, token_start, n), slot in zip(views, starts, strict=True)]
    tables, view_table = make_tables(case, [row for row, _, _ in views], view_rows)
    q_lens = [*case.q_lens, *[case.q_lens[-1]] * case.padding]
    positions = [p for n, q in zip(case.kv_lens, case.q_lens, strict=True) for p in range(n - q, n)]
    positions += [-1] * (sum(q_lens) - len(positions))
    kept = []
    for row, tokens_here in enumerate(local):
        index = torch.tensor(tokens_here, dtype=torch.long)
        kept.append((index, k[index + row_starts[row]].double(), v[index + row_starts[row]].double()))
    q = torch.randn(len(positions), case.num_q_heads, case.head_dim, generator=generator).to(dtype)
    indptr = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    options = {"scale": case.head_dim**-0.5, "window": case.window, "softcap": case.softcap}
    return Inputs(
        q.to(device),
        k_pool.to(device),
        v_pool.to(device),
        KVTables(*(t.to(device) for t in tables[:3])),
        torch.tensor(positions, dtype=torch.int32, device=device),
        indptr.to(device),
        view_table.to(device),
        options,
        kept,
    )


def _deal(case: Case, generator: torch.Generator) -> list[tuple[int, int, int]]:
    """Cut every row into uneven views (row, token_start, length) and keep those of this rank."""
    views = []
    for row, total in enumerate(case.kv_lens):
        start = 0
        while start < total:
            longest = min(case.max_view, total - start)
            # every other view is as long as it can be, so that full tiles and edges are met
            length = longest if len(views) % 2 else int(torch.randint(1, longest + 1, (), generator=generator))
            if float(torch.rand((), generator=generator)) < case.local:
                views.append((row, start, length))
            start += length
    return views


def make_tables(case: Case, rows: list[int], views: list[tuple[int, int, int]]) -> tuple[KVTables, Tensor]:
    """Return the tables of views that are sorted by row and token, with rubbish where nothing may be read."""
    num_rows = len(case.kv_lens) + case.padding
    counts = [-(-length // case.tile_tokens) for _, length, _ in views]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    view_table = torch.full((len(views) + 3, 4), 2**30, dtype=torch.int32)
    for i, view in enumerate(views):
        view_table[i] = torch.tensor([*view, starts[i]], dtype=torch.int32)
    tile_table = torch.full((sum(counts) + 3, 4), 2**30, dtype=torch.int32)
    derive_tiles(view_table, torch.tensor([len(views)], dtype=torch.int32), case.tile_tokens, tile_table)
    ranges = torch.zeros(num_rows, 2, dtype=torch.int32)
    for row in range(num_rows):
        mine = [i for i, r in enumerate(rows) if r == row]
        if not mine:
            continue
        begin, end = starts[mine[0]], starts[mine[-1]] + counts[mine[-1]]
        if case.window:
            reach = case.kv_lens[row] - case.q_lens[row] - case.window + 1
            while begin < end and int(tile_table[begin, 2] + tile_table[begin, 1]) <= reach:
                begin += 1
        ranges[row] = torch.tensor([begin, end])
    spans = ranges[:, 1] - ranges[:, 0]
    cum = torch.cat([torch.zeros(1, dtype=torch.int32), spans.cumsum(0).to(torch.int32)])
    return KVTables(tile_table, ranges, cum), view_table


def truth(inputs: Inputs, dtype: torch.dtype = torch.float64) -> Partial:
    """Attend over each row's local keys at once in fp64; with another dtype, as eager attention does in that dtype."""
    q = inputs.q.cpu()
    group = q.shape[1] // inputs.k_pool.shape[1]
    scale, window, softcap = (inputs.options[name] for name in ("scale", "window", "softcap"))
    out = torch.zeros(*q.shape[:2], inputs.v_pool.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for row, (token, k, v) in enumerate(inputs.local):
        start, stop = inputs.q_indptr[row : row + 2].tolist()
        if not len(token) or start == stop:
            continue
        position = inputs.q_positions[start:stop].cpu()[:, None]
        keys = k.to(dtype).repeat_interleave(group, 1).permute(1, 2, 0)
        values = v.to(dtype).repeat_interleave(group, 1).transpose(0, 1)
        scores = (q[start:stop].to(dtype).transpose(0, 1) @ keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = token > position
        if window:
            hidden |= token <= position - window
        scores = scores.masked_fill(hidden, -math.inf)
        wide = scores if dtype == torch.float64 else scores.float()
        weights = wide.softmax(-1).nan_to_num(0.0).to(dtype)
        out[start:stop] = (weights @ values).transpose(0, 1).double()
        lse[start:stop] = wide.logsumexp(-1).transpose(0, 1).double()
    return Partial(out, lse)


def shrink(case: Case, rows: list[int]) -> Case:
    """Return the case with only some of its rows."""
    return replace(
        case,
        kv_lens=tuple(case.kv_lens[r] for r in rows),
        q_lens=tuple(case.q_lens[r] for r in rows),
    )

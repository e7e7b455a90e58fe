"""Cut the views of a step into tiles on the device: one launch a step, for all layers. Contract in `schedule.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_VIEWS = 32
# 1024 tokens in tiles of 64, the longest view of the default layout, in one pass
BLOCK_TILES = 16


@triton.jit
def derive_tiles_kernel(
    p_views, p_num_views, p_tiles, TILE: tl.constexpr, BLOCK_VIEWS: tl.constexpr, BLOCK_TILES: tl.constexpr
):
    """Write the tiles of `BLOCK_VIEWS` views, `BLOCK_TILES` of each at a time."""
    o_view = tl.program_id(0) * BLOCK_VIEWS + tl.arange(0, BLOCK_VIEWS)
    m_view = o_view < tl.load(p_num_views)
    p_view = p_views + o_view * 4
    b_slot = tl.load(p_view, mask=m_view, other=0)
    b_length = tl.load(p_view + 1, mask=m_view, other=0)
    b_token = tl.load(p_view + 2, mask=m_view, other=0)
    b_first = tl.load(p_view + 3, mask=m_view, other=0)
    o_tile = tl.arange(0, BLOCK_TILES)
    longest = tl.max(b_length, 0)
    done = 0
    while done * TILE < longest:
        b_number = done + o_tile[None, :]
        b_offset = b_number * TILE
        m_tile = b_offset < b_length[:, None]
        p_tile = p_tiles + (b_first[:, None] + b_number) * 4
        tl.store(p_tile, b_slot[:, None] + b_offset, mask=m_tile)
        tl.store(p_tile + 1, tl.minimum(b_length[:, None] - b_offset, TILE), mask=m_tile)
        tl.store(p_tile + 2, b_token[:, None] + b_offset, mask=m_tile)
        tl.store(p_tile + 3, tl.zeros([BLOCK_VIEWS, BLOCK_TILES], tl.int32), mask=m_tile)
        done += BLOCK_TILES


def derive_tiles(view_table: Tensor, num_views: Tensor, tile_tokens: int, tile_table: Tensor) -> None:
    """Write the tiles of all views of a step; see `distdec.ops.schedule.derive_tiles`.

    The grid covers the capacity of `view_table`; programs past `num_views` find nothing to do.
    """
    for name, table in (("view_table", view_table), ("tile_table", tile_table)):
        if table.dtype != torch.int32 or not table.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32, got {table.dtype} with strides {table.stride()}")
    grid = (triton.cdiv(view_table.shape[0], BLOCK_VIEWS),)
    if grid[0]:
        derive_tiles_kernel[grid](view_table, num_views, tile_table, tile_tokens, BLOCK_VIEWS, BLOCK_TILES, num_warps=4)

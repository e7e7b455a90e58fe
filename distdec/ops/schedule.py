"""Cut the views of a step into tiles: the table that every attention kernel of the step walks."""

import torch
from torch import Tensor


def derive_tiles(view_table: Tensor, num_views: Tensor, tile_tokens: int, tile_table: Tensor) -> None:
    """Write the tiles of all views of a step.

    View i of `length` tokens fills tiles `tile_start` to `tile_start + ceil(length / tile_tokens) - 1`; all but its
    last tile hold `tile_tokens` tokens. Example: the view `[1024, 300, 0, 5]` in tiles of 128 tokens writes
    `[1024, 128, 0, 0]`, `[1152, 128, 128, 0]` and `[1280, 44, 256, 0]` to rows 5, 6 and 7.

    Args:
        view_table: slot of a view's first token, its number of tokens, the global position of its first token, and
            its first row in `tile_table`.
        num_views: how many rows of `view_table` count; read from device memory, so that a captured graph follows it.
        tile_tokens: most tokens in a tile.
        tile_table: output, one row a tile: slot, length, token position, 0. Other rows stay as they are.

    Shapes:
        view_table: [C, 4] int32, num_views: [1] int32, tile_table: [N, 4] int32

    Notes:
        In-place: writes `tile_table`. Graph-safe and without host sync in the Triton twin; here `num_views` is read.
    """
    count = int(num_views)
    views = view_table[:count].long()
    per_view = (views[:, 1] + tile_tokens - 1) // tile_tokens
    view = torch.repeat_interleave(torch.arange(count, device=views.device), per_view)
    # number of the tile inside its view: 0, 1, ..., restarting where the view changes
    first = torch.cumsum(per_view, 0) - per_view
    offset = (torch.arange(len(view), device=views.device) - first[view]) * tile_tokens
    slot_start, length, token_start, tile_start = views[view].unbind(1)
    tiles = torch.stack(
        [slot_start + offset, (length - offset).clamp(max=tile_tokens), token_start + offset, torch.zeros_like(offset)],
        dim=1,
    )
    tile_table[tile_start + offset // tile_tokens] = tiles.to(tile_table.dtype)

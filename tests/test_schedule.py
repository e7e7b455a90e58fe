"""Cutting views into tiles."""

import pytest
import torch

from distdec.ops.backends import get_backend

IMPLEMENTATIONS = ["reference", "triton"]


def expected(views: list[list[int]], tile: int) -> dict[int, list[int]]:
    """Return the tiles of views, written out one by one."""
    rows = {}
    for slot, length, token, first in views:
        for number, offset in enumerate(range(0, length, tile)):
            rows[first + number] = [slot + offset, min(tile, length - offset), token + offset, 0]
    return rows


def check(name: str, device: str) -> None:
    views = [[1024, 300, 0, 5], [7, 1, 300, 8], [0, 128, 301, 9], [4096, 129, 0, 12], [99, 127, 129, 14]]
    spare = [[11, 500, 0, 0]] * 3
    table = torch.tensor(views + spare, dtype=torch.int32, device=device)
    for tile in (128, 16, 100):
        rows = expected(views, tile)
        if tile != 128:
            # starts for the other tile sizes: one gap between views
            at = 2
            for i, view in enumerate(views):
                table[i, 3] = view[3] = at
                at += -(-view[1] // tile) + 1
            rows = expected(views, tile)
        out = torch.full((max(rows) + 4, 4), -7, dtype=torch.int32, device=device)
        count = torch.tensor([len(views)], dtype=torch.int32, device=device)
        get_backend(name, device).derive_tiles(table, count, tile, out)
        for row, values in enumerate(out.tolist()):
            assert values == rows.get(row, [-7] * 4), (tile, row)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_tiles_cover_every_view_and_nothing_else_is_written(name):
    check(name, "cpu")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_no_views_write_no_tiles(name):
    out = torch.full((4, 4), -7, dtype=torch.int32)
    views = torch.full((5, 4), 2**30, dtype=torch.int32)
    get_backend(name, "cpu").derive_tiles(views, torch.zeros(1, dtype=torch.int32), 16, out)
    assert (out == -7).all()


@pytest.mark.gpu
def test_tiles_on_a_gpu():
    check("triton", "cuda")

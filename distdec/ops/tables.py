"""Device tables that tell the attention kernels which stretches of the pool belong to which row of the step."""

from typing import NamedTuple

from torch import Tensor


class Schedule(NamedTuple):
    """How the decode programs of one rank share a step's tiles, derived once a step for all layers; `spans.py`.

    A segment is a stretch of tiles of one unit (row, KV head) that one program attends to; it leaves one partial. An
    entry describes a segment: `partial` (its number), `next` (number of the segment that the same program does after
    it, -1 for none), `unit`, `begin`, `end` (in `tile_table`), and the first tile's slot, length and token.

    Attributes:
        num_kv_heads: that the units were counted with.
        num_spans: programs.
        split_tiles: 0, or the length of the deterministic schedule's pieces.

    Shapes:
        entries: [num_spans + N, 8] int32: the first segment of program p in row p (partial -1: none), the segment of
            partial n in row `num_spans + n`; rows of other numbers hold anything
        ranges: [U, 2] int32: first partial of each unit, and the one past its last; equal where it has none
    """

    entries: Tensor
    ranges: Tensor
    num_kv_heads: int
    num_spans: int
    split_tiles: int = 0


class KVTables(NamedTuple):
    """What one rank's kernels read of this step's rows. All tensors are int32 and live on the device.

    A tile is a stretch of at most `tile_tokens` tokens inside one view. A row's tiles are consecutive in `tile_table`
    and ascend in token position; under a sliding window a row's range is the suffix of its tiles that the window can
    reach. Example: row 0 holds 300 tokens from slot 1024 on, tokens 0 to 299, with tiles of 128 tokens:
    `tile_table[:3] = [[1024, 128, 0, 0], [1152, 128, 128, 0], [1280, 44, 256, 0]]`, `tile_ranges[0] = [0, 3]`.

    Shapes:
        tile_table: [N, 4] int32: slot of the first token, number of tokens (1 to `tile_tokens`), global position of
            the first token, 0. Rows past the last tile hold anything and are never read.
        tile_ranges: [B, 2] int32: begin and end of each row's tiles in `tile_table`; equal for a row without tokens.
        cum_tiles: [B + 1] int32: prefix sums of `end - begin`.
        schedule: of exactly these rows; None where `decode` is to derive it itself.
    """

    tile_table: Tensor
    tile_ranges: Tensor
    cum_tiles: Tensor
    schedule: Schedule | None = None

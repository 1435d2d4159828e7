"""How the work of tree attention is cut: tiles, shares of the columns, and who joins them.

Legend: R rows, G query heads of a key head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from furcate.errors import Unsupported
from furcate.shared_memory import H200

__all__ = ["FOLDED", "Tile", "folds", "one_tile", "splits_for", "tile_for"]

# entries of partial means, those of all splits, that one program still joins: one row of G = 3 and
# D = 64 has 4352 of them at 2k and takes 6.4 us on an H200 so, 6.8 with a launch to join; one row
# of G = 4 and D = 128 has 8704 there and takes 11.3 and 10.2, 30.6 and 27.2 at 16k
FOLDED = 6 << 10
_LEAST_ROWS = _LEAST_COLUMNS = 16  # of a matrix unit
_MOST_ROWS = 128  # above it a tile's sums leave the registers
_LONG = 8192  # columns; between 2k and 16k, where the best cuts differ
_WAVE = 264  # programs of four warps: two for each processor, or too few bytes are on their way
_MOST_SPLITS = 64
_LEAST_SHARE = 128  # columns


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work is cut.

    A row's result is the same for every cut up to rounding. With one split it is the same bit for
    bit for every number of rows in the pass as long as the cut stays.
    """

    rows: int  # packed rows of a program, at least 16
    columns: int  # keys looked at in one step
    warps: int = 4
    stages: int = 3
    in_turn: bool = True  # splits take steps in turn, else each a stretch of its own
    masked: bool = True  # one loop that masks every step, else one without masks for the prefix
    folded: int = FOLDED  # at most so many entries are joined by the last split to arrive

    def shared_bytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Of a program, and no less than what Triton 3.6 takes for compute capability 8.0 to 12.0.

        Queries, and keys and values of all stages with a slot for each; in float32 those of all
        stages but one, and the weights of a step.
        """
        entries, columns = head_dim * dtype.itemsize, self.columns
        if dtype.itemsize == 2:
            return (2 * self.stages * columns + self.rows) * entries + 8 * columns
        held = 2 * (self.stages - 1) * columns + self.rows
        return held * entries + self.rows * columns * dtype.itemsize

    def within(self, room: int, head_dim: int, dtype: torch.dtype) -> Tile:
        """Itself where it fits into so many bytes, else less at a time: stages, columns, rows."""
        tile = self
        while tile.shared_bytes(head_dim, dtype) > room:
            tile = tile._smaller()
        return tile

    def _smaller(self) -> Tile:
        if self.stages > 2:
            return replace(self, stages=self.stages - 1)
        if self.columns > _LEAST_COLUMNS:
            return replace(self, columns=self.columns // 2)
        if self.rows == _LEAST_ROWS:
            raise Unsupported(
                "a GPU has too little shared memory for heads of this size",
                field="device",
                hint="use cpu",
            )
        return replace(self, rows=self.rows // 2)


def tile_for(
    packed_rows: int, head_dim: int, dtype: torch.dtype, columns: int, room: int = H200
) -> Tile:
    """A cut for so many packed rows (R * G) and columns, as an H200 likes it.

    Where a program has less shared memory than there, `room` in bytes, it is made smaller.
    """
    return _measured(packed_rows, head_dim, dtype, columns).within(room, head_dim, dtype)


def _measured(packed_rows: int, head_dim: int, dtype: torch.dtype, columns: int) -> Tile:
    """What suits an H200.

    Measured in bfloat16 (us per call, the best and what was nearest; what differs by less than 3 %
    does not count): D = 128 with G = 4 and D = 64 with G = 3, one request.
    """
    usual = _columns_of(head_dim, dtype)
    if packed_rows <= _LEAST_ROWS:
        # one row of D = 64 takes 5.2 with 128 columns and 5.6 with 64 at 256, 6.5 and 6.4 at 2k;
        # of D = 128, 12.4 and 11.3 there
        return Tile(_LEAST_ROWS, 128 if head_dim * dtype.itemsize <= 128 else usual)
    if dtype.itemsize > 2:
        # without a matrix unit many rows need the registers of more threads
        rows = min(64, _power_of_2(packed_rows))
        return Tile(rows, usual, warps=8 if rows == 64 else 4, masked=False)
    short = columns < _LONG
    if packed_rows > _MOST_ROWS and not short and usual == 64:
        # 64 rows of G = 4 take 59 with 128 columns and 71 with 64 at 16k, 188 and 247 at 64k; at
        # 2k they take 21 and 19
        return Tile(_MOST_ROWS, 128, warps=8, masked=False)
    rows = min(64, _power_of_2(packed_rows))
    if short and head_dim <= 64:
        # 32 rows of G = 3 take 7.5 with one loop and 8.4 with two at 256, 8.7 and 9.4 at 2k; of
        # G = 4 and D = 128, 16 rows take 13.4 and 13.2 at 2k, 36 and 31 at 16k
        return Tile(rows, usual)
    # 16 rows of G = 4 take 12.6 with two stages and 13.2 with three at 2k, 81 and 76 at 64k; 64
    # rows take 17.4 with two stages at 2k, and 18.9 in tiles of 128 rows with three
    return Tile(rows, usual, stages=2 if short else 3, masked=False)


def one_tile(head_dim: int, dtype: torch.dtype, room: int = H200) -> Tile:
    """The same for every number of rows and columns; `room` as for `tile_for`."""
    rows = 64 if dtype.itemsize == 2 else _LEAST_ROWS
    return Tile(rows, _columns_of(head_dim, dtype)).within(room, head_dim, dtype)


def _columns_of(head_dim: int, dtype: torch.dtype) -> int:
    return 32 if head_dim * dtype.itemsize > 256 else 64


def splits_for(programs: int, columns: int, tile: Tile) -> int:
    """How many programs should share the columns of a request, given those of one split.

    About one wave of a large GPU, no share so small that joining it costs more than it saves, and
    as few as take equally many steps.
    """
    wave = _WAVE * 4 // max(4, tile.warps)  # the registers of a processor hold eight warps
    wanted = min(wave // max(1, programs), -(-columns // _LEAST_SHARE))
    steps = max(1, -(-columns // tile.columns))
    longest = -(-steps // max(1, min(_MOST_SPLITS, wanted)))
    return -(-steps // longest)


def folds(packed_rows: int, splits: int, head_dim: int, tile: Tile) -> bool:
    """Whether the last split to arrive joins them all, without a launch of its own."""
    entries = _power_of_2(packed_rows) * splits * head_dim
    return packed_rows <= tile.rows and splits > 1 and entries <= tile.folded


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()

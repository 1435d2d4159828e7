"""How the work of tree attention is cut: tiles, shares of the columns, and who joins them.

Legend: R rows, G query heads of a key head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["FOLDED", "Tile", "folds", "one_tile", "splits_for", "tile_for"]

FOLDED = 1 << 15  # entries of partial means, those of all splits, that one program still joins
_LEAST_ROWS = 16  # of a matrix unit
_MOST_ROWS = 128  # above it a tile's sums leave the registers
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


def tile_for(packed_rows: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """A cut for so many packed rows (R * G): each key is read once up to 64 of them, and to 128."""
    wide = head_dim * dtype.itemsize > 256
    columns = 32 if wide else 64
    if packed_rows > 128 and dtype.itemsize == 2 and not wide:
        return Tile(_MOST_ROWS, columns, warps=8, masked=False)
    rows = max(_LEAST_ROWS, min(64, _power_of_2(packed_rows)))
    # without a matrix unit many rows need the registers of more threads
    warps = 8 if rows == 64 and dtype.itemsize > 2 else 4
    return Tile(rows, columns, warps, masked=rows == _LEAST_ROWS)


def one_tile(head_dim: int, dtype: torch.dtype) -> Tile:
    """The same for every number of rows."""
    rows = 64 if dtype.itemsize == 2 else _LEAST_ROWS
    return Tile(rows, tile_for(rows, head_dim, dtype).columns)


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

"""How tree attention is cut is what was the fastest on an H200, or no slower than 3 % more."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from furcate.errors import Unsupported
from furcate.kernels.attention_cut import Tile, folds, one_tile, splits_for, tile_for
from furcate.shared_memory import H200

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """Heads of a model."""

    head_dim: int
    group: int
    kv_heads: int

    def tile(self, length: int, rows: int) -> Tile:
        return tile_for(rows * self.group, self.head_dim, DTYPE, length + rows)

    def splits(self, length: int, rows: int) -> int:
        tile = self.tile(length, rows)
        programs = self.kv_heads * -(-rows * self.group // tile.rows)
        return splits_for(programs, length + rows, tile)

    def folds(self, length: int, rows: int) -> bool:
        splits, tile = self.splits(length, rows), self.tile(length, rows)
        return folds(rows * self.group, splits, self.head_dim, tile)


LLAMA_8B, SMOLLM2_135M = Shape(128, 4, 8), Shape(64, 3, 3)
TWO = {"stages": 2, "masked": False}
LARGE = Tile(128, 128, warps=8, masked=False)
MEASURED = [  # shape, prefix, rows; tile, splits and whether they are folded; us, those of the best
    (LLAMA_8B, 2048, 1, Tile(16, 64), 17, False, 10.20, 10.20),
    (LLAMA_8B, 2048, 16, Tile(64, 64, **TWO), 17, False, 12.65, 12.65),
    (LLAMA_8B, 2048, 64, Tile(64, 64, **TWO), 7, False, 17.42, 17.42),
    (LLAMA_8B, 16384, 1, Tile(16, 64), 33, False, 27.22, 27.22),
    (LLAMA_8B, 16384, 16, Tile(64, 64, masked=False), 33, False, 30.85, 30.73),
    (LLAMA_8B, 16384, 64, LARGE, 8, False, 59.47, 59.47),
    (LLAMA_8B, 65536, 1, Tile(16, 64), 33, False, 75.82, 74.53),
    (LLAMA_8B, 65536, 16, Tile(64, 64, masked=False), 33, False, 75.92, 75.28),
    (LLAMA_8B, 65536, 64, LARGE, 8, False, 188.40, 188.40),
    (SMOLLM2_135M, 256, 1, Tile(16, 128), 3, True, 5.25, 5.25),
    (SMOLLM2_135M, 256, 32, Tile(64, 64), 3, False, 7.51, 7.30),
    (SMOLLM2_135M, 2048, 1, Tile(16, 128), 17, True, 6.47, 6.44),
    (SMOLLM2_135M, 2048, 32, Tile(64, 64), 17, False, 8.72, 8.72),
]


@pytest.mark.parametrize(
    ("shape", "length", "rows", "tile", "splits", "folded", "us", "best_us"), MEASURED
)
def test_a_measured_case_is_cut_as_the_best_of_its_measurements(
    shape: Shape,
    length: int,
    rows: int,
    tile: Tile,
    splits: int,
    folded: bool,
    us: float,
    best_us: float,
) -> None:
    assert shape.tile(length, rows) == tile
    assert shape.splits(length, rows) == splits
    assert shape.folds(length, rows) == folded
    assert us <= 1.03 * best_us


def test_what_is_folded_is_little() -> None:
    tile = Tile(64, 64)
    assert folds(3, 17, 64, tile) and folds(30, 3, 64, tile)
    assert not folds(64, 16, 128, tile), "many rows of many splits"
    assert not folds(4, 17, 128, tile), "few rows of many splits"
    assert not folds(4, 1, 128, tile) and not folds(65, 2, 16, tile)
    assert not folds(4, 2, 16, replace(tile, folded=0))


def test_splits_fill_the_device_and_no_more() -> None:
    four, eight = Tile(16, 64), Tile(128, 64, warps=8)
    assert (splits_for(16, 8192, four), splits_for(16, 8192, eight)) == (16, 8)
    assert splits_for(3, 8192, four) == 64
    assert splits_for(24, 8192, four) == 11
    assert splits_for(300, 1 << 20, four) == 1
    assert splits_for(1, 128, four) == 1
    assert splits_for(1, 129, four) == 2
    assert splits_for(8, 2049, four) == 17, "of two steps each, and not 16 of up to three"


COMPILED = [  # capability, tile, head size, dtype; bytes of shared memory in Triton 3.6's metadata
    (9.0, LARGE, 128, DTYPE, 230_400),
    (9.0, Tile(64, 64, **TWO), 128, DTYPE, 82_432),
    (9.0, Tile(64, 64, masked=False), 128, DTYPE, 115_200),
    (9.0, Tile(64, 32, masked=False), 256, DTYPE, 131_328),
    (9.0, Tile(16, 64), 128, DTYPE, 71_680),
    (9.0, Tile(16, 128), 64, DTYPE, 71_680),
    (9.0, Tile(64, 32, masked=False), 128, torch.float32, 106_496),
    (8.0, LARGE, 128, DTYPE, 164_864),
    (8.0, Tile(64, 64, masked=False), 128, DTYPE, 90_112),
    (8.0, Tile(64, 32, masked=False), 256, DTYPE, 102_400),
    (8.0, Tile(64, 32, masked=False), 128, torch.float32, 106_496),
    (12.0, LARGE, 128, DTYPE, 164_864),
]


@pytest.mark.parametrize(("capability", "tile", "head_dim", "dtype", "taken"), COMPILED)
def test_a_cut_takes_no_more_shared_memory_than_it_says(
    capability: float, tile: Tile, head_dim: int, dtype: torch.dtype, taken: int
) -> None:
    assert taken <= tile.shared_bytes(head_dim, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("room", [99 * 1024, 163 * 1024, H200])
def test_no_cut_is_chosen_that_the_device_has_no_room_for(
    room: int, head_dim: int, dtype: torch.dtype
) -> None:
    for rows in (1, 16, 17, 64, 128, 129, 1000):
        for columns in (1, 8191, 8192):
            tile = tile_for(rows, head_dim, dtype, columns, room)
            assert tile.shared_bytes(head_dim, dtype) <= room
            assert room < H200 or tile.rows >= min(rows, 64)
            assert min(tile.rows, tile.columns) >= 16 and tile.stages >= 2
    one = one_tile(head_dim, dtype, room)
    assert one.shared_bytes(head_dim, dtype) <= room
    assert room < H200 or one.columns == (32 if head_dim * dtype.itemsize > 256 else 64)


def test_less_room_makes_fewer_stages_then_fewer_columns_then_fewer_rows() -> None:
    assert tile_for(256, 128, DTYPE, 1 << 14) == LARGE
    assert tile_for(256, 128, DTYPE, 1 << 14, 163 * 1024) == replace(LARGE, stages=2, columns=128)
    assert LARGE.within(99 * 1024, 128, DTYPE) == replace(LARGE, stages=2, columns=64)
    assert LARGE.within(30 * 1024, 128, DTYPE) == replace(LARGE, stages=2, columns=16, rows=32)
    with pytest.raises(Unsupported, match="shared memory"):
        LARGE.within(16 * 1024, 256, DTYPE)

"""The table of cuts of products: which sizes it takes, and the room that they ask for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton_device  # noqa: F401  # before any kernel is defined

from furcate.models import product_cut
from furcate.models.blocks_triton import _is_apart
from furcate.models.product_cut import (
    MEASURED,
    Cut,
    Size,
    Tile,
    fitting_tile,
    measured_tile,
    most_part_bytes,
    one_tile,
)
from furcate.shared_memory import H200

HALF = torch.bfloat16
DOWN = Cut((17, 64), (4000, 5000), (10000, 15000), Tile(64, 128, 128, 4, 4, splits=4))


@pytest.fixture
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_cut, "MEASURED", (DOWN,))


@pytest.mark.usefixtures("_table")
def test_a_cut_of_the_table_is_taken_for_its_sizes_alone() -> None:
    mine = Size(64, 4096, 14336, HALF)
    assert measured_tile(mine) == fitting_tile(mine) == DOWN.tile
    for other in (
        Size(16, 4096, 14336, HALF),
        Size(64, 5001, 14336, HALF),
        Size(64, 4096, 9999, HALF),
        Size(64, 4096, 14336, torch.float32),
    ):
        assert measured_tile(other) is None
        assert fitting_tile(other).splits == 1
    assert one_tile(mine).splits == 1, "a row that depends on no other goes by no table"


@pytest.mark.usefixtures("_table")
def test_what_the_table_knows_is_not_left_to_torch() -> None:
    def apart(rows: int, outputs: int, inputs: int) -> bool:
        weight = torch.empty((outputs, inputs), dtype=HALF, device="meta")
        return _is_apart(rows, SimpleNamespace(weight=weight, bias=None, packed=None))

    assert [apart(rows, 4096, 14336) for rows in (7, 16, 17, 64)] == [False, True, False, False]
    assert apart(64, 4096, 4096)


@pytest.mark.usefixtures("_table")
def test_no_product_of_the_table_takes_more_room_than_is_stated() -> None:
    def taken(rows: int, outputs: int, inputs: int) -> int:
        size = Size(rows, outputs, inputs, HALF)
        return fitting_tile(size).part_bytes(size)

    assert taken(64, 4096, 14336) == 32 * 4 * 4 * 64 * 129, "32 tiles, 4 splits, float32"
    assert taken(16, 4096, 14336) == 0
    assert taken(64, 5000, 10000) == most_part_bytes() > taken(17, 4096, 14336)


@pytest.mark.parametrize("inputs", [1, 128, 129, 4096, 14336])
@pytest.mark.parametrize("splits", [1, 3, 4, 8])
def test_stretches_are_whole_steps_that_hold_all_inputs(inputs: int, splits: int) -> None:
    tile = Tile(64, 128, 128, 4, 4, splits)
    stretch = tile.stretch(inputs)
    assert stretch % tile.inputs == 0
    assert splits * stretch >= inputs > splits * (stretch - tile.inputs)


@pytest.mark.parametrize("cut", MEASURED, ids=str)
def test_a_cut_that_was_measured_is_taken_for_both_ends_of_its_sizes(cut: Cut) -> None:
    for end in (0, 1):
        size = Size(cut.rows[end], cut.outputs[end], cut.inputs[end], HALF)
        assert measured_tile(size) == cut.tile, "none hides another, and it fits into a processor"
        assert cut.tile.rows >= size.rows, "the weight is read once"
        assert cut.tile.part_bytes(size) <= most_part_bytes() <= 16 << 20


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("room", [99 * 1024, 163 * 1024, H200])
def test_no_product_is_cut_so_that_the_device_has_no_room_for_it(
    room: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_cut, "MEASURED", ())
    for rows in (1, 16, 33, 64):
        for outputs, inputs in ((28672, 4096), (4096, 14336), (1536, 576), (128256, 4096)):
            size = Size(rows, outputs, inputs, dtype, room)
            for cut in (fitting_tile, one_tile):
                tile = cut(size)
                assert tile.fits(size)
                usual = cut(replace(size, room=H200))
                assert room < H200 or (tile == usual and tile.stages >= 3)
                assert (tile.rows, tile.outputs) == (usual.rows, usual.outputs)


@pytest.mark.parametrize(
    ("tile", "dtype", "taken"),
    [
        (Tile(64, 128, 128, 8, 3), HALF, 147_456),
        (Tile(64, 32, 256, 4, 3), HALF, 98_304),
        (Tile(16, 32, 256, 4, 5), HALF, 98_304),
        (Tile(64, 128, 64, 8, 3), torch.float32, 114_688),
    ],
    ids=str,
)
def test_a_product_takes_no_more_shared_memory_than_is_counted(
    tile: Tile, dtype: torch.dtype, taken: int
) -> None:
    """What Triton 3.6 compiles for compute capability 9.0; for 8.0, 8.9 and 12.0 it is no more."""
    assert not tile.fits(Size(64, 4096, 4096, dtype, room=taken - 1))


@pytest.mark.usefixtures("_table")
def test_a_cut_of_the_table_is_not_taken_where_it_does_not_fit() -> None:
    size = Size(64, 4096, 14336, HALF, room=163 * 1024)
    assert DOWN.tile.fits(replace(size, room=H200)) and not DOWN.tile.fits(size)
    assert measured_tile(size) is None and fitting_tile(size).fits(size)

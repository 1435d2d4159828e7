"""The table of cuts of products: which sizes it takes, and the room that they ask for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton_device  # noqa: F401  # before any kernel is defined

from furcate.models import product_cut
from furcate.models.blocks_triton import _is_apart
from furcate.models.product_cut import (
    PREDICTED,
    Cut,
    Size,
    Tile,
    fitting_tile,
    measured_tile,
    most_part_bytes,
    one_tile,
)

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


def test_predicted_cuts_are_one_wave_that_fits_into_the_processors() -> None:
    for cut in PREDICTED:
        size = Size(cut.rows[1], cut.outputs[1], cut.inputs[1], HALF)
        tile = cut.tile
        assert tile.stages * tile.inputs * (tile.outputs + tile.rows) * 2 <= 227 * 1024
        assert tile.tiles(size) * tile.splits <= 2 * 132
        assert most_part_bytes() <= cut.most_part_bytes <= 16 << 20 or tile.splits == 1

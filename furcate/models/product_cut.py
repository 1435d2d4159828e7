"""How products with few rows are cut: rules, and a table of cuts that a sweep found faster.

Legend: T rows, I inputs, O outputs; of one program: M rows, N rows of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from furcate.shared_memory import H200

__all__ = [
    "MEASURED",
    "Cut",
    "Size",
    "Tile",
    "fitting_tile",
    "measured_tile",
    "most_part_bytes",
    "one_tile",
]

_LEAST = 16  # of a side of a matrix unit
_MOST_ROWS = 64
_PROGRAMS = 96  # from so many on a device is busy, and programs may be wider instead
_WIDE = 64  # rows of the weight, from which on a step is work enough
_PROCESSORS = 132
_LONG = 2048  # inputs
_STAGED = 128 * 1024  # bytes on their way into the programs of a processor
_SHARING = 3  # programs of a processor that count on it


@dataclass(frozen=True, slots=True)
class Size:
    """Of a product; `outputs` are the rows of the weight."""

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    room: int = H200  # bytes of shared memory that a program may have where it is made


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut. The steps over the inputs are taken one after the other."""

    rows: int
    outputs: int  # rows of the weight; if gated, half of them are gates and half their ups
    inputs: int
    warps: int
    stages: int
    splits: int = 1  # programs that share a tile's inputs, each a stretch as long as the others'
    apart: bool = False  # a norm in front is a launch of its own, and x goes on as it comes

    def tiles(self, size: Size) -> int:
        """Of rows and outputs."""
        return -(-size.rows // self.rows) * -(-size.outputs // self.outputs)

    def stretch(self, inputs: int) -> int:
        """Inputs of a split, in whole steps; of the last ones some may lie past the end."""
        return -(-inputs // (self.inputs * self.splits)) * self.inputs

    def part_bytes(self, size: Size) -> int:
        """Of the sums of all splits, float32; beside them those of a norm's squares."""
        if self.splits == 1:
            return 0
        return 4 * self.tiles(size) * self.splits * self.rows * (self.outputs + 1)

    def fits(self, size: Size) -> bool:
        """Whether a program has shared memory for the inputs of all stages.

        What Triton 3.6 compiles for compute capability 8.0 and 9.0 takes no more.
        """
        held = self.stages * self.inputs * (self.rows + self.outputs)
        return held * size.dtype.itemsize <= size.room

    def smaller(self) -> Tile:
        """With less on its way at a time: fewer stages, then fewer inputs."""
        if self.stages > 2:
            return replace(self, stages=self.stages - 1)
        return replace(self, inputs=self.inputs // 2)


@dataclass(frozen=True, slots=True)
class Cut:
    """A tile for products in half precision of such sizes, both ends included."""

    rows: tuple[int, int]
    outputs: tuple[int, int]
    inputs: tuple[int, int]
    tile: Tile

    def fits(self, size: Size) -> bool:
        """Whether it is meant for this product, and can be launched."""
        sides = (size.rows, self.rows), (size.outputs, self.outputs), (size.inputs, self.inputs)
        meant = size.dtype.itemsize == 2 and all(a <= n <= b for n, (a, b) in sides)
        return meant and self.tile.fits(size)

    @property
    def most_part_bytes(self) -> int:
        """`Tile.part_bytes` of its largest product."""
        largest = Size(self.rows[1], self.outputs[1], self.inputs[1], torch.bfloat16)
        return self.tile.part_bytes(largest)


# What is taken before any rule and before torch's own products: what a sweep on an H200 found at
# least 3 % faster than both (`benchmarks/results/products_h200.json`; in each line its us, and
# those of what it takes the place of). The other products of 17 to 64 rows of such layers, and
# SmolLM2's, are as fast by the rules or by torch.
MEASURED: tuple[Cut, ...] = (
    # layers of 4096 and 14336: gates and ups, down, what attention says, scores
    Cut((33, 64), (20480, 32768), (3072, 5120), Tile(64, 128, 64, 4, 3, apart=True)),  # 61.8, 66.3
    Cut((17, 32), (20480, 32768), (3072, 5120), Tile(32, 256, 128, 8, 3)),  # 58.6, 64.8
    Cut((33, 64), (3072, 5120), (10240, 16384), Tile(64, 64, 64, 4, 8, splits=2)),  # 34.0, 36.2
    Cut((17, 32), (3072, 5120), (3072, 5120), Tile(32, 64, 64, 4, 8, splits=2)),  # 12.3, 13.7
    Cut((17, 32), (98304, 163840), (3072, 5120), Tile(32, 256, 128, 8, 3)),  # 238.7, 247.1
    # SmolLM2's down
    Cut((17, 32), (512, 1024), (1025, 2048), Tile(32, 16, 512, 4, 4)),  # 4.6, 5.1
)


def measured_tile(size: Size) -> Tile | None:
    """The cut that a sweep found for a product like this, if there is one."""
    return next((cut.tile for cut in MEASURED if cut.fits(size)), None)


def most_part_bytes() -> int:
    """What a pass keeps of partial sums: products of the table follow one another."""
    return max((cut.most_part_bytes for cut in MEASURED), default=0)


def fitting_tile(size: Size) -> Tile:
    """All rows of a product in one program up to 64; by a rule, the rows change nothing else."""
    wanted = _power_of_2(size.rows)
    return measured_tile(size) or _tile(size, max(_LEAST, min(_MOST_ROWS, wanted)))


def one_tile(size: Size) -> Tile:
    """The same for every number of rows."""
    return _tile(size, 32 if size.dtype.itemsize == 2 else _LEAST)


def _tile(size: Size, rows: int) -> Tile:
    # programs read all of x each, so fewer and wider ones read less, but take longer to get going
    widths = (128, 64, 32) if size.inputs >= _LONG else (64, 32)
    wide = next((n for n in widths if size.outputs >= n * _PROGRAMS), _LEAST)
    programs = -(-size.outputs // wide)
    # few narrow programs take longer steps: each of them ends with a wait
    narrow = wide < _WIDE and programs <= _PROCESSORS
    step = 512 if narrow and size.inputs >= 1024 else 256
    inputs = min(step // size.dtype.itemsize, _power_of_2(size.inputs))
    inputs = max(_LEAST, inputs)
    share = _STAGED // min(_SHARING, -(-programs // _PROCESSORS))
    stages = share // (inputs * (wide + rows) * size.dtype.itemsize)
    warps = 8 if rows == _MOST_ROWS and wide >= _WIDE else 4
    tile = Tile(rows, wide, inputs, warps, max(3, min(8, stages)))
    while not tile.fits(size):  # not on an H200
        tile = tile.smaller()
    return tile


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()

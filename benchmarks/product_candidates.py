"""Cuts of a product that are worth a try, the most promising first, by a rough estimate of times.

The estimate only decides on the order. Its constants are those of an H200: assumed, not fitted.
Legend: of one program: M rows, N rows of the weight, K inputs of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product, zip_longest

from furcate.models.product_cut import Size, Tile, fitting_tile

__all__ = ["candidates", "expected_us", "fits", "shared_bytes"]

PROCESSORS = 132
LINE = 128  # bytes that come from memory together
SHARED = 227 * 1024  # bytes of a processor for its programs
WARPS = 16  # of a processor: those of these kernels take 128 registers a thread and more
MOST_WAVES = 8
MOST_SHARED = 1024  # tiles that splits may share
NEEDED = 6e6  # bytes under way that keep the memory busy
MEMORY, CACHE = 4.3e6, 6e6  # bytes a us out of memory, and out of the L2 cache
INGEST = 6e4  # bytes a us that one processor takes in
START_US, STEP_US, NORM_US = 2.5, 0.2, 2.0  # of a launch, of a step, of a norm by itself
TICKET_US, JOINED = 1.0, 1e5  # of the last split to arrive, and bytes a us that it adds up


def candidates(size: Size, *, normed: bool, most: int = 40) -> Iterator[Tile]:
    """What is in use, then kind after kind in turn, each best first."""
    usual = fitting_tile(size)
    ranked = sorted(_all(size, normed=normed), key=lambda tile: expected_us(size, tile, normed))
    kinds: dict[tuple[int, int, bool], list[Tile]] = {}
    for tile in ranked:
        kinds.setdefault((tile.outputs, tile.splits, tile.apart), []).append(tile)
    in_turn = (tile for row in zip_longest(*kinds.values()) for tile in row if tile is not None)
    seen: list[Tile] = []
    for found in (usual, *in_turn):
        tile = found if normed else replace(found, apart=False)
        if tile not in seen and len(seen) < most and (not seen or fits(size, tile, normed)):
            seen.append(tile)
            yield tile


def _all(size: Size, *, normed: bool) -> Iterator[Tile]:
    """With as many stages as have room, for one, two or three programs on each processor."""
    rows = fitting_tile(size).rows
    sides = (16, 32, 64, 128, 256), (32, 64, 128, 256, 512, 1024), (4, 8), (1, 2, 3, 4, 5, 6, 8)
    for outputs, inputs, warps, splits in product(*sides):
        whole = Tile(rows, outputs, inputs, warps, 1, splits)
        steps = whole.stretch(size.inputs) // inputs
        for held, apart in product((1, 2, 3), (False, True) if normed else (False,)):
            room = SHARED // held // shared_bytes(size, whole)
            stages = 1 if steps == 1 else min(8, steps + 1, room)
            tile = replace(whole, stages=max(1, stages), apart=apart)
            if fits(size, tile, normed):
                yield tile


def fits(size: Size, tile: Tile, normed: bool) -> bool:
    """Whether it has room, keeps its sums in registers, and is neither idle nor many waves."""
    steps = tile.stretch(size.inputs) // tile.inputs
    threads, programs = 32 * tile.warps, tile.tiles(size) * tile.splits
    in_step = tile.rows * tile.inputs if normed and not tile.apart else 0
    used = -(-size.inputs // tile.stretch(size.inputs))  # splits that have anything to do
    return (
        shared_bytes(size, tile) <= SHARED - 1024
        and tile.outputs * tile.rows <= 64 * threads
        # a normed step is kept as it came, as its norm and as squares
        and in_step <= (32 if steps > 1 else 128) * threads
        # a step of all inputs is held in registers on its way
        and (steps == 1 or tile.stages >= 3)
        and (steps > 1 or tile.inputs * (tile.outputs + tile.rows) <= 256 * threads)
        and (tile.inputs * size.dtype.itemsize >= LINE and tile.inputs < 2 * size.inputs)
        and used == tile.splits
        and tile.outputs < 2 * size.outputs
        # splits are there to make one wave of all programs
        and programs <= (MOST_WAVES if tile.splits == 1 else 1) * PROCESSORS * _held(size, tile)
        and (tile.splits == 1 or tile.tiles(size) <= MOST_SHARED)
    )


def expected_us(size: Size, tile: Tile, normed: bool) -> float:
    """Waves of programs, each with so much under way, or its steps one after the other."""
    item = size.dtype.itemsize
    tiles = tile.tiles(size)
    programs, slots = tiles * tile.splits, PROCESSORS * _held(size, tile)
    weight = size.outputs * size.inputs * item
    steps = tile.stretch(size.inputs) // tile.inputs
    under_way = max(1, tile.stages - 1) * shared_bytes(size, replace(tile, stages=1))
    us = 0.0
    for first in range(0, programs, slots):
        wave = min(slots, programs - first)
        from_memory = weight * wave / programs / MEMORY
        rate = min(1.0, wave * under_way / NEEDED, min(wave, PROCESSORS) * INGEST / MEMORY)
        us += max(from_memory / rate, steps * STEP_US)
    of_x = tiles * tile.rows * size.inputs * item
    us = START_US + max(us, (weight + of_x) / CACHE)
    if tile.splits > 1:
        us += TICKET_US + 4 * tile.splits * tile.outputs * tile.rows / JOINED
    if normed:
        us += NORM_US if tile.apart else steps * STEP_US / 4
    return us


def shared_bytes(size: Size, tile: Tile) -> int:
    """What a program asks of its processor, as the compiler has it for several steps."""
    return tile.stages * tile.inputs * (tile.outputs + tile.rows) * size.dtype.itemsize


def _held(size: Size, tile: Tile) -> int:
    """Programs of a processor at a time."""
    return max(1, min(SHARED // (shared_bytes(size, tile) + 1024), WARPS // tile.warps))

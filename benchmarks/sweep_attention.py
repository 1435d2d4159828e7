"""Tries other cuts of tree attention, one change at a time, and says which is the fastest where.

    python benchmarks/sweep_attention.py --out sweep.json
    python benchmarks/sweep_attention.py --only smollm2-135m --contexts 256

Every cut is checked against a float32 reference, with NaN in what it leaves unwritten, before it is
timed: recorded calls over keys that together are larger than the cache, the median of replays.
The last two of a size start from queries, keys and values that are still to be turned and written:
in a launch ahead ("turned ahead", checked and timed with it), or by attention itself.
All kernels are compiled at first, several at once. With `--tiny` and no GPU the kernels run in
triton's interpreter, at sizes that say nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

if "--tiny" in sys.argv:
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    import triton_device  # noqa: F401  # before any kernel is defined

import torch
from gpu_cases import case, distance, poisoned
from gpu_report import Report, asked_of, parser_of
from gpu_timing import timed
from kernels_attention import Asked
from kernels_bench import Bench
from targets import OWN, SPECS

from furcate.kernels.attention_cut import Tile, folds, splits_for, tile_for
from furcate.kernels.backend_triton import TRITON
from furcate.kernels.tree_attention import Keys, Sight, behind
from furcate.kernels.tree_attention_triton import tree_attention
from furcate.kernels.turn_write_triton import turn_write
from furcate.models.rope import Rope
from furcate.models.spec import DecoderSpec

LLAMA = "llama-8b"
SIZES = {  # (context, rows), what matters most first
    LLAMA: [(n, rows) for n in (2048, 16384, 65536) for rows in (1, 64, 16)],
    OWN: [(n, rows) for n in (256, 2048) for rows in (1, 32)],
    "tiny": [(40, 1), (40, 9)],
}
NO_CEILINGS = {"memory_gb_per_s": 1.0, "bf16_tflop_per_s": 1.0, "smallest_kernel_us": 0.0}
AHEAD, ITSELF = "turned ahead", "turns by itself"
SHARED = 227 * 1024  # bytes of a processor that one program may have
Row = dict[str, Any]


@dataclass(frozen=True)
class Cut:
    """One way to do it; `why` is what it changes of the usual one."""

    why: str
    tile: Tile
    splits: int
    turning: str | None = None  # AHEAD or ITSELF; None: all is turned and written already

    def fits(self, spec: DecoderSpec, itemsize: int) -> bool:
        """Whether queries, keys and values have room in a processor."""
        tile, row = self.tile, spec.head_dim * itemsize
        buffers = 2 * max(1, tile.stages - 1) * tile.columns * row
        return buffers + tile.rows * (row + tile.columns * itemsize) < SHARED - 4096


@dataclass(frozen=True)
class Unturned:
    """A projection of queries, keys and values as a pass finds it, and the angles of its rows."""

    qkv_TAD: torch.Tensor
    angles: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, asked: Asked, position_BR: torch.Tensor) -> Unturned:
        """Random ones."""
        spec, bench = asked.spec, asked.bench
        heads = spec.num_heads + 2 * spec.num_kv_heads
        qkv_TAD = bench.random(len(asked.q_THD), heads, spec.head_dim)
        by = Rope(spec.rope, spec.head_dim, bench.dtype, bench.device)(position_BR.flatten())
        return cls(qkv_TAD, (by.cos_T1D, by.sin_T1D))


@dataclass(frozen=True)
class Place:
    """One size, its keys, and what is right."""

    name: Row
    asked: Asked
    sight: Sight
    expected_THD: torch.Tensor
    unturned: Unturned

    @classmethod
    def of(cls, bench: Bench, shape: str, length: int, rows: int) -> Place:
        """Of one request."""
        made = case(1, length, rows, bench.device)
        asked = Asked.of(bench, SPECS[shape], made)
        sight = behind(made.places, made.draft.end_BR, made.draft.live_B)
        name = {"shape": shape, "length": length, "rows": rows}
        unturned = Unturned.of(asked, made.draft.depth_BR + length)
        return cls(name, asked, sight, asked.expected(sight), unturned)

    def cuts(self) -> Iterator[Cut]:
        """The usual one, and those that differ in one thing, as far as they fit."""
        spec, itemsize = self.asked.spec, self.asked.bench.dtype.itemsize
        seen = set()
        for cut in _cuts(self.asked, self.sight.rows, self.sight.places.columns):
            key = cut.tile, cut.splits, cut.turning
            if key not in seen and cut.fits(spec, itemsize):
                seen.add(key)
                yield cut

    def call(self, cut: Cut) -> Callable[[], torch.Tensor]:
        """Each call finds other keys in memory."""
        turns = cycle(self.asked.layers)
        return lambda: self.look(cut, next(turns))

    def look(self, cut: Cut, keys: Keys) -> torch.Tensor:
        """What the rows see."""
        how: Any = {"splits": cut.splits, "tile": cut.tile}
        if cut.turning is None:
            return tree_attention(self.asked.q_THD, keys, self.sight, **how)
        qkv_TAD, angles = self.unturned.qkv_TAD, self.unturned.angles
        if cut.turning == ITSELF:
            return tree_attention(qkv_TAD, keys, self.sight, angles=angles, **how)
        q_THD = turn_write(qkv_TAD, angles, keys, self.sight.write_T)
        return tree_attention(q_THD, keys, self.sight, **how)

    def error(self, cut: Cut) -> float:
        """How far it is from the reference; what is turned and written here, from two launches."""
        with poisoned():
            if cut.turning is None:
                return distance(self.look(cut, self.asked.layers[0]), self.expected_THD)
            layer = self.asked.layers[0]
            ours, theirs = (Keys(layer.k_SKD.clone(), layer.v_SKD.clone()) for _ in "ot")
            expected_THD = self.look(replace(cut, turning=AHEAD), theirs)
            seen = distance(self.look(cut, ours), expected_THD)
            # slots that nobody owns stay NaN in both
            return max(seen, distance(ours.k_SKD.nan_to_num(), theirs.k_SKD.nan_to_num()))

    def row(self, cut: Cut) -> Row:
        """Checked and timed."""
        tile, asked = cut.tile, self.asked
        words = {n: getattr(tile, n) for n in tile.__dataclass_fields__} | {"splits": cut.splits}
        error = self.error(cut)
        timing = timed(self.call(cut), asked.bench.device, turns=len(asked.layers))
        row = asked.bench.row(error, timing)
        row["kv_gb_per_s"] = asked.kv_bytes / timing.ms / 1e6
        # how rows are packed and cut stands under other names than the size's rows
        words["tile_rows"] = words.pop("rows")
        return {"why": cut.why, "turning": cut.turning, **words, **row}


def _cuts(asked: Asked, rows: int, columns: int) -> Iterator[Cut]:
    spec, dtype = asked.spec, asked.bench.dtype
    packed = rows * asked.group
    usual = tile_for(packed, spec.head_dim, dtype, columns)

    def cut(why: str, tile: Tile, share: float = 1.0) -> Cut:
        programs = spec.num_kv_heads * -(-packed // tile.rows)
        splits = round(splits_for(programs, columns, tile) * share)
        return Cut(why, tile, max(1, min(64, splits, -(-columns // tile.columns))))

    yield cut("usual", usual)
    for stages in (2, 3, 4, 5):
        yield cut(f"{stages} stages", replace(usual, stages=stages))
    for wide, stages in ((32, 3), (32, 5), (128, 2), (128, 3)):
        yield cut(f"{wide} columns, {stages} stages", replace(usual, columns=wide, stages=stages))
    yield cut("half the splits", usual, 0.5)
    yield cut("twice the splits", usual, 2.0)
    yield cut("a split a step", usual, 64.0)
    yield cut("a split a step of 128", replace(usual, columns=128, stages=2), 64.0)
    yield cut("stretches", replace(usual, in_turn=False))
    yield cut("masks turned", replace(usual, masked=not usual.masked))
    folding = folds(packed, cut("usual", usual).splits, spec.head_dim, usual)
    yield cut("fold turned", replace(usual, folded=0 if folding else 1 << 17))
    yield cut("8 warps" if usual.warps == 4 else "4 warps", replace(usual, warps=12 - usual.warps))
    if usual.rows == 128:
        yield cut("64 rows", replace(usual, rows=64, warps=4))
        yield cut("64 rows, 2 stages", replace(usual, rows=64, warps=4, stages=2))
    for turning in (AHEAD, ITSELF):
        yield replace(cut(turning, usual), turning=turning)


def compiled(places: list[Place], report: Report, device: torch.device) -> None:
    """All kernels at once: compilers run beside one another."""
    if device.type != "cuda":
        return
    calls = [place.call(cut) for place in places for cut in place.cuts()]
    began = time.perf_counter()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        done = [pool.submit(call) for call in calls]
        faults = [one.exception() for one in done]
    torch.cuda.synchronize()
    report.note(
        compile_seconds=round(time.perf_counter() - began, 1),
        not_compiled=[str(fault).splitlines()[0] for fault in faults if fault is not None],
    )


def table(rows: list[Row]) -> Iterator[str]:
    """The usual cut and the best, size by size."""
    sizes: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.get("sound"):
            sizes.setdefault((row["shape"], row["length"], row["rows"]), []).append(row)
    head = f"{'shape':14}{'context':>8}{'rows':>6}{'usual µs':>10}{'best µs':>10}{'GB/s':>8}"
    yield head + f"{'ahead':>8}{'itself':>8}  best"
    for (shape, length, number), found in sizes.items():
        by_turning = {row["turning"]: f"{row['us']:.1f}" for row in found}
        turned = [by_turning.get(turning, "") for turning in (AHEAD, ITSELF)]
        found = [row for row in found if row["turning"] is None]
        if not found:
            continue
        usual, best = found[0], min(found, key=lambda row: float(row["us"]))
        name = f"{best['why']} ({best['splits']} splits)"
        yield (
            f"{shape:14}{length:8}{number:6}{usual['us']:10.1f}{best['us']:10.1f}"
            f"{best['kv_gb_per_s']:8.0f}{turned[0]:>8}{turned[1]:>8}  {name}"
        )


def main() -> None:
    """Sweep, and write what was found."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(SIZES), default=[LLAMA, OWN])
    parser.add_argument("--contexts", nargs="+", type=int, help="of these lengths alone")
    parser.add_argument("--rows", nargs="+", type=int, help="of so many rows alone")
    asked, device = asked_of(parser, {"only": ["tiny"]})
    if torch.cuda.is_available():
        device = torch.device("cuda")  # there the kernels are compiled, for tiny sizes too
    dtype = torch.float32 if asked.tiny else torch.bfloat16
    bench = Bench(TRITON, device, dtype, NO_CEILINGS)
    report = Report.of("sweep_attention.py", "cuts of tree attention", device, asked)
    with torch.inference_mode():
        places = [
            Place.of(bench, shape, length, rows)
            for shape in asked.only
            for length, rows in SIZES[shape]
            if length in (asked.contexts or [length]) and rows in (asked.rows or [rows])
        ]
        compiled(places, report, device)
        for place in places:
            for cut in place.cuts():
                report.run(place.name, lambda place=place, cut=cut: place.row(cut))
    for line in table(report.rows):
        sys.stderr.write(line + "\n")
    sys.exit(report.close())


if __name__ == "__main__":
    main()

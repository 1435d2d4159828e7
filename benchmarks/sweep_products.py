"""Tries other cuts of products with few rows and says which is the fastest where.

    python benchmarks/sweep_products.py --out products.json
    python benchmarks/sweep_products.py --only llama-8b-eagle3 --rows 8 16

Every cut is checked against torch in float32, with NaN in what it leaves unwritten, before it is
timed: recorded calls over weights that together are larger than the cache, the median of replays.
Beside them stand torch's product behind our norm, and what is taken today. Sizes take turns, each
with its most promising cut next; kernels of a turn are compiled side by side ahead of it. What
there was no time for is named. A cut that wins goes into the table of `models/product_cut.py`.
With `--tiny` and no GPU the kernels run in triton's interpreter, at sizes that say nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

if "--tiny" in sys.argv:
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    import triton_device  # noqa: F401  # before any kernel is defined

import torch
from gpu_cases import distance, poisoned
from gpu_report import Report, asked_of, parser_of
from gpu_timing import buffers_for, ceilings, timed
from kernels_bench import Bench
from kernels_layer import random_linear, sides
from product_candidates import candidates
from targets import OWN, SPECS
from torch import Tensor

from furcate.kernels.backend_triton import TRITON as KERNELS
from furcate.models.blocks import TORCH, Apart, Blocks, Stream
from furcate.models.blocks_triton import TRITON, Fused
from furcate.models.gate_triton import gated
from furcate.models.linear import Linear, linear
from furcate.models.norm import RmsNorm
from furcate.models.norm_triton import add_norm
from furcate.models.product_cut import Size, Tile
from furcate.models.product_triton import tiled

LLAMA = "llama-8b"
GATE, NORM, ADD, PLAIN = "norm, gate, up, SwiGLU", "norm, qkv", "down, sum", "scores"
OUT = "attention out, sum"
ROWS = {  # what matters most first
    LLAMA: (64, 32, 16, 8),
    OWN: (32, 64, 16, 8),
    f"{LLAMA}-eagle3": (8, 16, 64, 32),
    f"{OWN}-eagle3": (8, 16, 32, 64),
    "tiny": (5,),
}
AT_FIRST = {LLAMA: (64, 32), OWN: (32,)}  # rows, where none are asked for
A_TURN = 4  # cuts of a size that are compiled and timed before the next size has its turn
TODAY = {"torch": Apart(add_norm, linear, gated), "in use": TRITON}
Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A product of a model; its kind says what stands around it."""

    model: str
    name: str
    outputs: int
    inputs: int
    kind: str

    @property
    def normed(self) -> bool:
        """Whether a norm is in front."""
        return self.kind in (GATE, NORM)


@dataclass(frozen=True)
class Place:
    """A shape with some rows, its weights, and what is right."""

    bench: Bench
    shape: Shape
    x_TI: Tensor
    more_TO: Tensor | None  # is added
    norm: RmsNorm
    layers: Sequence[Linear]
    expected_TO: Tensor

    @classmethod
    def of(cls, bench: Bench, shape: Shape, rows: int, layers: Sequence[Linear]) -> Place:
        """With random rows."""
        x_TI = bench.random(rows, shape.inputs)
        exact = torch.empty(0, device=bench.device)
        twin = random_linear(shape.inputs, shape.outputs, exact)
        twin.weight.copy_(layers[0].weight)
        norms = _norm(shape.inputs, x_TI), _norm(shape.inputs, exact)
        more_TO = bench.random(rows, shape.outputs) if shape.kind == ADD else None
        made = cls(bench, shape, x_TI, more_TO, norms[0], layers, x_TI)
        wanted_TO = replace(made, x_TI=x_TI.float(), norm=norms[1]).result(TORCH, twin).whole()
        return replace(made, expected_TO=wanted_TO)

    @property
    def size(self) -> Size:
        """As cuts are chosen by."""
        return Size(len(self.x_TI), self.shape.outputs, self.shape.inputs, self.bench.dtype)

    def result(self, way: Blocks, by: Linear) -> Stream:
        """What a block says; torch's way leaves a sum to the norm behind it, as it does there."""
        stream = Stream(self.x_TI)
        if self.more_TO is not None:
            return way.linear_add(self.x_TI, by, self.more_TO)
        if self.shape.kind == GATE:
            return Stream(way.gate_linear(stream, self.norm, by)[1])
        if self.shape.kind == NORM:
            return Stream(way.norm_linear(stream, self.norm, by)[1])
        return Stream(way.linear(self.x_TI, by))

    def call(self, way: Blocks) -> Callable[[], Stream]:
        """Each call finds another weight in memory."""
        turns = cycle(self.layers)
        return lambda: self.result(way, next(turns))

    def row(self, name: str, way: Blocks, tile: Tile | None) -> Row:
        """Checked and timed."""
        with poisoned():
            found_TO = self.result(way, self.layers[0]).whole()
            error = distance(found_TO, self.expected_TO)
        timing = timed(self.call(way), self.bench.device, turns=len(self.layers))
        moved = self.layers[0].weight.nbytes + self.x_TI.nbytes + found_TO.nbytes
        words = {} if tile is None else {n: getattr(tile, n) for n in tile.__dataclass_fields__}
        words = {f"tile_{n}": value for n, value in words.items()}
        return {"way": name, **words, **self.bench.row(error, timing, moved=moved)}

    @property
    def name(self) -> Row:
        """What is measured, for a row."""
        shape, rows = self.shape, len(self.x_TI)
        sides_ = {"outputs": shape.outputs, "inputs": shape.inputs}
        return {"model": shape.model, "product": shape.name, "rows": rows, **sides_}

    def ways(self) -> Iterator[tuple[str, Blocks, Tile | None]]:
        """What there is today, then one cut after the other."""
        for name, way in TODAY.items():
            yield name, way, None
        tiles = list(candidates(self.size, normed=self.shape.normed))
        if self.bench.device.type != "cuda":  # the interpreter takes its time
            tiles = [tiles[0], *[tile for tile in tiles if tile.splits > 1][:1]]
        for tile in tiles:
            yield "cut", Fused(tiled(lambda _, tile=tile: tile)), tile


def shapes(model: str) -> Iterator[Shape]:
    """The products of a layer by their bytes, and the scores; or those of an EAGLE-3 head."""
    spec = SPECS[model.removesuffix("-eagle3")]
    hidden = spec.hidden_size
    if model.endswith("-eagle3"):
        # its layer has the target's widths, whose other products are the target's
        wide = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        yield Shape(model, "fused states", hidden, 3 * hidden, PLAIN)
        yield Shape(model, "qkv of two", wide, 2 * hidden, PLAIN)
        yield Shape(model, "norm, frequent words", min(32768, spec.vocab_size), hidden, NORM)
        return
    for name in (GATE, ADD, NORM, OUT, PLAIN):
        inputs, outputs = sides(spec, name)
        if name != PLAIN or model != "tiny":
            yield Shape(model, name, outputs, inputs, ADD if name == OUT else name)


def places_of(bench: Bench, models: Sequence[str], rows: Sequence[int]) -> list[Place]:
    """All sizes; the weights of a shape serve all numbers of rows."""
    made = []
    like = torch.empty(0, dtype=bench.dtype, device=bench.device)
    for model in models:
        for shape in shapes(model):
            count = buffers_for(shape.inputs * shape.outputs * like.itemsize, bench.device)
            layers = [random_linear(shape.inputs, shape.outputs, like) for _ in range(count)]
            wanted = rows or AT_FIRST.get(model, ROWS[model])
            asked = [n for n in ROWS[model] if n in wanted]
            made += [Place.of(bench, shape, n, layers) for n in asked]
    return made


def sweep(places: Sequence[Place], report: Report) -> None:
    """Turn by turn, as long as there is time."""
    waiting = [(place, place.ways()) for place in places]
    compiling = 0.0
    while waiting:
        turns = [(place, list(islice(ways, A_TURN))) for place, ways in waiting]
        tries = [(place, *way) for place, ways in turns for way in ways]
        if not report.late:
            compiling += _compiled(tries)
            report.note(compile_seconds=round(compiling, 1))
        for place, name, way, tile in tries:
            report.run(place.name, lambda p=place, n=name, w=way, t=tile: p.row(n, w, t))
        waiting = [
            pair for pair, (_, ways) in zip(waiting, turns, strict=True) if len(ways) == A_TURN
        ]


def _compiled(tries: Sequence[tuple[Place, str, Blocks, Tile | None]]) -> float:
    """Seconds that it took; what cannot be compiled fails again, and is told, when it is timed."""
    began = time.perf_counter()
    if torch.cuda.is_available():
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            done = [pool.submit(_launched, place, way) for place, _, way, _ in tries]
            for one in done:
                one.exception()
        torch.cuda.synchronize()
    return time.perf_counter() - began


@torch.inference_mode()
def _launched(place: Place, way: Blocks) -> None:
    """On a stream of its own: tickets belong to a stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        place.call(way)()
    stream.synchronize()


def _norm(size: int, like: Tensor) -> RmsNorm:
    norm = RmsNorm(size, 1e-5, like=like).requires_grad_(False)
    norm.weight.fill_(1.0)
    return norm


def table(rows: list[Row]) -> Iterator[str]:
    """What is taken, torch's product, and the best cut, size by size."""
    sizes: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.get("sound"):
            key = tuple(row[n] for n in ("model", "product", "rows", "outputs", "inputs"))
            sizes.setdefault(key, []).append(row)
    yield (
        f"{'model':22}{'product':24}{'rows':>5}{'in use us':>11}{'torch us':>10}{'best us':>9}"
        f"{'share':>7}  best of the cuts"
    )
    for (model, product, number, *_), found in sizes.items():
        cuts = [row for row in found if row["way"] == "cut"]
        if not cuts:
            continue
        best = min(cuts, key=lambda row: float(row["us"]))
        today = {row["way"]: f"{row['us']:.1f}" for row in found if row["way"] != "cut"}
        yield (
            f"{model:22}{product:24}{number:5}{today.get('in use', '-'):>11}"
            f"{today.get('torch', '-'):>10}{best['us']:9.1f}{best['share_of_memory']:7.2f}  "
            f"{_tile_of(best)}, best of {len(cuts)}"
        )


def _tile_of(row: Row) -> Tile:
    return Tile(**{n: row[f"tile_{n}"] for n in Tile.__dataclass_fields__})


def main() -> None:
    """Sweep, and write what was found."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=[LLAMA, OWN])
    parser.add_argument("--rows", nargs="+", type=int, help="of so many rows alone")
    parser.add_argument("--products", nargs="+", help="those with one of these words in their name")
    asked, device = asked_of(parser, {"only": ["tiny"]})
    if torch.cuda.is_available():
        device = torch.device("cuda")  # there the kernels are compiled, for tiny sizes too
    dtype = torch.float32 if asked.tiny else torch.bfloat16
    report = Report.of("sweep_products.py", "cuts of products", device, asked)
    with torch.inference_mode():
        top = ceilings(device, tiny=asked.tiny)
        report.note(ceilings=top)
        places = [
            place
            for place in places_of(Bench(KERNELS, device, dtype, top), asked.only, asked.rows or ())
            if any(word in place.shape.name for word in asked.products or [""])
        ]
        sweep(places, report)
    for line in table(report.rows):
        sys.stderr.write(line + "\n")
    sys.exit(report.close())


if __name__ == "__main__":
    main()

"""How a round grows with context, with batch and with the tree, each beside its floor.

    python benchmarks/growth_gpu.py --out growth.json --plot docs/pictures/growth.svg
    python benchmarks/growth_gpu.py --only context --out context.json
    python benchmarks/growth_gpu.py --replot context.json batch.json --plot docs/pictures/growth.svg

A target of Llama-8B's sizes with random weights; keys and values are random too, since a prompt of
64k tokens need not be scored to be looked at. "plain" is a round of one row, "tree" one whose tree
is given and costs nothing to draft, "eagle3" one with a random head of EAGLE-3's sizes at its work.
Rounds are played as the engine plays them, recorded, the host included; what they accept is
forgotten, so that the length stays. The floor is that of the target's pass alone: all weights and
the keys of all tokens read once, or the arithmetic, whichever takes longer, at ceilings measured in
the same run. Milliseconds per token are those of a round over `--accept` + 1 tokens: acceptance is
assumed, and every row says so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from floors import Floor, floor_of, kv_bytes
from forced import Drive, Given, Sizes, built_of, median
from gpu_report import CannotRun, Report, asked_of, begin, parser_of
from gpu_timing import ceilings
from targets import SPECS, Target, target_of

from furcate.drafters.base import Drafter

CURVES = ("context", "batch", "nodes")
TIMES = 15  # rounds; the median counts


@dataclass(frozen=True)
class Point:
    """One of a curve."""

    curve: str
    context: int
    batch: int
    rows: int


@dataclass(frozen=True)
class Sweep:
    """What is gone through."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    rows: tuple[int, ...]
    usual: int  # context of the curves over batch and nodes
    tree: int  # rows of the curves over context
    small_tree: int  # rows of the curve over batch

    def points(self, curve: str) -> list[Point]:
        """Those of a curve; plain ones are the same at one row."""
        if curve == "context":
            return [Point(curve, n, 1, self.tree) for n in self.contexts]
        if curve == "batch":
            return [Point(curve, self.usual, n, self.small_tree) for n in self.batches]
        return [Point(curve, self.usual, 1, n) for n in self.rows]


LARGE = Sweep(
    contexts=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
    batches=(1, 2, 4, 8, 16, 32, 64),
    rows=(1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256),
    usual=2048,
    tree=64,
    small_tree=16,
)
SMALL = Sweep(contexts=(32, 48), batches=(1, 3), rows=(1, 4), usual=24, tree=8, small_tree=4)
DRAFTERS = {"context": ("off", "tree", "eagle3"), "batch": ("off", "tree"), "nodes": ("tree",)}


def rows_of(
    target: Target, curve: str, kind: str, sweep: Sweep, top: dict[str, float], accept: int
) -> Iterator[dict[str, Any]]:
    """A curve, the largest batch first; an engine serves all points of one batch."""
    points = sweep.points(curve)
    for batch in sorted({point.batch for point in points}, reverse=True):
        here = [point for point in points if point.batch == batch]
        nodes = max(1, max(point.rows for point in here) - 1)
        context = max(point.context for point in here) + 2 * nodes + 16
        sizes = Sizes(batch, context, nodes)
        drafter = _drafter(target, kind, sizes)
        built = built_of(target, drafter, sizes)
        _random_keys(built.round.target.cache.k_LSKD, built.round.target.cache.v_LSKD)
        for point in here:
            rows = 1 if kind == "off" else min(point.rows, built.round.most_nodes + 1)
            drive = Drive(built, sizes, point.context, scored=False)
            ms = median(drive.stand(rows, TIMES))
            emitted = 1 if kind == "off" or rows == 1 else min(accept, rows - 1) + 1
            spec, device = target.decoder.spec, Floor.of(top)
            floor = floor_of(spec, batch, point.context, rows, device)
            yield {
                "context": point.context,
                "batch": batch,
                "rows": rows,
                "ms_per_round": ms,
                "assumed_tokens_per_round": emitted,
                "ms_per_token": ms / emitted,
                "floor_ms": floor,
                "over_floor": ms / floor,
                "kv_gib": kv_bytes(spec, batch * point.context) / 2**30,
                "graphs": built.player.played.as_json()["refused"],
            }


def _drafter(target: Target, kind: str, sizes: Sizes) -> Drafter | str:
    if kind == "tree":
        return Given(sizes.batch, sizes.nodes, target.decoder.device)
    if kind == "eagle3":
        return target.drafter(kind, sizes.context + sizes.nodes + 1, sizes.batch)
    return kind


def _random_keys(*pools: torch.Tensor) -> None:
    """Zeros would be read faster, and tell nothing."""
    for pool_LSKD in pools:
        for layer_SKD in pool_LSKD:
            layer_SKD.normal_()


def plot(record: dict[str, Any], path: Path) -> None:
    """Milliseconds per round over context, batch and nodes, and the floors; whole or not at all."""
    if find_spec("matplotlib") is None:
        sys.stderr.write("no plot: matplotlib is not installed (pip install furcate[train])\n")
        return
    plt = import_module("matplotlib.pyplot")
    rows = [row for row in record["results"] if "failed" not in row]
    curves = [curve for curve in CURVES if any(row["curve"] == curve for row in rows)]
    if not curves:
        sys.stderr.write("no plot: nothing was measured\n")
        return
    figure, axes = plt.subplots(1, len(curves), figsize=(4.4 * len(curves), 4), squeeze=False)
    for ax, curve in zip(axes[0], curves, strict=True):
        _curve(ax, curve, [row for row in rows if row["curve"] == curve])
    axes[0][0].set_ylabel("milliseconds of a round")
    figure.suptitle(f"{record['target']}, random weights, bf16, {record['device']}", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".half-{path.name}")
    figure.savefig(half)
    half.replace(path)
    plt.close(figure)


def together(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Curves that were measured one by one, as one record; raises CannotRun where they are not."""
    kinds = {(one.get("target"), one.get("device")) for one in records}
    if len(kinds) > 1 or any("results" not in one for one in records):
        raise CannotRun("--replot: these are not curves of one target on one device")
    return {**records[0], "results": [row for one in records for row in one["results"]]}


def _curve(ax: Any, curve: str, rows: Sequence[dict[str, Any]]) -> None:
    across = {"context": "context", "batch": "batch", "nodes": "rows"}[curve]
    colors = {"off": "tab:blue", "tree": "tab:orange", "eagle3": "tab:green"}
    for kind, color in colors.items():
        own = sorted((r for r in rows if r["drafter"] == kind), key=lambda r: r[across])
        if not own:
            continue
        x = [r[across] for r in own]
        label = "plain" if kind == "off" else f"{kind}, {own[-1]['rows']} rows"
        label = kind if curve == "nodes" else label
        ax.plot(x, [r["ms_per_round"] for r in own], marker="o", ms=3, color=color, label=label)
        if kind != "eagle3":  # its pass is the tree's
            ax.plot(x, [r["floor_ms"] for r in own], ls="--", color=color, lw=1)
    ticks = sorted({row[across] for row in rows})
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [_tick(n) for n in ticks], fontsize=8)
    ax.set_ylim(bottom=0)
    ax.set_xlabel({"context": "tokens of context", "batch": "requests", "nodes": "rows"}[curve])
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, title="floor: dashed", title_fontsize=8)


def _tick(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 else str(count)


@torch.inference_mode()
def main() -> None:
    """Print one JSON object, and draw it."""
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="llama-8b", choices=list(SPECS))
    parser.add_argument("--only", nargs="+", default=list(CURVES), choices=CURVES)
    parser.add_argument("--accept", type=int, default=4, help="levels assumed to be right")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--replot", type=Path, nargs="+", help="draw what was measured before")
    if "--replot" in sys.argv:
        asked = parser.parse_args()
        if asked.plot is None:
            parser.error("--replot needs --plot, the picture's name")
        plot(together([json.loads(file.read_text()) for file in asked.replot]), asked.plot)
        return
    asked, device = asked_of(parser, {"shape": "tiny"})
    what = "rounds by context, batch and rows of the tree; medians of the wall clock"
    report = Report.of("growth_gpu.py", what, device, asked)
    top = ceilings(device, tiny=asked.tiny)
    report.note(**top, target=asked.shape, accept=asked.accept)
    target, sweep = target_of(asked.shape, device), SMALL if asked.tiny else LARGE
    for curve in asked.only:
        for kind in DRAFTERS[curve]:
            report.run(
                {"curve": curve, "drafter": kind},
                lambda curve=curve, kind=kind: rows_of(
                    target, curve, kind, sweep, top, asked.accept
                ),
            )
        if asked.plot is not None:  # after every curve: the next may be stopped
            plot(report.record(), asked.plot)
    sys.exit(report.close())


if __name__ == "__main__":
    begin(main)

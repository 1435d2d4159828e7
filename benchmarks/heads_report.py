"""Walks what `heads_walk.py` has recorded, and writes figures as JSON and a plot.

    python benchmarks/heads_report.py WALKS --out heads_walk.json --plot heads_walk.svg

Tokens per round count the bonus, and are tokens emitted over rounds of a walk, never the mean over
all roots. Intervals are 95 % bootstraps over prompts, drawn anew within their category.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from walks import Answers, at_depths, record_of

from furcate.files import write_json
from furcate.tune.walk import bootstrap, depth_rates, walk

NODES = (4, 8, 16, 32, 63, 128)
RESAMPLES = 2000
LOOPS = 0.3  # share of repeated 8-grams from which on an answer counts as looping


def main() -> None:
    """Write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("walks", type=Path, help="the folder that heads_walk.py wrote")
    parser.add_argument("--only", nargs="+", default=["*"], help="names of files, as patterns")
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    what = "tokens per round (bonus included) of trees by their nodes, walked over recorded answers"
    record = {**record_of(asked.walks, what), "settings": {}}
    for file in sorted({file for one in asked.only for file in asked.walks.glob(f"{one}_t*.npz")}):
        for depth, answers in at_depths(asked.walks, file.stem).items():
            record["settings"][f"{file.stem}_depth{depth}"] = _setting(answers, asked.nodes)
            record["answers"] = len(answers.each)
    write_json(asked.out, record)
    if asked.plot is not None:
        _plot(record, asked.plot)


def _setting(answers: Answers, nodes: list[int]) -> dict[str, Any]:
    """One drafter, temperature and depth, by number of nodes."""
    found: dict[str, Any] = {}
    for count in nodes:
        walks = answers.walked(count)
        steady = [walk(one.ranks_TD, count) for one in answers.each if not _loops(one.tokens)]
        every = [one for group in walks.values() for one in group]
        conditional, marginal, share = depth_rates(every)
        rng = np.random.default_rng(0)
        figures = {
            name: asdict(figure) for name, figure in bootstrap(walks, RESAMPLES, rng).items()
        }
        rest = bootstrap({"steady": steady}, RESAMPLES, rng)["steady"] if steady else None
        found[str(count)] = {
            "tokens_per_round": figures.pop("all"),
            "mean_over_categories": figures.pop("mean_over_categories"),
            "answers_that_do_not_loop": None if rest is None else asdict(rest),
            "by_category": figures,
            "conditional_acceptance_by_depth": conditional,
            "marginal_acceptance_by_depth": marginal,
            "share_of_tried_levels_held": share,
            "rounds": sum(one.rounds for one in every),
            "tokens": sum(one.tokens for one in every),
        }
    return found


def _loops(answer: list[int]) -> bool:
    grams = [tuple(answer[i : i + 8]) for i in range(len(answer) - 7)]
    return bool(grams) and 1 - len(set(grams)) / len(grams) > LOOPS


def _plot(record: dict[str, Any], path: Path) -> None:
    if find_spec("matplotlib") is None:
        sys.stderr.write("no plot: matplotlib is not installed (pip install furcate[train])\n")
        return
    plt = import_module("matplotlib.pyplot")
    figure, (by_nodes, by_depth) = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True)
    depths = _by_depth(record["settings"])
    drafters = sorted({name.partition("_t")[0] for name in depths})
    temperatures = sorted({name.split("_t")[1].split("_")[0] for name in depths}, key=float)
    for name, found in sorted(depths.items()):
        if "_" in name.split("_t")[1]:  # recorded in another manner: for comparisons
            continue
        drafter, _, temperature = name.partition("_t")
        shade = {
            "color": f"C{temperatures.index(temperature)}",
            "marker": "osD^vP*"[drafters.index(drafter) % 7],
            "markersize": 4,
        }
        setting = found[max(found)]
        sizes = [int(count) for count in setting]
        values = [one["tokens_per_round"] for one in setting.values()]
        by_nodes.plot(sizes, [v["value"] for v in values], label=_spoken(name), **shade)
        lows, highs = [v["low"] for v in values], [v["high"] for v in values]
        by_nodes.fill_between(sizes, lows, highs, alpha=0.12, color=shade["color"])
        for count in ("16", "63") if len(found) > 1 else ():
            across = [found[depth][count]["tokens_per_round"]["value"] for depth in sorted(found)]
            label = f"{_spoken(name)}, {count} nodes"
            line = "-" if count == "63" else "--"
            by_depth.plot(sorted(found), across, line, label=label, **shade)
    by_nodes.set_xscale("log", base=2)
    by_nodes.set_xticks(sizes, [str(size) for size in sizes])
    by_nodes.set_xlabel("drafted nodes (root excluded)")
    by_nodes.set_ylabel("tokens per round (bonus included)")
    by_depth.set_xlabel("levels of the tree")
    for axes in (by_nodes, by_depth):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:  # no file may have more than one depth
            axes.legend(fontsize=7, ncols=2, framealpha=0.5)
    figure.tight_layout()
    figure.savefig(path)


def _by_depth(settings: dict[str, Any]) -> dict[str, dict[int, Any]]:
    """Settings by file and depth."""
    found: dict[str, dict[int, Any]] = defaultdict(dict)
    for name, setting in settings.items():
        file, _, depth = name.rpartition("_depth")
        found[file][int(depth)] = setting
    return found


def _spoken(name: str) -> str:
    drafter, _, temperature = name.partition("_t")
    return f"{drafter}, T = {temperature}"


if __name__ == "__main__":
    main()

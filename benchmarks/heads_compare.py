"""Sets drafters side by side on the same answers: how many more tokens per round one of them has.

    python benchmarks/heads_compare.py WALKS --pair hybrid_t0 ngram_t0 eagle3_t0 \
        --pair eagle3_t1 eagle3_t1_uncoupled --out heads_compare.json

WALKS is the folder that `heads_walk.py` wrote; a pair names one of its files and those that it is
held against: by category against the best of them there. Intervals are 95 % bootstraps over
prompts, drawn anew within their category, the same for both sides.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from walks import deepest, record_of

from furcate.files import write_json
from furcate.tune.walk import gains, tokens_per_round

RESAMPLES = 2000


def main() -> None:
    """Write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("walks", type=Path)
    parser.add_argument("--pair", nargs="+", action="append", required=True, metavar="NAME")
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16, 32, 63, 128])
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    what = (
        "how many more tokens per round (a share) the first of each pair has, on the same answers"
    )
    record = record_of(asked.walks, what)
    record["pairs"] = [
        {"new": new, "against": olds, "nodes": _compared(asked.walks, new, olds, asked.nodes)}
        for new, *olds in asked.pair
    ]
    write_json(asked.out, record)


def _compared(folder: Path, new: str, olds: list[str], nodes: list[int]) -> dict[str, Any]:
    """By number of nodes, by category: the gain over the best of the others."""
    mine, others = deepest(folder, new), {old: deepest(folder, old) for old in olds}
    found: dict[str, Any] = {}
    for count in nodes:
        walks = mine.walked(count)
        over = {
            old: gains(walks, answers.walked(count), RESAMPLES, np.random.default_rng(0))
            for old, answers in others.items()
        }
        found[str(count)] = {}
        for category in [*sorted(walks), "all"]:
            best = min(over, key=lambda old, at=category: over[old][at].value)
            here = walks.get(category) or [one for group in walks.values() for one in group]
            found[str(count)][category] = {
                "tokens_per_round": tokens_per_round(here),
                "against": best,
                **asdict(over[best][category]),
            }
    return found


if __name__ == "__main__":
    main()

"""Sets drafters side by side on the same answers: how many more tokens per round one of them has.

    python benchmarks/heads_compare.py WALKS --pair hybrid_t0 ngram_t0 eagle3_t0 \
        --pair eagle3_t1 eagle3_t1_uncoupled --out heads_compare.json

WALKS is the folder that `heads_walk.py` wrote; a pair names one of its files and those that it is
held against: by category against the best of them there. Intervals are 95 % bootstraps over
prompts, drawn anew within their category, the same for both sides.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from walks import Answers, births, read_answers

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
    found = births(asked.walks)
    record: dict[str, Any] = {
        "what": "how many more tokens per round (a share) the first of each pair has, walked over "
        "the same recorded answers",
        **found[0],
        "recorded_by": [birth["command"] for birth in found],
        "command": "python " + " ".join(sys.argv),
        "pairs": [],
    }
    for new, *olds in asked.pair:
        others = {old: read_answers(asked.walks, old) for old in olds}
        one = _compared(read_answers(asked.walks, new), others, asked.nodes)
        record["pairs"].append({"new": new, "against": olds, "nodes": one})
    write_json(asked.out, record)


def _compared(new: Answers, olds: dict[str, Answers], nodes: list[int]) -> dict[str, Any]:
    """By number of nodes, by category: the gain over the best of the others."""
    found: dict[str, Any] = {}
    for count in nodes:
        walks = new.walks(lambda answer, n=count: answer.walked(n))
        others = {
            name: answers.walks(lambda answer, n=count: answer.walked(n))
            for name, answers in olds.items()
        }
        over = {
            name: gains(walks, other, RESAMPLES, np.random.default_rng(0))
            for name, other in others.items()
        }
        found[str(count)] = {}
        for category in [*sorted(walks), "all"]:
            best = min(over, key=lambda name, at=category: over[name][at].value)
            mine = walks.get(category) or [one for group in walks.values() for one in group]
            found[str(count)][category] = {
                "tokens_per_round": tokens_per_round(mine),
                "against": best,
                **asdict(over[best][category]),
            }
    return found


if __name__ == "__main__":
    main()

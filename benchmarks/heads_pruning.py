"""What leaving nodes out saves: value thresholds, gates by entropy, and a budget for a whole batch.

    python benchmarks/heads_pruning.py WALKS --names eagle3_t0 eagle3_t1 --gated eagle3_t0_gate \
        --out heads_pruning.json

WALKS is the folder that `heads_walk.py --values` wrote. A threshold drops nodes whose calibrated
value is below it; `--gated` names files that were recorded with pruning on, beside the plain ones
of the same drafter. `levels` are those down to the deepest drafted node, behind which a drafter
could stop. Where a batch shares its budget, every round drafts the most valuable nodes of all.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from walks import Answer, Answers, births, read_answers

from furcate.files import write_json
from furcate.tune.walk import Walk, gains, tokens_per_round, walk, walk_together

RESAMPLES = 2000
LEAST = (0.0, 0.005, 0.01, 0.02, 0.05)


def main() -> None:
    """Write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("walks", type=Path)
    parser.add_argument("--names", nargs="+", required=True)
    parser.add_argument("--gated", nargs="*", default=[])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 63])
    parser.add_argument("--batch", type=int, default=8, help="answers that share a budget")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    found = births(asked.walks)
    rows: list[dict[str, Any]] = []
    for name in asked.names:
        answers = read_answers(asked.walks, name)
        for nodes in asked.nodes:
            full = answers.walks(lambda answer, n=nodes: walk(answer.ranks_TD, n))
            for least in LEAST:
                rows.append({"walk": name, **_pruned(answers, full, nodes, least)})
            for gated in (one for one in asked.gated if one.startswith(name + "_")):
                pruned = _pruned(read_answers(asked.walks, gated), full, nodes, 0.0)
                rows.append({"walk": gated, **pruned})
            rows.append({"walk": name, **_shared(answers, full, nodes, asked.batch)})
    record = {
        "what": "nodes and levels that pruning leaves out, and tokens per round (bonus included)",
        **found[0],
        "recorded_by": [birth["command"] for birth in found],
        "command": "python " + " ".join(sys.argv),
        "results": rows,
    }
    write_json(asked.out, record)


def _pruned(
    answers: Answers, full: dict[str, list[Walk]], nodes: int, least: float
) -> dict[str, Any]:
    """Trees of at most `nodes` nodes without those below `least`, beside whole ones."""
    drafted, levels, rounds = 0, 0, 0

    def cut(answer: Answer) -> Walk:
        nonlocal drafted, levels, rounds
        assert answer.values_TK is not None and answer.levels_TK is not None
        live_TK = (answer.values_TK > 0) & (answer.values_TK >= least)
        live_TK[:, nodes:] = False
        one = walk(answer.ranks_TD, live_TK.sum(1))
        drafted += int(live_TK[one.roots_R].sum())
        levels += int((answer.levels_TK * live_TK)[one.roots_R].max(1).sum())
        rounds += one.rounds
        return one

    walks = answers.walks(cut)
    over = gains(walks, full, RESAMPLES, np.random.default_rng(0))["all"]
    return {
        "nodes": nodes,
        "value_threshold": least,
        "tokens_per_round": tokens_per_round([one for group in walks.values() for one in group]),
        "over_whole_trees": asdict(over),
        "drafted_nodes_a_round": drafted / rounds,
        "levels_a_round": levels / rounds,
    }


def _shared(
    answers: Answers, full: dict[str, list[Walk]], nodes: int, batch: int
) -> dict[str, Any]:
    """Batches that share `nodes` nodes for each request, beside requests with `nodes` of their own.

    Batches mix categories: every n-th answer is in the same one.
    """
    each = answers.each
    walks: list[Walk] = [None] * len(each)  # type: ignore[list-item]
    groups = -(-len(each) // batch)
    for first in range(groups):
        here = list(range(first, len(each), groups))
        pairs = []
        for at in here:
            values_TK = each[at].values_TK
            assert values_TK is not None
            pairs.append((each[at].ranks_TD, values_TK))
        for at, one in zip(here, walk_together(pairs, nodes), strict=True):
            walks[at] = one
    told = iter(walks)
    together = answers.walks(lambda _: next(told))
    over = gains(together, full, RESAMPLES, np.random.default_rng(0))["all"]
    return {
        "nodes": nodes,
        "batch_shares_its_budget": batch,
        "tokens_per_round": tokens_per_round(walks),
        "over_whole_trees": asdict(over),
    }


if __name__ == "__main__":
    main()

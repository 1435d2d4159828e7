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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from walks import Answer, Answers, deepest, record_of

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
    rows: list[dict[str, Any]] = []
    for name in asked.names:
        answers = deepest(asked.walks, name)
        for nodes in asked.nodes:
            full = answers.walked(nodes)
            for least in LEAST:
                rows.append({"walk": name, **_pruned(answers, full, nodes, least)})
            for gated in (one for one in asked.gated if one.startswith(name + "_")):
                pruned = _pruned(deepest(asked.walks, gated), full, nodes, 0.0)
                rows.append({"walk": gated, **pruned})
            rows.append({"walk": name, **_shared(answers, full, nodes, asked.batch)})
    what = "nodes and levels that pruning leaves out, and tokens per round (bonus included)"
    write_json(asked.out, {**record_of(asked.walks, what), "results": rows})


def _pruned(
    answers: Answers, full: dict[str, list[Walk]], nodes: int, least: float
) -> dict[str, Any]:
    """Trees of at most `nodes` nodes without those below `least`, beside whole ones."""
    live = [_live(answer, nodes, least) for answer in answers.each]
    walks = [
        walk(answer.ranks_TD, live_TK.sum(1))
        for answer, live_TK in zip(answers.each, live, strict=True)
    ]
    drafted = levels = 0
    for answer, live_TK, one in zip(answers.each, live, walks, strict=True):
        assert answer.levels_TK is not None
        drafted += int(live_TK[one.roots_R].sum())
        levels += int((answer.levels_TK * live_TK)[one.roots_R].max(1).sum())
    rounds = sum(one.rounds for one in walks)
    return {
        "nodes": nodes,
        "value_threshold": least,
        "tokens_per_round": tokens_per_round(walks),
        "over_whole_trees": _over(answers.by_category(walks), full),
        "drafted_nodes_a_round": drafted / rounds,
        "levels_a_round": levels / rounds,
    }


def _live(answer: Answer, nodes: int, least: float) -> np.ndarray:
    """Which of each root's best nodes are drafted, bool [T, K]."""
    assert answer.values_TK is not None
    live_TK: np.ndarray = (answer.values_TK > 0) & (answer.values_TK >= least)
    live_TK[:, nodes:] = False
    return live_TK


def _shared(
    answers: Answers, full: dict[str, list[Walk]], nodes: int, batch: int
) -> dict[str, Any]:
    """Batches that share `nodes` nodes for each request, beside requests with `nodes` of their own.

    Batches mix categories: every n-th answer is in the same one.
    """
    groups = -(-len(answers.each) // batch)
    found: dict[int, Walk] = {}
    for first in range(groups):
        here = range(first, len(answers.each), groups)
        pairs = []
        for at in here:
            values_TK = answers.each[at].values_TK
            assert values_TK is not None
            pairs.append((answers.each[at].ranks_TD, values_TK))
        found |= dict(zip(here, walk_together(pairs, nodes), strict=True))
    walks = [found[at] for at in range(len(answers.each))]
    return {
        "nodes": nodes,
        "batch_shares_its_budget": batch,
        "tokens_per_round": tokens_per_round(walks),
        "over_whole_trees": _over(answers.by_category(walks), full),
    }


def _over(walks: dict[str, list[Walk]], full: dict[str, list[Walk]]) -> dict[str, float]:
    return asdict(gains(walks, full, RESAMPLES, np.random.default_rng(0))["all"])


if __name__ == "__main__":
    main()

"""The shape that trees grow in: how each level branches and who goes on, as constants.

Legend: F frontier rows, C children of a row, X = F * C candidates of a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from furcate.tree.topology import Topology

__all__ = ["Plan", "Step", "cut", "depths", "dynamic", "static"]

# Levels worth choosing between: the best number earns little more than its neighbour, and every one
# that is played is a recording more
_LADDER = (2, 4, 6, 8, 12, 16, 24, 32, 48)


@dataclass(frozen=True, slots=True)
class Step:
    """One level. Candidate c of frontier row f is number f * children + c."""

    children: int  # C
    candidates: int  # X
    rows: int  # frontier rows of the next level; 0: there is none
    pick_F: Tensor | None = None  # int64, the candidates that go on; None: the most valuable
    kept_X: Tensor | None = None  # bool, candidates that belong to the tree; None: all


Plan = tuple[Step, ...]


def dynamic(depth: int, width: int, children: int) -> Plan:
    """EAGLE-2's growth (arXiv:2406.16858, section 4.1): the best `width` of each level go on."""
    steps, rows = [], 1
    for d in range(depth):
        candidates = rows * children
        rows = 0 if d == depth - 1 else min(width, candidates)
        steps.append(Step(children, candidates, rows))
    return tuple(steps)


def depths(plan: Plan) -> tuple[int, ...]:
    """How many of its levels may be drafted, ascending; a tree of fixed ranks is drafted whole."""
    if any(step.pick_F is not None for step in plan):
        return (len(plan),)
    return (*(levels for levels in _LADDER if 4 * levels <= 3 * len(plan)), len(plan))


def cut(plan: Plan, levels: int) -> Plan:
    """The first `levels` of it: the plan of a drafter of that depth."""
    if levels == len(plan):
        return plan
    return (*plan[: levels - 1], replace(plan[levels - 1], rows=0))


def static(tree: Topology, device: torch.device) -> Plan:
    """Medusa's growth (arXiv:2401.10774, section 3.2): ranks are fixed, whatever they are worth."""
    steps: list[Step] = []
    level = [0]
    while level:
        below = [tree.children[up] for up in level]
        steps.append(_step(tree, below, device))
        level = [row for rows in below for row in rows if tree.children[row]]
    return tuple(steps)


def _step(tree: Topology, below: Sequence[Sequence[int]], device: torch.device) -> Step:
    children = 1 + max(tree.rank[row] for rows in below for row in rows)
    place = {row: f * children + tree.rank[row] for f, rows in enumerate(below) for row in rows}
    kept_X = torch.zeros(len(below) * children, dtype=torch.bool)
    kept_X[list(place.values())] = True
    going_on = [at for row, at in place.items() if tree.children[row]]
    return Step(
        children=children,
        candidates=len(kept_X),
        rows=len(going_on),
        pick_F=torch.tensor(going_on, dtype=torch.int64, device=device),
        kept_X=kept_X.to(device),
    )

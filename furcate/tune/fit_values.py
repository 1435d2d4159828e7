"""Fits the map from a node's value to how often such nodes are accepted, from nodes of replays.

Legend: B roots, P pool nodes, K cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.tree.calibration import BINS, Bin, ValueMap, fit_value_map

__all__ = ["Tally", "fit_values"]

CELLS = 768
LOWEST = 1e-7  # value of the lowest cell; nodes below count there
MOST = BINS - 1  # and one knot for the root, which is certain


@dataclass(frozen=True, slots=True)
class Tally:
    """Nodes in narrow cells of their value, evenly spaced in its logarithm; all float64."""

    nodes_K: Tensor
    value_K: Tensor  # sums
    on_K: Tensor  # how many stood on the target's path

    @classmethod
    def empty(cls) -> Tally:
        """No node yet."""
        return cls(*(torch.zeros(CELLS, dtype=torch.float64) for _ in range(3)))

    def add(self, log_value_X: Tensor, on_X: Tensor) -> None:
        """Count nodes, in place; those of value 0 are none."""
        live_X = log_value_X > -torch.inf
        log_value_X, on_X = log_value_X[live_X].double().cpu(), on_X[live_X].double().cpu()
        step = -math.log(LOWEST) / CELLS
        cell_X = (CELLS + (log_value_X / step).floor().long()).clamp(0, CELLS - 1)
        for sum_K, each_X in (
            (self.nodes_K, torch.ones_like(on_X)),
            (self.value_K, log_value_X.exp()),
            (self.on_K, on_X),
        ):
            sum_K.index_add_(0, cell_X, each_X)

    @property
    def accepted(self) -> float:
        """How many stood on the target's path."""
        return float(self.on_K.sum())

    def expected(self, values: ValueMap) -> float:
        """How many a map expects there; the root is worth 1 to a tree, whatever the map says."""
        pairs: Iterable[tuple[float, float]] = zip(
            self.nodes_K.tolist(), self.value_K.tolist(), strict=True
        )
        mapped = (nodes * values(min(1.0, sum_ / nodes)) for nodes, sum_ in pairs if nodes)
        return math.fsum(mapped) / values(1.0)


def fit_values(tally: Tally, roots: int) -> ValueMap:
    """The monotone map under which bins of nodes are accepted as often as it says.

    Each bin holds about the same share of all expected acceptances, so that none matters more to a
    tree than another, and one imagined node on which the drafter was right, so that no value
    becomes 0. The root is a node that is always right.
    """
    filled_K = tally.nodes_K > 0
    nodes_K, value_K, on_K = (x[filled_K] for x in (tally.nodes_K, tally.value_K, tally.on_K))
    if not len(nodes_K):
        return ValueMap()
    share_K = (value_K.cumsum(0) - value_K / 2) / value_K.sum()
    bin_K = (share_K * MOST).long().clamp(0, MOST - 1)
    bins = []
    for number in sorted(set(bin_K.tolist())):
        at_K = bin_K == number
        nodes, value, on = (float(x[at_K].sum()) for x in (nodes_K, value_K, on_K))
        bins.append(Bin(value / nodes, (on + value / nodes) / (nodes + 1), nodes + 1))
    return fit_value_map([*(b for b in bins if b.estimate < 1), Bin(1.0, 1.0, float(roots))])

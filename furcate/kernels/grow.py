"""What one level of a growing tree is made of; the torch reference is `furcate.drafters.expand`.

Legend: B requests, F frontier rows, D draft vocabulary, C children of a row, X = F * C candidates
of a level, N the root and the frontier nodes of all levels so far, K bins of weights or knots of a
map.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from furcate.kernels.draft import Draft, Proposal, Verdict

__all__ = [
    "BINS",
    "DECAY",
    "HIGHEST",
    "PRIOR_WEIGHT",
    "STEPS",
    "Frontier",
    "Grow",
    "Likeliest",
    "Place",
    "Tally",
    "Trees",
    "Yardstick",
    "bin_of",
    "corrected",
    "noted",
    "ratios",
]

BINS = 16
STEPS = 1 << 16  # a tag holds the weight in this many steps
PRIOR_WEIGHT = 16.0  # expected acceptances for which "the weights are right" stands
DECAY = 0.98  # of the counts, per round
HIGHEST = 0.995  # so that a child's value stays strictly below its parent's


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The best children of each row, best first."""

    word_BFC: Tensor  # int64, draft ids
    weight_BFC: Tensor  # float32, log P(the target chooses it below this row)
    entropy_BF: Tensor | None  # float32, of a row's whole law, in nats; None: not asked for


@dataclass(frozen=True, slots=True)
class Frontier:
    """The rows whose children come next. `index` is -1 at the root."""

    tokens_BF: Tensor  # int64
    value_BF: Tensor  # float32, log
    plain_BF: Tensor  # float32, log, the product of the weights on the path
    index_BF: Tensor  # int64, place in the pool
    row_BF: Tensor  # int64, place of the parent in the frontier before
    seen_BFN: Tensor  # bool, nodes on the row's own path, the root and itself included
    at_BF: Tensor | None = None  # int64, positions; None: not computed
    below_BF: Tensor | None = None  # int64, positions of their children; None likewise


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What candidates are measured by: the learned and fitted numbers, and what is pruned."""

    token_D: Tensor | None  # int64, the target's id of each draft id; None: they are the same
    knots: tuple[Tensor, Tensor] | None  # float32 [K] each, estimated and empirical; None: no map
    expected_K: Tensor  # float32, acceptances by bins of weight
    accepted_K: Tensor  # float32
    kappa: float | None = None  # as in `Pruning`
    gamma: float | None = None
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a level stands, known before any round."""

    depth: int  # of its candidates: 1..
    begin: int  # place of its first candidate in the pool
    rows: int  # frontier rows of the next level; 0: there is none
    pick_F: Tensor | None  # int64, the candidates that go on; None: the most valuable
    kept_X: Tensor | None  # bool, candidates that belong to the tree; None: all


@dataclass(frozen=True, slots=True)
class Trees:
    """The trees of a round: their pool, written level by level, and where they hang."""

    pool: Proposal  # with tags
    length_B: Tensor  # int64, positions of the roots


Grow = Callable[[Likeliest, Frontier | None, Yardstick, Place, Trees], Frontier | None]
"""Writes one level's candidates into the pool and gives the next frontier, None if there is none.

A frontier of None is the root's. One row of children serves all rows of the frontier (Medusa).
"""

Tally = Callable[[Draft, Verdict, Tensor, int, tuple[Tensor, Tensor]], None]
"""(draft with tags, verdict, slot_B, the dummy's slot, expected and accepted by bins): counts one
round in place, once what was counted before has decayed."""


def noted(log_weight: Tensor, kind: Tensor | int = 0) -> Tensor:
    """A node's weight and kind as a whole number, its tag: int64, the same shape."""
    return (log_weight.exp() * (STEPS - 1)).long() + kind * STEPS


def bin_of(tag: Tensor) -> Tensor:
    """The bin that counts nodes of such a tag; kinds have bins of their own."""
    return tag * BINS // STEPS


def corrected(log_weight: Tensor, tag: Tensor, counts: tuple[Tensor, Tensor]) -> Tensor:
    """log of the calibrated probability that a node is accepted, given that its parent is.

    `counts`: float32 [K] each, expected and accepted by bins; 0 until something is learned.
    """
    return (log_weight + ratios(counts).log()[bin_of(tag)]).clamp_max(math.log(HIGHEST))


def ratios(counts: tuple[Tensor, Tensor]) -> Tensor:
    """Factor on the weights of each bin, float32 [K]."""
    expected_K, accepted_K = counts
    return (PRIOR_WEIGHT + accepted_K) / (PRIOR_WEIGHT + expected_K)

"""Walks recorded streams: which rounds a drafter would have had, and what they emitted.

Legend: T positions of an answer, one root each; D levels; S resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "Figure",
    "Walk",
    "bootstrap",
    "depth_rates",
    "gains",
    "tokens_per_round",
    "walk",
    "walk_together",
]

Ranks = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Walk:
    """What one answer took: `tokens` emitted in `rounds` rounds, bonus tokens included."""

    tokens: int
    tried_D: npt.NDArray[np.int64]  # rounds in which depth d + 1 could be tried
    held_D: npt.NDArray[np.int64]  # and in which the tree held the target's token there
    roots_R: npt.NDArray[np.int64]  # where its rounds began

    @property
    def rounds(self) -> int:
        """How many there were."""
        return len(self.roots_R)


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean with its 95 % interval over resampled prompts."""

    value: float
    low: float
    high: float


def walk(ranks_TD: Ranks, nodes: int | Ranks) -> Walk:
    """Play the rounds of an answer with trees of `nodes` nodes, or of as many as each root has.

    Root t stands before token t of the answer; `ranks_TD[t, d]` is the rank that the node of token
    t + d has in the tree below it. A round at root t emits the accepted nodes and one token more,
    never past the end: the emitted tokens over the rounds are tokens per round, bonus included.
    The mean over all roots would be larger, since a walk meets hard positions more often.
    """
    total, depth = ranks_TD.shape
    held_TD = ranks_TD < np.reshape(nodes, (-1, 1))
    accepted_T = np.cumprod(held_TD, axis=1).sum(1)
    tried_D, was_held_D = np.zeros(depth, np.int64), np.zeros(depth, np.int64)
    at, roots = 0, []
    while at < total:
        accepted = int(accepted_T[at])
        room = total - at  # levels that have a token to hold
        tried_D[: min(accepted + 1, depth, room)] += 1
        was_held_D[:accepted] += 1
        roots.append(at)
        at += accepted + 1
    return Walk(total, tried_D, was_held_D, np.array(roots, dtype=np.int64))


def walk_together(
    answers: Sequence[tuple[Ranks, npt.NDArray[np.floating]]], nodes: int
) -> list[Walk]:
    """Play answers side by side, whose trees share `nodes` nodes for each that is still going on.

    Args:
        answers: of each its ranks [T, D] and the values of its roots' best nodes, descending
            [T, K]; in every round the most valuable nodes of all trees are drafted.
    """
    budgets = [np.zeros(len(ranks_TD), np.int64) for ranks_TD, _ in answers]
    accepted = [0] * len(answers)
    while going := [a for a, (ranks_TD, _) in enumerate(answers) if accepted[a] < len(ranks_TD)]:
        value_AK = np.stack([answers[a][1][accepted[a]] for a in going])
        count = min(nodes * len(going), value_AK.size)
        least = np.partition(value_AK, -count, axis=None)[-count]
        # nodes of equal value at the edge: the first trees take them
        share_A = (value_AK > least).sum(1)
        edge_A, left = (value_AK == least).sum(1), count - int(share_A.sum())
        share_A += np.clip(left - (edge_A.cumsum() - edge_A), 0, edge_A)
        for a, share in zip(going, share_A, strict=True):
            at = accepted[a]
            budgets[a][at] = share
            held_D = answers[a][0][at] < share
            accepted[a] += 1 + int(np.cumprod(held_D).sum())
    return [walk(ranks, budget) for (ranks, _), budget in zip(answers, budgets, strict=True)]


def tokens_per_round(walks: Sequence[Walk]) -> float:
    """Sum of tokens over sum of rounds, bonus included."""
    return sum(w.tokens for w in walks) / sum(w.rounds for w in walks)


def depth_rates(walks: Sequence[Walk]) -> tuple[list[float], list[float], float]:
    """(conditional acceptance by depth, marginal by depth, share of tried levels that held).

    Conditional: of the rounds in which all earlier levels held. Marginal: of all rounds. The share
    counts each level that was put to the test once: a round that accepts a nodes tries a + 1
    levels, unless the tree or the answer ends there.
    """
    tried_D = np.sum([w.tried_D for w in walks], axis=0)
    held_D = np.sum([w.held_D for w in walks], axis=0)
    rounds = sum(w.rounds for w in walks)
    conditional = [float(h / t) for h, t in zip(held_D, tried_D, strict=True) if t]
    return conditional, [float(h / rounds) for h in held_D], float(held_D.sum() / tried_D.sum())


def bootstrap(
    walks: Mapping[str, Sequence[Walk]], resamples: int, rng: np.random.Generator
) -> dict[str, Figure]:
    """Tokens per round by category, over all prompts ("all"), and the mean over categories.

    Prompts are drawn anew within their category, so that every resample has all categories.
    """
    names = sorted(walks)
    counts = {n: np.array([(w.tokens, w.rounds) for w in walks[n]], dtype=float) for n in names}
    drawn = {
        name: counts[name][rng.integers(0, len(c), (resamples, len(c)))].sum(1)
        for name, c in counts.items()
    }
    figures = {name: _figure(_rate(counts[name].sum(0)), _rate(drawn[name])) for name in names}
    every = _rate(sum(c.sum(0) for c in counts.values())), _rate(sum(drawn.values()))
    figures["all"] = _figure(*every)
    by_category_S = np.mean([_rate(drawn[name]) for name in names], axis=0)
    value = float(np.mean([_rate(counts[name].sum(0)) for name in names]))
    figures["mean_over_categories"] = _figure(value, by_category_S)
    return figures


def gains(
    walks: Mapping[str, Sequence[Walk]],
    others: Mapping[str, Sequence[Walk]],
    resamples: int,
    rng: np.random.Generator,
) -> dict[str, Figure]:
    """How many more tokens per round `walks` have than `others`, as a share: 0.1 is 10 % more.

    By category and over all prompts ("all"). The two walk the same answers in the same order, and
    a resample draws the same prompts for both, so that what prompts have in common cancels out.
    """
    found, sums = {}, []
    for name in sorted(walks):
        pair = [
            np.array([(w.tokens, w.rounds) for w in side[name]], dtype=float)
            for side in (walks, others)
        ]
        pick_SX = rng.integers(0, len(pair[0]), (resamples, len(pair[0])))
        drawn = [counts[pick_SX].sum(1) for counts in pair]
        whole = [counts.sum(0) for counts in pair]
        found[name] = _figure(_gain(whole), _gain(drawn))
        sums.append((whole, drawn))
    whole, drawn = ([sum(one[i][k] for one in sums) for k in (0, 1)] for i in (0, 1))
    found["all"] = _figure(_gain(whole), _gain(drawn))
    return found


def _gain(pair: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    return _rate(pair[0]) / _rate(pair[1]) - 1


def _rate(counts_X2: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    rate: npt.NDArray[np.float64] = counts_X2[..., 0] / counts_X2[..., 1]
    return rate


def _figure(value: float | npt.NDArray[np.float64], drawn_S: npt.NDArray[np.float64]) -> Figure:
    low, high = np.quantile(drawn_S, [0.025, 0.975])
    return Figure(float(value), float(low), float(high))

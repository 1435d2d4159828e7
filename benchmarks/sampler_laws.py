"""Exact laws of sampling, and chi-square tests of counts against them.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

__all__ = ["LAWS", "Case", "p_value"]

BUCKETS = 512
ROUNDING = 5e-6  # of a sum in float32
LAWS: dict[str, tuple[float, dict[str, float]]] = {
    "greedy": (0.0, {}),
    "temperature": (1.1, {}),
    "top_k": (1.1, {"top_k": 20}),
    "top_p": (1.1, {"top_p": 0.9}),
    "min_p": (1.1, {"min_p": 0.02}),
    "all": (0.9, {"top_k": 50, "top_p": 0.95, "min_p": 0.01}),
}


@dataclass(frozen=True)
class Case:
    """One law."""

    vocab: int
    temperature: float
    filters: dict[str, float] = field(default_factory=dict)

    @property
    def logits_V(self) -> Tensor:
        """Far from flat."""
        rng = torch.Generator().manual_seed(self.vocab)
        return torch.randn(self.vocab, generator=rng) * 1.7

    def probabilities(self, temperature: float) -> np.ndarray:
        """In float64, filter after filter; ties at a threshold stay."""
        if temperature == 0:
            return np.eye(self.vocab)[int(self.logits_V.argmax())]
        score_V, kept_V = self._best(temperature)
        if "top_p" in self.filters:
            kept_V &= _before(score_V, kept_V) < self.filters["top_p"]
        if "min_p" in self.filters:
            kept_V &= score_V >= score_V.max() + np.log(self.filters["min_p"])
        return _softmax(score_V, kept_V)

    def p_value(self, counts_V: np.ndarray, law_V: np.ndarray) -> float:
        """Of the tokens that rounding cannot put on the other side of top_p's border."""
        sure_V = np.ones(self.vocab, dtype=bool)
        if "top_p" in self.filters:
            mass_V = _before(*self._best(self.temperature))
            sure_V = np.abs(mass_V - self.filters["top_p"]) > ROUNDING
        return p_value(counts_V[sure_V], law_V[sure_V] / law_V[sure_V].sum())

    def wrong(self, times: float) -> np.ndarray:
        """A law that counts should speak against: too warm, or sure of the second best token."""
        if self.temperature == 0:
            return np.eye(self.vocab)[int(self.logits_V.topk(2).indices[1])]
        return self.probabilities(self.temperature * times)

    def _best(self, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """(scores, which of them top_k keeps)."""
        score_V = self.logits_V.double().numpy() / temperature
        count = int(self.filters.get("top_k", self.vocab))
        return score_V, score_V >= np.sort(score_V)[-min(count, self.vocab)]


def _before(score_V: np.ndarray, kept_V: np.ndarray) -> np.ndarray:
    """The probability of all likelier tokens."""
    chance_V = _softmax(score_V, kept_V)
    order = np.argsort(-chance_V)
    mass_V = np.empty_like(chance_V)
    mass_V[order] = np.cumsum(chance_V[order]) - chance_V[order]
    return mass_V


def _softmax(score_V: np.ndarray, kept_V: np.ndarray) -> np.ndarray:
    weight_V = np.where(kept_V, np.exp(score_V - score_V.max()), 0.0)
    return np.asarray(weight_V / weight_V.sum())


def p_value(counts_V: np.ndarray, law_V: np.ndarray) -> float:
    """Of a chi-square test; 0 where a token of probability 0 was drawn.

    Many tokens are put into buckets of equal probability, likeliest first; bins that expect fewer
    than 5 are taken together.
    """
    if counts_V[law_V == 0].any():
        return 0.0
    order = np.argsort(-law_V)
    counts_V, law_V = counts_V[order].astype(float), law_V[order]
    if len(law_V) > BUCKETS:
        bucket = np.minimum((np.cumsum(law_V) * BUCKETS).astype(int), BUCKETS - 1)
        counts_V, law_V = (np.bincount(bucket, x, BUCKETS) for x in (counts_V, law_V))
    expected = law_V * counts_V.sum()
    small = expected < 5
    counts_V, expected = (np.append(x[~small], x[small].sum()) for x in (counts_V, expected))
    counts_V, expected = counts_V[expected > 0], expected[expected > 0]
    distance = float(((counts_V - expected) ** 2 / expected).sum())
    survival: Callable[[float, int], float] = import_module("scipy.stats").chi2.sf
    return float(survival(distance, max(len(counts_V) - 1, 1)))

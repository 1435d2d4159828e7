"""Chance for the comparison rules: uniform coins, each used once, and draws from a law.

Legend: V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from furcate.kernels.philox import MASK, Counter, philox
from furcate.verify.noise import uniform

__all__ = ["Coins", "RoundCoins", "draw_at", "residual"]


class Coins(Protocol):
    """The coins of one round, each named by its stream and index.

    A name stands for one number in [0, 1]: asked twice it gives the same, so a rule that shared a
    name between two decisions would be wrong.
    """

    def below(self, stream: int, index: int, probability: float) -> bool:
        """Whether the coin is strictly below `probability`."""
        ...

    def draw(self, stream: int, index: int, law_V: Tensor) -> int:
        """The token at which the coin cuts the cumulative law, which need not sum to 1; never a
        token of probability 0."""
        ...


@dataclass(frozen=True, slots=True)
class RoundCoins:
    """Coins from the counter-based generator, keyed by the absolute position of the round's root.

    Every round commits a token, so no two rounds of a request have the same root position. (Keyed
    by the position that a coin decides, a coin could come back in the next round.)
    """

    seed: int  # 64 bits
    root: int  # absolute position
    choice: int = 0

    def below(self, stream: int, index: int, probability: float) -> bool:
        return self._coin(stream, index) < probability

    def draw(self, stream: int, index: int, law_V: Tensor) -> int:
        return draw_at(law_V, self._coin(stream, index))

    def _coin(self, stream: int, index: int) -> float:
        counter = Counter(*torch.tensor([index >> 2, self.root, stream, self.choice]))
        key_0, key_1 = torch.tensor([self.seed & MASK, self.seed >> 32])
        return float(uniform(philox(counter, key_0, key_1)[index & 3]))


def draw_at(law_V: Tensor, coin: float) -> int:
    """The first token whose cumulative probability exceeds the coin's share of the total.

    Tokens of probability 0 are never drawn, not even at coin 0 or 1.
    """
    total_V = law_V.cumsum(0)
    token = int(torch.searchsorted(total_V, total_V[-1:] * coin, right=True))
    last = int(law_V.nonzero()[-1])
    return min(token, last)


def residual(law_V: Tensor, taken_V: Tensor) -> Tensor:
    """(law - taken)+, renormalised: what is left to draw once `taken` has had its chance.

    Where nothing is left, rejection had probability 0 and only rounding can have led here; the law
    itself is then the answer that emits no impossible token.
    """
    left_V = (law_V - taken_V).clamp_min(0)
    mass = left_V.sum()
    return torch.where(mass > 0, left_V / mass, law_V)

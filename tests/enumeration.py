"""Exact enumeration: every outcome of a rule with its probability, in float64.

A rule sees `Coins`; `ExactCoins` plays one branch of every decision and `outcomes` walks all
branches. A coin keeps the interval it is known to lie in, so a rule that uses one coin for two
decisions is enumerated as exactly as a right one. Legend: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

Path = tuple[int, ...]
Outcome = tuple[float, Path]


class ExactCoins:
    """The coins of one branch; `script` says which way the first decisions go."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = script
        self.taken: list[int] = []
        self.open: list[int] = []  # decisions' number of ways
        self.weight = 1.0
        self._known: dict[tuple[int, ...], tuple[float, float]] = {}

    def round(self, root: int) -> RoundOfCoins:
        return RoundOfCoins(self, root)

    def cut(self, key: tuple[int, ...], bounds: list[float]) -> int:
        """Which of the intervals between rising `bounds` (from 0 to 1) the coin lies in."""
        low, high = self._known.get(key, (0.0, 1.0))
        edges = [min(max(b, low), high) for b in bounds]
        ways = [i for i in range(len(edges) - 1) if edges[i + 1] > edges[i]]
        turn = 0
        if len(ways) > 1:
            turn = self.script[len(self.taken)] if len(self.taken) < len(self.script) else 0
            self.taken.append(turn)
            self.open.append(len(ways))
        way = ways[turn]
        self.weight *= (edges[way + 1] - edges[way]) / (high - low)
        self._known[key] = (edges[way], edges[way + 1])
        return way


@dataclass(frozen=True)
class RoundOfCoins:
    """`Coins` named by (round, stream, index)."""

    coins: ExactCoins
    root: int

    def name(self, stream: int, index: int) -> tuple[int, ...]:
        return (self.root, stream, index)

    def below(self, stream: int, index: int, probability: float) -> bool:
        return self.coins.cut(self.name(stream, index), [0.0, min(probability, 1.0), 1.0]) == 0

    def draw(self, stream: int, index: int, law_V: Tensor) -> int:
        law = law_V.tolist()
        total = math.fsum(law)
        bounds = [math.fsum(law[:i]) / total for i in range(len(law) + 1)]
        return self.coins.cut(self.name(stream, index), bounds)


def outcomes(play: Callable[[ExactCoins], Path]) -> Iterator[Outcome]:
    """Every (probability, emitted tokens) of `play`."""
    scripts: list[list[int]] = [[]]
    while scripts:
        script = scripts.pop()
        coins = ExactCoins(script)
        tokens = play(coins)
        yield coins.weight, tokens
        for at in range(len(script), len(coins.taken)):
            scripts += [[*coins.taken[:at], way] for way in range(1, coins.open[at])]


@dataclass(frozen=True)
class Toy:
    """A model whose next-token law depends on the whole path; some tokens have probability 0."""

    vocab: int
    seed: int
    support: int  # tokens that are possible after any path

    def law(self, path: Path) -> Tensor:
        return _toy_law(self, path)

    def joint(self, path: Path, steps: int) -> Tensor:
        """The law of the next `steps` tokens, [V] * steps."""
        return _toy_joint(self, path, steps)


@dataclass(frozen=True)
class Constant(Toy):
    """A model whose next-token law is always the same."""

    probabilities: tuple[float, ...] = ()

    def law(self, path: Path) -> Tensor:
        return torch.tensor(self.probabilities, dtype=torch.float64)


def constant(*probabilities: float) -> Constant:
    return Constant(len(probabilities), 0, len(probabilities), probabilities)


@cache
def _toy_law(toy: Toy, path: Path) -> Tensor:
    code = toy.seed
    for token in path:
        code = (code * 31 + token + 7) % (2**31 - 1)
    rng = torch.Generator().manual_seed(code)
    logits = torch.randn(toy.vocab, generator=rng, dtype=torch.float64) * 1.5
    barred = torch.randperm(toy.vocab, generator=rng)[toy.support :]
    logits[barred] = -torch.inf
    return logits.softmax(0)


@cache
def _toy_joint(toy: Toy, path: Path, steps: int) -> Tensor:
    if steps == 0:
        return torch.ones((), dtype=torch.float64)
    law_V = toy.law(path)
    rest = [law_V[t] * toy.joint((*path, t), steps - 1) for t in range(toy.vocab)]
    return torch.stack(rest)


def distance(emitted: Iterator[Outcome], target: Toy, steps: int) -> float:
    """Total variation between what a rule emits and the target's law of `steps` tokens.

    A shorter outcome is completed by the target; a longer one is cut.
    """
    law = torch.zeros((target.vocab,) * steps, dtype=torch.float64)
    for weight, tokens in emitted:
        kept = tokens[:steps]
        law[kept] += weight * target.joint(kept, steps - len(kept))
    return float((law - target.joint((), steps)).abs().sum() / 2)

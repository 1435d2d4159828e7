"""Right rules under exact enumeration: what the tests of their law and of their mutants share.

Legend: B requests, R rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from enumeration import (
    ExactCoins,
    Outcome,
    Path,
    Toy,
    constant,
    distance,
    outcomes,
)
from torch import Tensor
from verify_cases import draft_of, path_of, stacked

from furcate.kernels.accept import accept, accept_words, ancestor_words
from furcate.kernels.draft import Draft, Verdict
from furcate.verify import block, recursive
from furcate.verify.coins import Coins, draw_at
from furcate.verify.recursive import DrawnTree

EXACT, WRONG = 1e-12, 1e-4
TARGET = Toy(vocab=4, seed=11, support=4)
SPARSE = Toy(vocab=4, seed=12, support=3)
DRAFTER = Toy(vocab=4, seed=13, support=3)
FULL_DRAFTER = Toy(vocab=4, seed=14, support=4)
# A pair of laws with two tokens in the residual, so that no wrong rule is right by chance.
P, Q = constant(0.5, 0.3, 0.15, 0.05), constant(0.4, 0.15, 0.35, 0.1)
Shape = tuple["Shape", ...]  # the shapes of the children's subtrees
ONE: Shape = ((),)
DEEP: Shape = ((ONE, ()), ())  # depth 3: two children, the first has two, of which one has one
SMALL: Shape = (ONE, ())


def every_choice(draft: Draft, target: Toy) -> tuple[Tensor, Tensor]:
    """All choices that the rows can have, and the probability of each: [B, R], [B].

    Rows of equal path share their noise and so their choice; a pad has the root's.
    """
    live, rows = int(draft.live_B), draft.tokens_BR.shape[1]
    paths = [tuple(draft.tokens_BR[0, path_of(draft, row)].tolist()) for row in range(live)]
    paths += [()] * (rows - live)
    names = sorted(set(paths))
    combos = torch.tensor(list(itertools.product(range(target.vocab), repeat=len(names))))
    weight_B = torch.ones(len(combos), dtype=torch.float64)
    for column, path in enumerate(names):
        weight_B *= target.law(path)[combos[:, column]]
    return combos[:, [names.index(path) for path in paths]], weight_B


def coupled(draft: Draft, target: Toy, *, by_words: bool = False) -> Iterator[Outcome]:
    choice_BR, weight_B = every_choice(draft, target)
    batch = stacked([draft] * len(choice_BR))
    depth = int(draft.depth_BR.max())
    verdict = (
        accept_words(ancestor_words(batch.end_BR), batch, choice_BR, depth)
        if by_words
        else accept(batch, choice_BR, depth)
    )
    return emitted(verdict, weight_B)


def emitted(verdict: Verdict, weight_B: Tensor) -> Iterator[Outcome]:
    for weight, tokens, count in zip(
        weight_B.tolist(), verdict.emitted_BD.tolist(), verdict.count_B.tolist(), strict=True
    ):
        yield weight, tuple(tokens[:count])


DRAFTS = {
    "chain": draft_of([0, 1, 2, 3], [0, 0, 1, 2]),
    "star": draft_of([0, 1, 2, 3, 0], [0, 0, 0, 0, 0]),
    "tree": draft_of([0, 1, 2, 3, 0, 2], [0, 0, 1, 2, 1, 0]),
    "duplicates": draft_of([0, 1, 2, 1, 3, 1], [0, 0, 1, 0, 3, 4]),
    "pads": draft_of([0, 1, 2], [0, 0, 1], pads=[0, 1, 2, 3]),
    "root alone": draft_of([0], [0]),
}


def draw_children(*given: Any, **options: Any) -> list[int]:
    """The module's own, looked up when it is called, so that a fault planted there is met."""
    return recursive.draw_children(*given, **options)


def verify_recursively(tree: DrawnTree, target_NV: Tensor, coins: Coins) -> list[int]:
    """The module's own, looked up when it is called."""
    return recursive.verify(tree, target_NV, coins)


def grow(
    shape: Shape,
    drafter: Toy,
    coins: Coins,
    draw: Callable[..., list[int]] = draw_children,
    *,
    replacement: bool,
) -> DrawnTree:
    """Draw a tree of the given shape, level by level."""
    tokens, parent = [-1], [-1]
    paths: list[Path] = [()]
    queue: list[tuple[int, Shape]] = [(0, shape)]
    while queue:
        node, wanted = queue.pop(0)
        law_V = drafter.law(paths[node])
        born = draw(law_V, len(wanted), len(tokens), coins, replacement=replacement)
        for token, below in zip(born, wanted, strict=False):
            queue.append((len(tokens), below))
            tokens.append(token)
            parent.append(node)
            paths.append((*paths[node], token))
    draft_NV = torch.stack([drafter.law(path) for path in paths])
    return DrawnTree(tuple(tokens), tuple(parent), draft_NV, replacement)


def paths_of(tree: DrawnTree) -> list[Path]:
    paths: list[Path] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parent[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def target_rows(tree: DrawnTree, target: Toy) -> Tensor:
    return torch.stack([target.law(path) for path in paths_of(tree)])


@dataclass(frozen=True)
class Recursive:
    """Drafting and judging, with every part replaceable by a wrong one."""

    verify: Callable[[DrawnTree, Tensor, Coins], list[int]] = verify_recursively
    draw: Callable[..., list[int]] = draw_children
    drawn_from: Callable[[Tensor], Tensor] = lambda law_V: law_V
    prune: Callable[[DrawnTree], DrawnTree] = lambda tree: tree
    coins: Callable[[Coins], Coins] = lambda coins: coins
    replacement: bool = True
    shape: Shape = SMALL
    drafter: Toy = FULL_DRAFTER
    target: Toy = TARGET

    def play(self, exact: ExactCoins) -> Path:
        coins = self.coins(exact.round(0))

        def draw(law_V: Tensor, *rest: object, **options: object) -> list[int]:
            return self.draw(self.drawn_from(law_V), *rest, **options)

        tree = self.prune(grow(self.shape, self.drafter, coins, draw, replacement=self.replacement))
        return tuple(self.verify(tree, target_rows(tree, self.target), coins))

    def distance(self, steps: int = 3) -> float:
        return distance(outcomes(self.play), self.target, steps)


def play_block(target: Toy, drafter: Toy, gamma: int, coins: Coins, prefix: Path = ()) -> Path:
    """One round: a chain of gamma drafted tokens below `prefix`, judged as a block."""
    chain: list[int] = []
    for i in range(gamma):
        chain += draw_children(drafter.law((*prefix, *chain)), 1, i + 1, coins, replacement=True)
    paths = [(*prefix, *chain[:i]) for i in range(gamma + 1)]
    draft_NV = torch.stack([drafter.law(path) for path in paths])
    target_NV = torch.stack([target.law(path) for path in paths])
    return tuple(block.verify(chain, draft_NV, target_NV, coins))


BINARY, BINARY_DRAFTER = Toy(vocab=2, seed=5, support=2), Toy(vocab=2, seed=9, support=2)


def several_rounds(
    one_round: Callable[[Coins, Path], Path], name: Callable[[ExactCoins, int], Coins]
) -> Callable[[ExactCoins], Path]:
    """Rounds until three tokens are out; `name` gives the coins of the round at a root."""

    def play(exact: ExactCoins) -> Path:
        out: Path = ()
        while len(out) < 3:
            out += one_round(name(exact, len(out)), out)
        return out

    return play


def block_round(coins: Coins, prefix: Path) -> Path:
    return play_block(BINARY, BINARY_DRAFTER, 2, coins, prefix)


def recursive_round(coins: Coins, prefix: Path) -> Path:
    @dataclass(frozen=True)
    class Below:
        toy: Toy

        def law(self, path: Path) -> Tensor:
            return self.toy.law((*prefix, *path))

    tree = grow(SMALL, Below(BINARY_DRAFTER), coins, replacement=True)  # type: ignore[arg-type]
    return tuple(recursive.verify(tree, target_rows(tree, Below(BINARY)), coins))  # type: ignore[arg-type]


def keyed_by_round(exact: ExactCoins, root: int) -> Coins:
    return exact.round(root)


@dataclass(frozen=True)
class Stuck:
    """Every coin shows the same number."""

    value: float

    def below(self, stream: int, index: int, probability: float) -> bool:
        return self.value < probability

    def draw(self, stream: int, index: int, law_V: Tensor) -> int:
        return draw_at(law_V, self.value)


EDGES = [0.0, 2.0**-33, 1 - 2.0**-24, 1.0]


def impossible_tokens(coins: Coins) -> int:
    """Tokens of probability 0 that the rules emit over many sparse laws."""
    found = 0
    for seed in range(100):
        target, drafter = Toy(5, seed, support=2), Toy(5, seed + 500, support=3)
        trees = [
            grow(DEEP, drafter, coins, replacement=replacement) for replacement in (True, False)
        ]
        plays = [tuple(recursive.verify(t, target_rows(t, target), coins)) for t in trees]
        plays.append(play_block(target, drafter, 3, coins))
        for tokens in plays:
            found += any(target.law(tokens[:i])[x] == 0 for i, x in enumerate(tokens))
    return found

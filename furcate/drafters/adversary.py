"""Drafters that propose hostile trees: whatever they do, the emitted stream must stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from furcate.drafters.base import View
from furcate.drafters.footprint import Footprint
from furcate.kernels.draft import Draft, Proposal, Verdict

__all__ = ["SHAPES", "Adversary", "Node"]


@dataclass(frozen=True)
class Node:
    """A node of a tree under construction."""

    token: int
    parent: int  # index into the tree, -1: child of the root
    depth: int
    value: float  # log


@dataclass
class Tree:
    """A pool that stays legal whatever is added: twins are merged, depth and size are capped."""

    depth: int
    pool: int
    nodes: list[Node] = field(default_factory=list)

    def add(self, parent: int, token: int, loss: float) -> int:
        """The node for `token` below `parent`, new or old; `parent` itself if there is no room."""
        for index, node in enumerate(self.nodes):
            if (node.parent, node.token) == (parent, token):
                return index
        above = self.nodes[parent] if parent >= 0 else Node(-1, -1, 0, 0.0)
        if len(self.nodes) == self.pool or above.depth == self.depth:
            return parent
        self.nodes.append(Node(token, parent, above.depth + 1, above.value - loss))
        return len(self.nodes) - 1


@dataclass(frozen=True)
class Guess:
    """What a shape has to work with."""

    right: Sequence[int]  # the tokens that plain decoding will emit next; may be empty
    vocab: int
    rng: random.Random

    def wrong(self, d: int) -> int:
        """A token that is not the right one at level d (from 0)."""
        token = self.rng.randrange(self.vocab)
        right = self.right[d] if d < len(self.right) else -1
        return token if token != right else (token + 1) % self.vocab


Shape = Callable[[Guess, Tree], None]


class Adversary:
    """Knows the plain streams and proposes trees of one shape around them.

    `streams` are whole token sequences, prompt and answer; the right tokens of a request are those
    of a stream that begins as the request does. It runs on the host: for tests alone. `strayed`
    counts verdicts whose path was not the likeliest one, `accepted` the nodes accepted.
    """

    light = True
    layers: tuple[int, ...] = ()
    footprint = Footprint()

    def __init__(
        self,
        streams: Sequence[Sequence[int]],
        shape: str,
        *,
        vocab: int,
        seed: int = 0,
        depth: int = 4,
        pool: int = 24,
    ) -> None:
        self.depth = depth
        self.depths: tuple[int, ...] = (depth,)
        self.pool = pool
        self.streams = [list(stream) for stream in streams]
        self.accepted = 0
        self.strayed = 0
        self.rounds = 0
        self._shape = SHAPES[shape]
        self._vocab = vocab
        self._rng = random.Random(seed)

    def keep(self, view: View, rows: Draft, features_BRF: Tensor) -> None:
        """It needs no features."""

    def read(self, view: View, rows: Draft) -> None:
        """It knows the text already."""

    def propose(self, view: View, levels: int) -> Proposal:
        """One tree per request."""
        trees = []
        for tokens, length in zip(view.tokens_BW.tolist(), view.length_B.tolist(), strict=True):
            tree = Tree(self.depth, self.pool)
            right = self._right(tokens[: length + 1])
            self._shape(Guess(right, self._vocab, self._rng), tree)
            trees.append(tree.nodes)
        return _proposal(trees, self.pool, view.length_B.device)

    def learn(self, view: View, draft: Draft, verdict: Verdict, features_BRF: Tensor) -> None:
        """Count how far the target went, and whether it left the likeliest path."""
        for path, accepted in zip(
            verdict.path_BD.tolist(), verdict.accepted_B.tolist(), strict=True
        ):
            self.rounds += 1
            self.accepted += accepted
            self.strayed += path[accepted] != accepted

    def forget(self, slot: int) -> None:
        """It keeps nothing of a request."""

    def copy_page(self, source: int, target: int) -> None:
        """It has no cache."""

    def _right(self, text: list[int]) -> list[int]:
        fitting = [s for s in self.streams if s[: len(text)] == text]
        if not fitting:
            return []
        return self._rng.choice(fitting)[len(text) : len(text) + self.depth]


def _proposal(trees: list[list[Node]], pool: int, device: torch.device) -> Proposal:
    dead = Node(0, -1, 1, -torch.inf)
    full = [nodes + [dead] * (pool - len(nodes)) for nodes in trees]

    def ints(of: Callable[[Node], int]) -> torch.Tensor:
        return torch.tensor([[of(n) for n in nodes] for nodes in full], device=device)

    return Proposal(
        tokens_BP=ints(lambda n: n.token),
        parent_BP=ints(lambda n: n.parent),
        depth_BP=ints(lambda n: n.depth),
        value_BP=torch.tensor([[n.value for n in nodes] for nodes in full], device=device),
    )


def _chain(guess: Guess, tree: Tree) -> None:
    """The right tokens in a row, one of them perhaps wrong."""
    miss = guess.rng.randrange(tree.depth + 1)
    node = -1
    for d, token in enumerate(guess.right):
        node = tree.add(node, guess.wrong(d) if d == miss else token, 0.1)


def _star(guess: Guess, tree: Tree) -> None:
    """Many children of the root and nothing below them."""
    for token in guess.right[:1]:
        tree.add(-1, token, guess.rng.uniform(0.5, 3))
    for _ in range(guess.rng.randrange(tree.pool)):
        tree.add(-1, guess.rng.randrange(guess.vocab), guess.rng.uniform(0.5, 3))


def _single(guess: Guess, tree: Tree) -> None:
    """One node, right or wrong."""
    right = guess.right[:1] or [0]
    tree.add(-1, guess.rng.choice([right[0], guess.wrong(0)]), 0.2)


def _bushy(guess: Guess, tree: Tree) -> None:
    """Random attachment; where a parent lies on the right path, often the right token."""
    on_path = {-1: 0}
    for _ in range(2 * tree.pool):
        parent = guess.rng.randrange(-1, len(tree.nodes))
        d = on_path.get(parent, len(guess.right))
        hit = d < len(guess.right) and guess.rng.random() < 0.5
        token = guess.right[d] if hit else guess.rng.randrange(guess.vocab)
        node = tree.add(parent, token, guess.rng.uniform(0.01, 2))
        if d < len(guess.right) and token == guess.right[d] and node != parent:
            on_path[node] = d + 1


def _wrong(guess: Guess, tree: Tree) -> None:
    """Nothing that the target would say at its level."""
    for _ in range(tree.pool):
        parent = guess.rng.randrange(-1, len(tree.nodes))
        d = tree.nodes[parent].depth if parent >= 0 else 0
        tree.add(parent, guess.wrong(d), guess.rng.uniform(0.01, 1))


def _hidden(guess: Guess, tree: Tree) -> None:
    """The right path at every level behind a likelier wrong sibling with a child of its own."""
    node = -1
    for d, token in enumerate(guess.right):
        decoy = tree.add(node, guess.wrong(d), 0.05)
        below = tree.add(node, token, 1.0)
        tree.add(decoy, guess.right[min(d + 1, len(guess.right) - 1)], 0.05)
        if below == node:
            return
        node = below


def _twins(guess: Guess, tree: Tree) -> None:
    """Chains that share a prefix and are merged; one goes wrong at each level."""
    for miss in [*range(len(guess.right)), tree.depth]:
        node = -1
        for d, token in enumerate(guess.right):
            node = tree.add(node, guess.wrong(d) if d == miss else token, 0.3)


def _nothing(guess: Guess, tree: Tree) -> None:
    """Not a single live node."""


def _any(guess: Guess, tree: Tree) -> None:
    """Another shape each time."""
    guess.rng.choice(_PLAIN)(guess, tree)


_PLAIN = (_chain, _star, _single, _bushy, _wrong, _hidden, _twins, _nothing)
SHAPES: dict[str, Shape] = {fn.__name__.removeprefix("_"): fn for fn in (*_PLAIN, _any)}

"""Comparison rule: recursive rejection sampling over siblings, then the residual law.

SpecInfer (Miao et al., arXiv 2305.09781), siblings drawn with replacement; Sequoia (Chen et al.,
arXiv 2402.12374) and RSD (Jeon et al., arXiv 2402.14160), without. Exact for children that were
*drawn* from q in the order they are tried; a child chosen by rank, or dropped for its value, is
not such a draw. Legend: N nodes, V vocabulary; float64 laws are meant, any float dtype works.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from furcate.verify.coins import Coins, residual
from furcate.verify.noise import ACCEPT, BONUS, DRAFT, RESIDUAL

__all__ = ["DrawnTree", "draw_children", "verify", "without"]


@dataclass(frozen=True, slots=True)
class DrawnTree:
    """A tree whose children were drawn from the draft's law; node 0 is the root."""

    tokens: tuple[int, ...]  # the root's is not read
    parent: tuple[int, ...]  # a smaller index; siblings stand in the order they were drawn
    draft_NV: Tensor  # the law from which each node's first child was drawn
    replacement: bool  # whether a token may be drawn again for a later sibling

    def children(self, node: int) -> list[int]:
        return [n for n in range(1, len(self.parent)) if self.parent[n] == node]


def draw_children(
    law_V: Tensor, count: int, first: int, coins: Coins, *, replacement: bool
) -> list[int]:
    """Tokens of up to `count` siblings, the nodes `first`, `first` + 1, ...; fewer where the law
    has no further token."""
    tokens: list[int] = []
    for node in range(first, first + count):
        if not law_V.any():
            break
        tokens.append(coins.draw(DRAFT, node, law_V))
        if not replacement:
            law_V = without(law_V, tokens[-1])
    return tokens


def verify(tree: DrawnTree, target_NV: Tensor, coins: Coins) -> list[int]:
    """The tokens to emit: the accepted path, then one token from what is left of the target.

    Args:
        tree: drawn with the DRAFT stream of the same coins, or by any other independent chance.
        target_NV: the target's law at each node.
        coins: of this round.
    """
    node, emitted = 0, list[int]()
    while True:
        law_V, draft_V = target_NV[node], tree.draft_NV[node]
        children = tree.children(node)
        for child in children:
            token = tree.tokens[child]
            if coins.below(ACCEPT, child, float(law_V[token] / draft_V[token])):
                break
            law_V = residual(law_V, draft_V)
            if not tree.replacement:
                draft_V = without(draft_V, token)
        else:
            return [*emitted, coins.draw(RESIDUAL if children else BONUS, node, law_V)]
        node = child
        emitted.append(token)


def without(law_V: Tensor, token: int) -> Tensor:
    """The law of the next sibling once `token` is taken, renormalised; all 0 if none is left."""
    rest_V = law_V.clone()
    rest_V[token] = 0
    mass = rest_V.sum()
    return rest_V / mass if mass > 0 else rest_V

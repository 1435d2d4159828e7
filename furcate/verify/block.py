"""Comparison rule: block verification of a drafted chain.

Sun et al., "Block verification accelerates speculative decoding" (arXiv 2403.10444), algorithm 2:
the tokens are judged together, which accepts at least as many as judging them one by one.
Legend: N tokens of the chain and the root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from furcate.verify.coins import Coins, residual
from furcate.verify.noise import ACCEPT, BONUS, RESIDUAL

__all__ = ["verify"]


def verify(chain: Sequence[int], draft_NV: Tensor, target_NV: Tensor, coins: Coins) -> list[int]:
    """The tokens to emit: the longest accepted prefix of the chain, then one more.

    Args:
        chain: gamma tokens, token i drawn from `draft_NV[i]`.
        draft_NV: [gamma, V] or more rows; row i is the draft's law after i tokens.
        target_NV: [gamma + 1, V], the target's.
        coins: of this round.
    """
    ratio, length, kept = 1.0, 0, 1.0
    for i, token in enumerate(chain, start=1):
        ratio = min(ratio * float(target_NV[i - 1][token] / draft_NV[i - 1][token]), 1.0)
        last = i == len(chain)
        accept = ratio if last else _acceptance(ratio, target_NV[i], draft_NV[i])
        # the longest prefix whose own coin accepts wins, whatever shorter ones said
        if coins.below(ACCEPT, i, accept):
            length, kept = i, ratio
    if length == len(chain):
        return [*chain, coins.draw(BONUS, length, target_NV[length])]
    law_V = residual(kept * target_NV[length], draft_NV[length])
    return [*chain[:length], coins.draw(RESIDUAL, length, law_V)]


def _acceptance(ratio: float, target_V: Tensor, draft_V: Tensor) -> float:
    """h_i = S_i / (S_i + 1 - p_i) with S_i = sum of (p_i * P - Q)+."""
    surplus = float((ratio * target_V - draft_V).clamp_min(0).sum())
    # p_i = 1 and P = Q: the next token is accepted for certain, so this length is never the end
    return surplus / (surplus + 1.0 - ratio) if surplus > 0 else 0.0

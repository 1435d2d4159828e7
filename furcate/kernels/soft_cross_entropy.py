"""How far a draft's law is from the target's, row by row, and the slope written over its scores.

Legend: N rows, D columns (tokens that the loss looks at).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Objective", "Scores", "soft_cross_entropy"]


@dataclass(frozen=True, slots=True)
class Objective:
    """What is made small.

    `soft_ce`: the cross entropy -Σ p log q. `lk`: w·CE + (1 - w)·(1 - α) with the acceptance
    α = Σ min(p, q) and w = kl_scale · exp(-kl_decay · α), held fixed in the slope (SpecForge's
    "lambda" form; CE and KL have one slope). The worse the draft, the more it is cross entropy.
    """

    kind: Literal["soft_ce", "lk"] = "soft_ce"
    kl_scale: float = 1.0
    kl_decay: float = 3.0


@dataclass(frozen=True, slots=True)
class Scores:
    """Of every row, float32 (float64 for float64 scores)."""

    loss_N: Tensor  # cross entropy in nats, for either objective
    overlap_N: Tensor  # Σ min(p, q): how often a draw of the draft would be accepted
    agree_N: Tensor  # 1 where both have the same best token among the columns


def soft_cross_entropy(
    draft_ND: Tensor, log_p_ND: Tensor, bias_D: Tensor, weight_N: Tensor, objective: Objective
) -> Scores:
    """Compare softmax(draft + bias) with exp(log_p + bias), and write the slope over `draft`.

    Args:
        draft_ND: scores of the draft, dense; overwritten by weight · d objective / d score.
        log_p_ND: logarithms of the target's probabilities, normalised over its whole vocabulary:
            a row's sum may be below 1.
        bias_D: log(1 / probability of being among the columns), 0 for those that always are; so
            sums over the columns stand for sums over the whole vocabulary without bias (Bengio and
            Senécal 2008). float32.
        weight_N: factor of each row's slope, float32; 0 leaves the row out.
    """
    wide = torch.float64 if draft_ND.dtype == torch.float64 else torch.float32
    log_q_ND = (draft_ND.to(wide) + bias_D).log_softmax(1)
    p_ND, q_ND = (log_p_ND.to(wide) + bias_D).exp(), log_q_ND.exp()
    loss_N = -(p_ND * log_q_ND).sum(1)
    overlap_N = torch.minimum(p_ND, q_ND).sum(1)
    agree_N = (draft_ND.argmax(1) == log_p_ND.argmax(1)).to(wide)
    slope_ND = p_ND.sum(1, keepdim=True) * q_ND - p_ND
    if objective.kind == "lk":
        part_N1 = objective.kl_scale * (-objective.kl_decay * overlap_N[:, None]).exp()
        below_ND = (q_ND < p_ND).to(wide)
        rise_ND = q_ND * (below_ND - (q_ND * below_ND).sum(1, keepdim=True))
        slope_ND = part_N1 * slope_ND - (1 - part_N1) * rise_ND
    draft_ND.copy_(slope_ND * weight_N[:, None])
    return Scores(loss_N, overlap_N, agree_N)

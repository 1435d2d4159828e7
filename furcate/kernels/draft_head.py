"""From a draft network's scores to the likeliest children of each row; torch reference.

Legend: N rows, V draft vocabulary, C children of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Children", "Scale", "draft_head"]


class Scale(Protocol):
    """How a drafter's scores predict the target's choice; the tree's `DepthScale` is one."""

    @property
    def beta(self) -> float:
        """What a score counts."""

    @property
    def sigma(self) -> float:
        """Spread of the target's score about it, in units of the temperature."""

    @property
    def floor(self) -> float:
        """The least spread, at any temperature."""


@dataclass(frozen=True, slots=True)
class Children:
    """The best tokens of each row, and its law as a whole."""

    word_NC: Tensor  # int64, draft ids, likeliest first; of equals the lower id
    weight_NC: Tensor  # float32, log P(the target chooses it below this row)
    entropy_N: Tensor  # float32, of that law, in nats


def draft_head(
    logits_NV: Tensor, temperature_N: Tensor, noise_NV: Tensor | None, scale: Scale, count: int
) -> Children:
    """The `count` likeliest choices of the target at each row.

    Given the target's noise its choice follows softmax((beta * l + T * noise) / s), where s is
    sigma * T, but at least the floor (the Gumbel-max trick). A row with a score that is NaN or
    +inf has weights that are NaN. A score of -inf is never chosen; where too few others are left,
    weights are -inf and their words any.

    Args:
        logits_NV: any float dtype.
        temperature_N: float32; at 0 the noise does not count.
        noise_NV: the target's noise at the position that the row's children would take, at the
            draft's tokens; None if all temperatures are 0.
        scale: of the depth.
        count: C, at most V.
    """
    score_NV = logits_NV.float() * scale.beta
    if noise_NV is not None:
        score_NV = score_NV + noise_NV * temperature_N[:, None]
    score_NV = score_NV.masked_fill(score_NV.isnan(), torch.inf)
    spread_N1 = (scale.sigma * temperature_N).clamp_min(scale.floor)[:, None]
    weight_NV = (score_NV / spread_N1).log_softmax(1)
    word_NC = score_NV.sort(dim=1, descending=True, stable=True).indices[:, :count]
    chance_NV = weight_NV.exp()
    entropy_N = -(chance_NV * weight_NV.clamp_min(-1e30)).sum(1)
    return Children(word_NC, weight_NV.gather(1, word_NC), entropy_N)

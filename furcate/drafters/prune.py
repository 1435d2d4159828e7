"""Nodes that are not worth their row: caps and gates by entropy, and a least value.

Legend: B requests, F frontier rows, C children of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["NO_PRUNING", "Pruning"]


@dataclass(frozen=True, slots=True)
class Pruning:
    """What a row's entropy H (in nats) says of the size of its family; None: nothing.

    A row keeps 1 + ceil(kappa * (exp(H) - 1)) children, exp(H) being how many it hesitates
    between; it has none if its value times (1 - sqrt(gamma * H)), a lower bound of the chance
    that a child is accepted (AdaEDL, arXiv:2410.18351), is below `least`. Nodes worth less than
    `least` are dropped.
    """

    kappa: float | None = None
    gamma: float | None = None
    least: float = 0.0

    @property
    def asks_entropy(self) -> bool:
        """Whether a cap or a gate is set."""
        return self.kappa is not None or self.gamma is not None

    def pruned(self, value_BFC: Tensor, above_BF: Tensor, entropy_BF: Tensor | None) -> Tensor:
        """The logs of the children's values, best first in every row; -inf where one is dropped.

        Needs the rows' entropies if it `asks_entropy`.
        """
        if self.asks_entropy:
            assert entropy_BF is not None
            entropy_BF1 = entropy_BF[..., None]
            if self.kappa is not None:
                cap_BF1 = 1 + (self.kappa * (entropy_BF1.exp() - 1)).ceil()
                rank_C = torch.arange(value_BFC.shape[2], device=value_BFC.device)
                value_BFC = value_BFC.masked_fill(rank_C >= cap_BF1, -torch.inf)
            if self.gamma is not None:
                hope_BF1 = (1 - (self.gamma * entropy_BF1).sqrt()).clamp_min(0)
                shut_BF1 = above_BF[..., None].exp() * hope_BF1 < self.least
                value_BFC = value_BFC.masked_fill(shut_BF1, -torch.inf)
        if self.least > 0:
            value_BFC = value_BFC.masked_fill(value_BFC < math.log(self.least), -torch.inf)
        return value_BFC


NO_PRUNING = Pruning()

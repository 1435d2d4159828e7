"""The tokens that a draft network scores, and the target's law at them.

Legend: B requests, R rows, D draft vocabulary, L levels, V vocabulary of the target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from furcate.drafters.base import View
from furcate.verify.law import Law, noise_of
from furcate.verify.noise import gumbel_at

__all__ = ["Vocabulary"]


class Vocabulary:
    """Draft ids 0..size - 1, each standing for a token of the target.

    Args:
        token_D: int64, the target's id of each draft id; None: they are the same.
        size: how many of a network's scores count, from the first on.
    """

    def __init__(self, token_D: Tensor | None, size: int) -> None:
        self.token_D = token_D
        self.size = size if token_D is None else len(token_D)
        self._reach: int | None = None  # draw all tokens below it, and take the draft's of them
        if token_D is not None and token_D.device.type == "cpu":
            # one draw serves four neighbours: all tokens cost less than a third of them one by one
            self._reach = 1 + int(token_D.max())

    def targets(self, draft_X: Tensor) -> Tensor:
        """Target ids of draft ids, both int64."""
        return draft_X if self.token_D is None else self.token_D[draft_X]

    def lawful(self, logits_BRV: Tensor, law: Law) -> Tensor:
        """The scores [B, R, D] with the law's bias, -inf where it allows no token."""
        logits_BRD = logits_BRV[..., : self.size]
        if law.bias_BV is not None:
            logits_BRD = logits_BRD + self._at(law.bias_BV)[:, None]
        if law.allowed_BV is not None:
            logits_BRD = logits_BRD.masked_fill(~self._at(law.allowed_BV)[:, None], -torch.inf)
        return logits_BRD

    def noise(self, view: View, levels: int) -> Tensor | None:
        """The target's noise at levels 1..L: float32 [B, L, D]; None if every request is greedy.

        On a GPU drawn at the draft's tokens only: a small vocabulary costs little.
        """
        law = view.law
        if not law.needs.noise:
            return None
        if self.token_D is None:
            return noise_of(law, view.length_B, levels - 1, self.size)
        if self._reach is not None:
            return noise_of(law, view.length_B, levels - 1, self._reach)[..., self.token_D]
        level_L = torch.arange(1, levels + 1, device=view.length_B.device)
        position_BL1 = (view.length_B[:, None] + level_L)[:, :, None]
        seed_B11, choice_B11 = law.seed_B[:, None, None], law.choice_B[:, None, None]
        return gumbel_at(seed_B11, position_BL1, choice_B11, self.token_D)

    def _at(self, row_BV: Tensor) -> Tensor:
        return row_BV[:, : self.size] if self.token_D is None else row_BV[:, self.token_D]

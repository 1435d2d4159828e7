"""How far a drafter's own probabilities can be trusted: a correction that learns as it goes.

Legend: B requests, F frontier rows, C children of a row, R rows of a draft, K bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from furcate.drafters.judge import Judged
from furcate.kernels.grow import BINS, DECAY, STEPS, bin_of, corrected, noted

__all__ = ["Trust"]


class Trust:
    """Accepted over expected, by bins of the weight that the drafter gave a node.

    Shared by all requests, updated in place on the device. A node counts if it was drafted and
    its parent was accepted. Nodes of different kinds have bins of their own.
    """

    def __init__(self, device: torch.device, kinds: int = 1) -> None:
        self.expected_K = torch.zeros(kinds * BINS, device=device)
        self.accepted_K = torch.zeros(kinds * BINS, device=device)

    def tags(self, log_weight: Tensor) -> Tensor:
        """The weight as a whole number, to be noted in a proposal: int64, the same shape."""
        return noted(log_weight)

    def corrected(self, log_weight: Tensor, tag: Tensor) -> Tensor:
        """log of the calibrated probability that a node is accepted, given that its parent is."""
        return corrected(log_weight, tag, (self.expected_K, self.accepted_K))

    def update(self, tag_BR: Tensor, judged: Judged) -> None:
        """Count one round."""
        tag_BR = tag_BR.clamp_min(0)
        weight_BR = (tag_BR % STEPS).float() / (STEPS - 1)
        bin_X = bin_of(tag_BR).flatten()
        expected_X = torch.where(judged.tried_BR, weight_BR, 0.0).flatten()
        self.expected_K.mul_(DECAY).index_add_(0, bin_X, expected_X)
        self.accepted_K.mul_(DECAY).index_add_(0, bin_X, judged.right_BR.flatten().float())

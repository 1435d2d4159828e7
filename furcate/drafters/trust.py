"""How far a drafter's own probabilities can be trusted: a correction that learns as it goes.

Legend: B requests, F frontier rows, C children of a row, R rows of a draft, K bins.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from furcate.kernels.draft import Draft, Verdict

__all__ = ["HIGHEST", "Trust", "on_path"]

BINS = 16
STEPS = 1 << 16  # a tag holds the weight in this many steps
PRIOR_WEIGHT = 16.0  # expected acceptances for which "the weights are right" stands
DECAY = 0.98  # of the counts, per round
HIGHEST = 0.995  # so that a child's value stays strictly below its parent's


class Trust:
    """Accepted over expected, by bins of the weight that the drafter gave a node.

    Shared by all requests, updated in place on the device. A node counts if it was drafted and
    its parent was accepted.
    """

    def __init__(self, device: torch.device) -> None:
        self.expected_K = torch.zeros(BINS, device=device)
        self.accepted_K = torch.zeros(BINS, device=device)

    def tags(self, log_weight: Tensor) -> Tensor:
        """The weight as a whole number, to be noted in a proposal: int64 of the same shape."""
        return (log_weight.exp() * (STEPS - 1)).long()

    def ratio(self) -> Tensor:
        """Factor on the weights of each bin, float32 [K]; 1 until something is learned."""
        return (PRIOR_WEIGHT + self.accepted_K) / (PRIOR_WEIGHT + self.expected_K)

    def corrected(self, log_weight: Tensor, tag: Tensor) -> Tensor:
        """log of the calibrated probability that a node is accepted, given that its parent is."""
        corrected = log_weight + self.ratio().log()[_bin(tag)]
        return corrected.clamp_max(math.log(HIGHEST))

    def update(self, draft: Draft, verdict: Verdict, real_B: Tensor) -> None:
        """Count one round; rows of requests that are not `real` teach nothing."""
        assert draft.tag_BR is not None
        path_BR = on_path(verdict, draft.tokens_BR.shape[1])
        row_R = torch.arange(path_BR.shape[1], device=path_BR.device)
        drafted_BR = (row_R > 0) & (row_R < draft.live_B[:, None]) & real_B[:, None]
        tried_BR = drafted_BR & path_BR.gather(1, draft.parent_BR)
        tag_BR = draft.tag_BR.clamp_min(0)
        weight_BR = tag_BR.float() / (STEPS - 1)
        bin_X = _bin(tag_BR).flatten()
        expected_X = torch.where(tried_BR, weight_BR, 0.0).flatten()
        self.expected_K.mul_(DECAY).index_add_(0, bin_X, expected_X)
        self.accepted_K.mul_(DECAY).index_add_(0, bin_X, (tried_BR & path_BR).flatten().float())


def on_path(verdict: Verdict, rows: int) -> Tensor:
    """bool [B, R]: the row is the root or on the accepted path."""
    path_BR = torch.zeros(
        len(verdict.path_BD), rows, dtype=torch.bool, device=verdict.path_BD.device
    )
    return path_BR.scatter(1, verdict.path_BD, True)


def _bin(tag: Tensor) -> Tensor:
    return tag * BINS // STEPS

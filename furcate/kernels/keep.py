"""A proposal kept for the next round, and what its best nodes are worth.

Legend: C slots, B requests, P pool nodes, N nodes that the host is told of.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from furcate.kernels.draft import Proposal
from furcate.kernels.select import gains

__all__ = ["Keep", "keep"]

Keep = Callable[[Proposal, Tensor, Proposal, int], Tensor]
"""(what is kept by slot, slot_B, new, most) -> gain_BN; see `keep`."""


def keep(kept: Proposal, slot_B: Tensor, new: Proposal, most: int) -> Tensor:
    """Write a proposal into its slots, and give its `gains`; the torch reference.

    A tag that nobody gave is 0.
    """
    kept.tokens_BP[slot_B] = new.tokens_BP
    kept.parent_BP[slot_B] = new.parent_BP
    kept.depth_BP[slot_B] = new.depth_BP
    kept.value_BP[slot_B] = new.value_BP
    if kept.tag_BP is not None:
        tag_BP = torch.zeros_like(new.tokens_BP) if new.tag_BP is None else new.tag_BP
        kept.tag_BP[slot_B] = tag_BP
    return gains(new, most)

"""A state's pool of proposals: new ones are put into their slots, and say what they would gain.

Legend: B requests, P nodes of a proposal, N best nodes to report.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from furcate.kernels.draft import Proposal
from furcate.kernels.select import gains

__all__ = ["Put", "put"]

Put = Callable[[Proposal, Tensor, Proposal, Tensor], None]
"""(pool by slot, slot_B, new, gain_BN): writes `new` into the pool, and its gains, float32.

A proposal without tags gets 0 for each of them. One of fewer nodes than the pool's leaves what the
others say, and they are worth -inf.
"""


def put(pool: Proposal, slot_B: Tensor, new: Proposal, gain_BN: Tensor) -> None:
    """`Put` in torch."""
    nodes = new.tokens_BP.shape[1]
    pool.tokens_BP[slot_B, :nodes] = new.tokens_BP
    pool.parent_BP[slot_B, :nodes] = new.parent_BP
    pool.depth_BP[slot_B, :nodes] = new.depth_BP
    pool.value_BP[slot_B, :nodes] = new.value_BP
    if nodes < pool.value_BP.shape[1]:
        pool.value_BP[slot_B, nodes:] = -torch.inf
    if pool.tag_BP is not None:
        tag_BP = torch.zeros_like(new.tokens_BP) if new.tag_BP is None else new.tag_BP
        pool.tag_BP[slot_B, :nodes] = tag_BP
    gain_BN.copy_(gains(new, gain_BN.shape[1]))

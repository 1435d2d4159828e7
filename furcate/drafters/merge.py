"""Two pools of candidates as one: nodes whose paths say the same tokens are joined.

Legend: B requests, P nodes of the first pool, Q of the second, N = P + Q of both, X nodes of one
level of the first, Y of one level of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.kernels.draft import Proposal

__all__ = ["Joint", "join"]


@dataclass(frozen=True, slots=True)
class Joint:
    """The first pool's nodes, then the second's; all [B, N].

    A node of both stands at its place in the first pool; the second pool's entry is dead, and what
    stood below it stands below the other.
    """

    tokens_BN: Tensor  # int64
    parent_BN: Tensor  # int64
    depth_BN: Tensor  # int64
    alive_BN: Tensor  # bool
    first: Opinion
    second: Opinion


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one of the two thinks of every node of the joint pool."""

    step_BN: Tensor  # float32, log P(accepted | its parent is); -inf: it does not propose the node
    tag_BN: Tensor  # int64, its note; -1: it does not propose the node


def join(first: Proposal, second: Proposal, sizes: Sequence[int], second_levels: int) -> Joint:
    """Join level by level: nodes are the same if their tokens are, and their parents.

    Fixed shapes, no host synchronisation.

    Args:
        first: level after level, `sizes` nodes each.
        second: node after node of one chain, `second_levels` each, then the next chain.
    """
    place_BQ = _places(first, second, sizes, second_levels)
    pool, width = first.tokens_BP.shape[1], first.tokens_BP.shape[1] + place_BQ.shape[1]
    up_BQ = place_BQ.gather(1, second.parent_BP.clamp_min(0))
    up_BQ = torch.where(second.parent_BP < 0, -1, up_BQ)
    alive_BQ = (second.value_BP > -torch.inf) & (place_BQ >= pool)
    return Joint(
        tokens_BN=torch.cat([first.tokens_BP, second.tokens_BP], 1),
        parent_BN=torch.cat([first.parent_BP, up_BQ], 1),
        depth_BN=torch.cat([first.depth_BP, second.depth_BP], 1),
        alive_BN=torch.cat([first.value_BP > -torch.inf, alive_BQ], 1),
        first=_widened(_opinion(first), width),
        second=_moved(_opinion(second), place_BQ, width),
    )


def _places(first: Proposal, second: Proposal, sizes: Sequence[int], second_levels: int) -> Tensor:
    """Where each node of the second pool stands in the joint one: int64 [B, Q]."""
    pool = first.tokens_BP.shape[1]
    own_Q = torch.arange(second.tokens_BP.shape[1], device=first.tokens_BP.device) + pool
    place_BQ = own_Q.expand_as(second.tokens_BP).clone()
    begin = 0
    for d, size in enumerate(sizes[:second_levels]):
        at_X, at_Y = slice(begin, begin + size), slice(d, None, second_levels)
        parent_BY = second.parent_BP[:, at_Y]
        up_BY = torch.where(parent_BY < 0, -1, place_BQ.gather(1, parent_BY.clamp_min(0)))
        same_BYX = second.tokens_BP[:, at_Y, None] == first.tokens_BP[:, None, at_X]
        same_BYX &= up_BY[:, :, None] == first.parent_BP[:, None, at_X]
        same_BYX &= (second.value_BP[:, at_Y] > -torch.inf)[:, :, None]
        same_BYX &= (first.value_BP[:, at_X] > -torch.inf)[:, None]
        twin_BY = same_BYX.long().argmax(2) + begin
        place_BQ[:, at_Y] = torch.where(same_BYX.any(2), twin_BY, place_BQ[:, at_Y])
        begin += size
    return place_BQ


def _opinion(proposal: Proposal) -> Opinion:
    """What a drafter thinks of its own nodes."""
    assert proposal.tag_BP is not None
    parent_BP, value_BP = proposal.parent_BP, proposal.value_BP
    above_BP = value_BP.gather(1, parent_BP.clamp_min(0)).masked_fill(parent_BP < 0, 0.0)
    alive_BP = value_BP > -torch.inf
    step_BP = torch.where(alive_BP, value_BP - above_BP, -torch.inf)
    return Opinion(step_BP, torch.where(alive_BP, proposal.tag_BP, -1))


def _widened(opinion: Opinion, width: int) -> Opinion:
    pad = (0, width - opinion.step_BN.shape[1])
    fill = torch.nn.functional.pad
    return Opinion(
        fill(opinion.step_BN, pad, value=-torch.inf), fill(opinion.tag_BN, pad, value=-1)
    )


def _moved(opinion: Opinion, place_BQ: Tensor, width: int) -> Opinion:
    """An opinion on nodes that stand elsewhere; places are all different where nodes are alive."""
    shape = (len(place_BQ), width)
    step_BN = opinion.step_BN.new_full(shape, -torch.inf)
    tag_BN = opinion.tag_BN.new_full(shape, -1)
    return Opinion(
        step_BN.scatter_(1, place_BQ, opinion.step_BN), tag_BN.scatter_(1, place_BQ, opinion.tag_BN)
    )

"""Two pools of candidates as one under one value; the torch reference.

Nodes whose paths say the same tokens are joined. Legend: B requests, P nodes of the first pool, Q
of the second, N = P + Q of both, X nodes of one level of the first, Y of one level of the second,
L levels of the first, R rows of a draft, K bins of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.kernels.draft import Draft, Proposal, Verdict
from furcate.kernels.grow import HIGHEST, corrected, noted

__all__ = [
    "BOTH",
    "MATCH",
    "MATCH_SAYS",
    "NETWORK",
    "NETWORK_ROOM",
    "NETWORK_SAYS",
    "OWN_ROOM",
    "UNLISTED",
    "Join",
    "Joint",
    "JointTally",
    "Opinion",
    "Pools",
    "join",
    "joined",
    "packed",
    "pooled",
    "unpacked",
]

# Weights of the two opinions' log odds where both speak of a token
NETWORK_SAYS = 0.8
MATCH_SAYS = 0.5
UNLISTED = 0.5  # of the network's least child: what it thinks of a token that it does not list
NETWORK, MATCH, BOTH = range(3)  # kinds of nodes
OWN_ROOM, NETWORK_ROOM = 1 << 18, 1 << 17  # of the parts of a tag


@dataclass(frozen=True, slots=True)
class Pools:
    """How the two pools lie."""

    sizes: tuple[int, ...]  # nodes of each level of the first, level after level
    begin_L: Tensor  # int32, where each of them begins, and where the last one ends: L + 1 numbers
    chain: int  # nodes of each chain of the second, one below the other, chain after chain

    @property
    def depth(self) -> int:
        """The deepest level of both."""
        return max(len(self.sizes), self.chain)


Join = Callable[[Proposal, Proposal, Pools, tuple[Tensor, Tensor]], Proposal]
"""(the network's pool, that of the matches, how they lie, expected and accepted by kinds and bins)
-> both as one, with tags as `packed` writes them."""

JointTally = Callable[
    [Draft, Verdict, Tensor, int, tuple[Tensor, Tensor], tuple[Tensor, Tensor]], Tensor
]
"""(draft with such tags, verdict, slot_B, the dummy's slot, the joint counts, the matches' counts)
-> the network's tags [B, R]. Counts one round in place for the joint values and the matches."""


def joined(
    first: Proposal, second: Proposal, pools: Pools, counts: tuple[Tensor, Tensor]
) -> Proposal:
    """Both pools as one: see `Join`. Fixed shapes, no host synchronisation."""
    joint = join(first, second, pools.sizes, pools.chain)
    step_BN = pooled(joint)
    tag_BN = noted(step_BN, _kinds(joint))
    step_BN = corrected(step_BN, tag_BN, counts)
    step_BN = step_BN.masked_fill(~joint.alive_BN, -torch.inf)
    return Proposal(
        tokens_BP=joint.tokens_BN,
        parent_BP=joint.parent_BN,
        depth_BP=joint.depth_BN,
        value_BP=_along_paths(joint, step_BN, pools.depth),
        tag_BP=packed(tag_BN, joint.first.tag_BN, joint.second.tag_BN),
    )


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


def pooled(joint: Joint) -> Tensor:
    """log P(accepted | parent is) of every node by both opinions together, float32 [B, N].

    Where both speak of a token their log odds are added, weighted (a logarithmic opinion pool,
    Genest and Zidek 1986, section 4), and the result is at least what the network says. Children
    of the network alone share what the matched ones leave, in the network's proportions, so that
    the chances of siblings never exceed 1 in sum.
    """
    network, match = joint.first.step_BN.exp(), joint.second.step_BN.exp()
    listed, matched = joint.first.tag_BN >= 0, joint.second.tag_BN >= 0
    family = Family(joint.parent_BN)
    least = family.least(torch.where(listed, network, torch.inf))
    opened = least < torch.inf  # the network has children here
    thinks = torch.where(listed, network, UNLISTED * least)
    both = _sigmoid_of(NETWORK_SAYS * _odds(thinks) + MATCH_SAYS * _odds(match)).maximum(
        torch.where(listed, network, 0.0)
    )
    claimed = torch.where(matched, torch.where(opened, both, match), 0.0)
    total = family.sum(claimed)
    claimed, total = claimed / total.clamp_min(1.0), total.clamp_max(1.0)
    left = 1 - total
    had = 1 - family.sum(torch.where(listed & matched, network, 0.0))
    share = (left / had.clamp_min(1e-6)).clamp(1e-6, 1.0)
    return torch.where(matched, claimed, network * share).log()


def packed(own: Tensor, network: Tensor, match: Tensor) -> Tensor:
    """Three notes as one number; -1 says that one of the two has none."""
    return ((match + 1) * NETWORK_ROOM + network + 1) * OWN_ROOM + own


def unpacked(tag: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three notes; all -1 at rows that nobody proposed."""
    both = tag.clamp_min(0) // OWN_ROOM
    own = torch.where(tag < 0, -1, tag % OWN_ROOM)
    return own, both % NETWORK_ROOM - 1, both // NETWORK_ROOM - 1


def _along_paths(joint: Joint, step_BN: Tensor, depth: int) -> Tensor:
    """Sums of logs from the root to every node, level by level."""
    parent_BN = joint.parent_BN
    value_BN = torch.where(parent_BN < 0, step_BN, -torch.inf)
    for level in range(2, depth + 1):
        below_BN = step_BN + value_BN.gather(1, parent_BN.clamp_min(0))
        value_BN = torch.where(joint.depth_BN == level, below_BN, value_BN)
    return value_BN


class Family:
    """Siblings of a joint pool: sums and minima over all children of a node's parent."""

    def __init__(self, parent_BN: Tensor) -> None:
        self._up_BN = parent_BN + 1  # 0: the root

    def sum(self, x_BN: Tensor) -> Tensor:
        """Sum over the node's siblings and itself: [B, N]."""
        total = x_BN.new_zeros(len(x_BN), x_BN.shape[1] + 1).scatter_add_(1, self._up_BN, x_BN)
        return total.gather(1, self._up_BN)

    def least(self, x_BN: Tensor) -> Tensor:
        """Minimum over the node's siblings and itself: [B, N]."""
        least = x_BN.new_full((len(x_BN), x_BN.shape[1] + 1), torch.inf)
        least.scatter_reduce_(1, self._up_BN, x_BN, "amin")
        return least.gather(1, self._up_BN)


def _odds(chance: Tensor) -> Tensor:
    """Log odds of a probability, kept finite."""
    chance = chance.clamp(1e-6, HIGHEST)
    return chance.log() - (1 - chance).log()


def _sigmoid_of(log_odds: Tensor) -> Tensor:
    return log_odds.sigmoid().clamp_max(HIGHEST)


def _kinds(joint: Joint) -> Tensor:
    """Who proposes each node: int64 [B, N]."""
    listed, matched = joint.first.tag_BN >= 0, joint.second.tag_BN >= 0
    return torch.where(listed & matched, BOTH, torch.where(matched, MATCH, NETWORK))


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

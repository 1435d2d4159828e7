"""Two drafters at once: n-gram matches and a network's guesses as one tree under one value.

Legend: B requests, N nodes of both pools, R rows of a draft.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from furcate.drafters.base import View
from furcate.drafters.footprint import Footprint
from furcate.drafters.judge import judge
from furcate.drafters.medusa import MedusaDrafter
from furcate.drafters.merge import Joint, join
from furcate.drafters.ngram import NgramDrafter
from furcate.drafters.recurrent import RecurrentDrafter
from furcate.drafters.trust import HIGHEST, Trust
from furcate.kernels.draft import Draft, Proposal, Verdict

__all__ = ["HybridDrafter", "pooled"]

# Weights of the two opinions' log odds where both speak of a token
NETWORK_SAYS = 0.8
MATCH_SAYS = 0.5
UNLISTED = 0.5  # of the network's least child: what it thinks of a token that it does not list
NETWORK, MATCH, BOTH = range(3)  # kinds of nodes
_OWN, _NETWORK = 1 << 18, 1 << 17  # room of the parts of a tag


class HybridDrafter:
    """Matches of the request's own text beside a network's tree.

    A node of both is worth what both together say, a match that the network does not see is still
    there, and what a sure match claims is taken from the network's other children. What the rounds
    say of nodes of the network alone, of a match alone, and of both, corrects the values further.

    Args:
        ngram: finds the matches.
        network: grows the other tree; told that rounds may accept as many nodes as matches are
            long (`Manner.longest`).
        capacity: the slot of the dummy request, from which nothing is learned.
        device: where the statistics live.
    """

    light = False

    def __init__(
        self,
        ngram: NgramDrafter,
        network: RecurrentDrafter | MedusaDrafter,
        *,
        capacity: int,
        device: torch.device,
    ) -> None:
        self.ngram = ngram
        self.network = network
        self.layers = network.layers
        self.depth = max(ngram.depth, network.depth)
        self.pool = ngram.pool + network.pool
        self.trust = Trust(device, kinds=3)
        self._sizes = [step.candidates for step in network.plan]
        self._dummy = capacity

    @property
    def footprint(self) -> Footprint:
        """The network's: matches keep nothing."""
        return self.network.footprint

    def keep(self, view: View, rows: Draft, features_BRF: Tensor) -> None:
        """The network's matter."""
        self.network.keep(view, rows, features_BRF)

    def read(self, view: View, rows: Draft) -> None:
        """The network's matter."""
        self.network.read(view, rows)

    def propose(self, view: View) -> Proposal:
        """Both trees as one."""
        joint = join(
            self.network.propose(view), self.ngram.propose(view), self._sizes, self.ngram.depth
        )
        step_BN = pooled(joint)
        tag_BN = self.trust.tags(step_BN, _kinds(joint))
        step_BN = self.trust.corrected(step_BN, tag_BN)
        step_BN = step_BN.masked_fill(~joint.alive_BN, -torch.inf)
        return Proposal(
            tokens_BP=joint.tokens_BN,
            parent_BP=joint.parent_BN,
            depth_BP=joint.depth_BN,
            value_BP=self._along_paths(joint, step_BN),
            tag_BP=_packed(tag_BN, joint.first.tag_BN, joint.second.tag_BN),
        )

    def learn(self, view: View, draft: Draft, verdict: Verdict, features_BRF: Tensor) -> None:
        """Each of the two hears of its own nodes, and the joint values of all."""
        assert draft.tag_BR is not None
        own_BR, network_BR, match_BR = _unpacked(draft.tag_BR)
        if draft.tag_BR.shape[1] > 1:
            self.trust.update(own_BR, judge(draft, verdict, view.slot_B != self._dummy))
        self.network.learn(view, replace(draft, tag_BR=network_BR), verdict, features_BRF)
        self.ngram.learn(view, replace(draft, tag_BR=match_BR), verdict, features_BRF)

    def forget(self, slot: int) -> None:
        """Neither keeps anything by slot."""
        self.network.forget(slot)
        self.ngram.forget(slot)

    def copy_page(self, source: int, target: int) -> None:
        """The network's matter."""
        self.network.copy_page(source, target)

    def _along_paths(self, joint: Joint, step_BN: Tensor) -> Tensor:
        """Sums of logs from the root to every node, level by level."""
        parent_BN = joint.parent_BN
        value_BN = torch.where(parent_BN < 0, step_BN, -torch.inf)
        for depth in range(2, self.depth + 1):
            below_BN = step_BN + value_BN.gather(1, parent_BN.clamp_min(0))
            value_BN = torch.where(joint.depth_BN == depth, below_BN, value_BN)
        return value_BN


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
    claimed = claimed / family.sum(claimed).clamp_min(1.0)
    left = 1 - family.sum(claimed)
    had = 1 - family.sum(torch.where(listed & matched, network, 0.0))
    share = (left / had.clamp_min(1e-6)).clamp(1e-6, 1.0)
    return torch.where(matched, claimed, network * share).log()


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


def _packed(own: Tensor, network: Tensor, match: Tensor) -> Tensor:
    """Three notes as one number; -1 says that one of the two has none."""
    return ((match + 1) * _NETWORK + network + 1) * _OWN + own


def _unpacked(tag: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three notes; all -1 at rows that nobody proposed."""
    both = tag.clamp_min(0) // _OWN
    own = torch.where(tag < 0, -1, tag % _OWN)
    return own, both % _NETWORK - 1, both // _NETWORK - 1

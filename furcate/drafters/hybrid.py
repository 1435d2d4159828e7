"""Two drafters at once: n-gram matches and a network's guesses as one tree under one value.

Legend: B requests, R rows of a draft, F features of the target.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from furcate.drafters.base import View
from furcate.drafters.footprint import Footprint
from furcate.drafters.judge import judge
from furcate.drafters.medusa import MedusaDrafter
from furcate.drafters.ngram import NgramDrafter
from furcate.drafters.recurrent import RecurrentDrafter
from furcate.drafters.trust import Trust
from furcate.kernels.backend import TORCH, Kernels
from furcate.kernels.draft import Draft, Proposal, Verdict
from furcate.kernels.joint import Pools, joined, unpacked

__all__ = ["HybridDrafter"]


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
        kernels: what joins and counts.
    """

    light = False

    def __init__(
        self,
        ngram: NgramDrafter,
        network: RecurrentDrafter | MedusaDrafter,
        *,
        capacity: int,
        device: torch.device,
        kernels: Kernels = TORCH,
    ) -> None:
        self.ngram = ngram
        self.network = network
        self.layers = network.layers
        self.depth = max(ngram.depth, network.depth)
        self.depths = network.depths
        self.pool = ngram.pool + network.pool
        self.trust = Trust(device, kinds=3)
        sizes = tuple(step.candidates for step in network.plan)
        begin_L = torch.tensor([*accumulate(sizes, initial=0)], dtype=torch.int32, device=device)
        self._pools = {
            levels: Pools(sizes[:levels], begin_L[: levels + 1], ngram.depth)
            for levels in self.depths
        }
        self.join_why = kernels.join_why(ngram.matches, max(sizes, default=1))
        self._join = joined if kernels.join is None or self.join_why else kernels.join
        self._tally = kernels.tally_joint
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

    def propose(self, view: View, levels: int) -> Proposal:
        """Both trees as one: so many levels of the network's, and all that the matches say."""
        network = self.network.propose(view, levels)
        matches = self.ngram.propose(view, self.ngram.depth)
        counts = (self.trust.expected_K, self.trust.accepted_K)
        return self._join(network, matches, self._pools[levels], counts)

    def learn(self, view: View, draft: Draft, verdict: Verdict, features_BRF: Tensor) -> None:
        """Each of the two hears of its own nodes, and the joint values of all."""
        if draft.tag_BR is not None and draft.tag_BR.shape[1] > 1:
            draft = replace(draft, tag_BR=self._heard(view, draft, verdict))
        self.network.learn(view, draft, verdict, features_BRF)

    def forget(self, slot: int) -> None:
        """Neither keeps anything by slot."""
        self.network.forget(slot)
        self.ngram.forget(slot)

    def copy_page(self, source: int, target: int) -> None:
        """The network's matter."""
        self.network.copy_page(source, target)

    def _heard(self, view: View, draft: Draft, verdict: Verdict) -> Tensor:
        """What a round says of the joint values and the matches; gives the network's tags."""
        trust, rates = self.trust, self.ngram.rates
        if self._tally is not None:
            counts = (trust.expected_K, trust.accepted_K), (rates.tried_K, rates.right_K)
            return self._tally(draft, verdict, view.slot_B, self._dummy, *counts)
        assert draft.tag_BR is not None
        own_BR, network_BR, match_BR = unpacked(draft.tag_BR)
        real_B = view.slot_B != self._dummy
        trust.update(own_BR, judge(draft, verdict, real_B))
        rates.update(match_BR, judge(replace(draft, tag_BR=match_BR), verdict, real_B))
        return network_BR

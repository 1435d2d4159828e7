"""N-gram drafter: what followed the same words earlier in the request, merged into one tree.

Legend: B requests, R rows, F features of the target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from furcate.config import DraftOptions
from furcate.drafters.base import View
from furcate.drafters.footprint import Footprint
from furcate.drafters.judge import judge
from furcate.drafters.ngram_calibration import Rates
from furcate.kernels.backend import TORCH, Kernels
from furcate.kernels.draft import Draft, Proposal, Verdict
from furcate.kernels.ngram import Search, lookup

__all__ = ["NgramDrafter"]

DEPTH = 16  # replayed on copied text, 8 levels are 9 % slower and 24 are 4 % faster
MATCHES = 8  # replayed at a CPU's costs, 4, 8, 12 and 16 are within 1 % of each other


class NgramDrafter:
    """Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) as a calibrated tree.

    Where a plain prompt lookup copies the continuation of one match, this one follows several and
    says of each node how likely its path is, so that the engine drafts many nodes inside a copied
    passage and none where only a common word recurs. Its state is a table of rates for all
    requests; no text outlives a round.

    Args:
        options: `depth` levels, `topk` matches, and the range of suffix lengths searched.
        capacity: the slot of the dummy request, from which nothing is learned.
        device: where the rates live.
        kernels: what looks up and counts.
    """

    light = True
    layers: tuple[int, ...] = ()
    footprint = Footprint()

    def __init__(
        self,
        options: DraftOptions,
        *,
        capacity: int,
        device: torch.device,
        kernels: Kernels = TORCH,
    ) -> None:
        self.depth = DEPTH if options.depth is None else options.depth
        self.depths: tuple[int, ...] = (self.depth,)
        self.matches = MATCHES if options.topk is None else options.topk
        self.pool = self.matches * self.depth
        self.rates = Rates(device)
        self._search = Search(
            self.depth, self.matches, options.prompt_lookup_min, options.prompt_lookup_max
        )
        self._lookup = kernels.lookup or lookup
        self._tally = kernels.tally_rates
        self._dummy = capacity

    def keep(self, view: View, rows: Draft, features_BRF: Tensor) -> None:
        """It needs no features."""

    def read(self, view: View, rows: Draft) -> None:
        """The view holds all the text there is; nothing is kept."""

    def propose(self, view: View, levels: int) -> Proposal:
        """The merged continuations of the best matches of each request's last tokens."""
        temperature_B, table = view.law.temperature_B, self.rates.table
        return self._lookup(view.tokens_BW, view.length_B, temperature_B, self._search, table)

    def learn(self, view: View, draft: Draft, verdict: Verdict, features_BRF: Tensor) -> None:
        """Correct the rates by the drafted nodes whose parents were accepted."""
        if draft.tag_BR is None or draft.tag_BR.shape[1] == 1:
            return
        if self._tally is None:
            self.rates.update(draft.tag_BR, judge(draft, verdict, view.slot_B != self._dummy))
        else:
            counts = (self.rates.tried_K, self.rates.right_K)
            self._tally(draft, verdict, view.slot_B, self._dummy, counts)

    def forget(self, slot: int) -> None:
        """Only rates outlive a round, and they belong to no request."""

    def copy_page(self, source: int, target: int) -> None:
        """There is no cache to follow."""

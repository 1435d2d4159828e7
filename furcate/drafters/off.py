"""The drafter that never proposes: plain decoding, and the yardstick of every other drafter.

Legend: B requests, P pool nodes (one, always dead).
"""

from __future__ import annotations

import torch
from torch import Tensor

from furcate.drafters.base import View
from furcate.drafters.footprint import Footprint
from furcate.kernels.draft import Draft, Proposal, Verdict

__all__ = ["OffDrafter"]


class OffDrafter:
    """Proposes one dead slot, so that every stage keeps a pool of legal shape."""

    depth = 0
    depths: tuple[int, ...] = ()
    pool = 1
    light = True
    layers: tuple[int, ...] = ()
    footprint = Footprint()

    def keep(self, view: View, rows: Draft, features_BRF: Tensor) -> None:
        """It needs no features."""

    def read(self, view: View, rows: Draft) -> None:
        """There is no cache to fill."""

    def propose(self, view: View, levels: int) -> Proposal:
        """A pool in which nothing lives."""
        shape, device = (view.length_B.shape[0], self.pool), view.length_B.device
        return Proposal(
            tokens_BP=torch.zeros(shape, dtype=torch.int64, device=device),
            parent_BP=torch.full(shape, -1, dtype=torch.int64, device=device),
            depth_BP=torch.ones(shape, dtype=torch.int64, device=device),
            value_BP=torch.full(shape, -torch.inf, dtype=torch.float32, device=device),
        )

    def learn(self, view: View, draft: Draft, verdict: Verdict, features_BRF: Tensor) -> None:
        """Nothing was proposed, so there is nothing to learn."""

    def forget(self, slot: int) -> None:
        """No request leaves anything behind."""

    def copy_page(self, source: int, target: int) -> None:
        """There is no cache to follow."""

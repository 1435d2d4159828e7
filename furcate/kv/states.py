"""One state of the target per slot, in pages of the same numbers as its keys and values.

Legend: B requests, X positions of each, S slots, C size of a state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from furcate.kernels.tree_attention import Places, slots_of
from furcate.kv.cache import zeros

__all__ = ["StatePool"]


class StatePool:
    """What a draft head remembers of every committed position.

    The state of a position depends on the tokens up to it alone, so a page may be shared by all
    whose tokens begin alike, exactly as the page of keys with the same number.
    """

    def __init__(self, slots: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.state_SC = zeros((slots, size), dtype, device)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.state_SC.shape[1] * self.state_SC.itemsize

    def read(self, places: Places, at_BX: Tensor) -> Tensor:
        """The states of these positions, [B, X, C]; zeros at position -1."""
        slot_X = slots_of(places, at_BX).flatten()
        return self.state_SC.index_select(0, slot_X).view(*at_BX.shape, -1)

    def copy_page(self, source: int, target: int, page_size: int) -> None:
        """Follow the target's cache when it copies a shared page."""
        old = slice(source * page_size, (source + 1) * page_size)
        new = slice(target * page_size, (target + 1) * page_size)
        self.state_SC[new] = self.state_SC[old]

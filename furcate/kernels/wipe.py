"""Zero what requests leave behind: pages in all layers, and whole buffers; torch reference.

Legend: L layers, S slots, X pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["wipe"]


def wipe(
    pools_LS: Sequence[Tensor], page_X: Tensor, page_size: int, buffers: Sequence[Tensor] = ()
) -> None:
    """Zero these pages of every pool, and all of every buffer, in place.

    Args:
        pools_LS: tensors [layers, slots, ...]; page p holds slots [p * page_size, (p + 1) * ...).
        page_X: int64, any order; -1 pads stand for page 0, which is scratch and nobody's.
        page_size: slots of a page.
        buffers: tensors of any shape and dtype.
    """
    slot_XP = page_X.clamp_min(0)[:, None] * page_size
    slot_XP = slot_XP + torch.arange(page_size, device=page_X.device)
    for pool_LS in pools_LS:
        pool_LS.index_fill_(1, slot_XP.flatten(), 0)
    for buffer in buffers:
        buffer.zero_()

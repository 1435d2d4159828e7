"""Move the accepted path's keys and values into place, over all layers at once.

Legend: B requests, R rows, D accepted levels, L layers, S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from furcate.kernels.draft import Verdict
from furcate.kernels.tree_attention import SCRATCH

__all__ = ["move_path"]


def move_path(pools_LS: tuple[Tensor, ...], slot_BR: Tensor, verdict: Verdict) -> None:
    """Copy the slot of row `path[i]` to the slot of row i, for 1 <= i < count, in place.

    `pools_LS` are tensors [layers, slots, ...]. In preorder path[i] >= i, so a source is never
    overwritten before it is read; this torch reference reads all sources first. Levels past the
    path copy the scratch slot onto itself.
    """
    level_D = torch.arange(verdict.path_BD.shape[1], device=slot_BR.device)
    moved_BD = (level_D > 0) & (level_D < verdict.count_B[:, None])
    source = torch.where(moved_BD, slot_BR.gather(1, verdict.path_BD), SCRATCH).flatten()
    target = torch.where(moved_BD, slot_BR[:, : len(level_D)], SCRATCH).flatten()
    for pool_LS in pools_LS:
        pool_LS.index_copy_(1, target, pool_LS.index_select(1, source))

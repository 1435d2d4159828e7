"""Which of the target's features belong to committed positions, and which positions those are.

Legend: B requests, R rows of one pass, D levels, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from furcate.drafters.base import View
from furcate.kernels.draft import Draft, Verdict

__all__ = ["of_chain", "of_path"]


def of_chain(view: View, rows: Draft) -> Tensor:
    """Positions of a stretch of committed tokens, int64 [B, R]; -1 where a row is none."""
    row_R = torch.arange(rows.tokens_BR.shape[1], device=rows.live_B.device)
    live_BR = row_R < rows.live_B[:, None]
    return torch.where(live_BR, view.length_B[:, None] + row_R, -1)


def of_path(view: View, verdict: Verdict, features_BRF: Tensor) -> tuple[Tensor, Tensor]:
    """(positions [B, D], -1 past the verdict's end; features [B, D, F]) of the root and the
    accepted nodes. `view` is the state before the commit."""
    path_BD = verdict.path_BD
    level_D = torch.arange(path_BD.shape[1], device=path_BD.device)
    kept_BD = level_D < verdict.count_B[:, None]
    position_BD = torch.where(kept_BD, view.length_B[:, None] + level_D, -1)
    index_BDF = path_BD[..., None].expand(-1, -1, features_BRF.shape[2])
    return position_BD, features_BRF.gather(1, index_BDF)

"""Which drafted nodes were put to the test in a round, and which of them passed.

Legend: B requests, R rows of a draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.kernels.draft import Draft, Verdict

__all__ = ["Judged", "judge"]


@dataclass(frozen=True, slots=True)
class Judged:
    """What a round says of its rows. The root and pads are never judged."""

    tried_BR: Tensor  # bool, a drafted node whose parent is the root or was accepted
    right_BR: Tensor  # bool, accepted; a subset of `tried`


def judge(draft: Draft, verdict: Verdict, real_B: Tensor) -> Judged:
    """Rows of requests that are not `real` (bool) count for nothing, nor do rows without a tag."""
    batch, rows = draft.tokens_BR.shape
    path_BR = torch.zeros(batch, rows, dtype=torch.bool, device=real_B.device)
    path_BR = path_BR.scatter(1, verdict.path_BD, True)
    row_R = torch.arange(rows, device=real_B.device)
    drafted_BR = (row_R > 0) & (row_R < draft.live_B[:, None]) & real_B[:, None]
    if draft.tag_BR is not None:
        drafted_BR &= draft.tag_BR >= 0
    tried_BR = drafted_BR & path_BR.gather(1, draft.parent_BR)
    return Judged(tried_BR, tried_BR & path_BR)

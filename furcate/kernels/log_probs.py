"""Logarithms of probabilities over a whole vocabulary, kept for some of its tokens.

Legend: N rows, V vocabulary, D columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["log_probs"]


def log_probs(score_NV: Tensor, column_D: Tensor, dtype: torch.dtype) -> Tensor:
    """log softmax(score) at these columns (int64), [N, D] in `dtype`.

    Rounding to half precision after the normaliser is taken off keeps likely tokens precise: their
    logarithms are near 0, while scores may be 40.
    """
    lse_N1 = score_NV.logsumexp(1, keepdim=True)
    return (score_NV.index_select(1, column_D) - lse_N1).to(dtype)

"""Log probabilities in Triton: scores are read once for the normaliser, then only where needed.

Twin of `log_probs`. Legend: N rows, V vocabulary, D columns, B entries of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["log_probs"]

_TILE = 4096


def log_probs(score_NV: Tensor, column_D: Tensor, dtype: torch.dtype) -> Tensor:
    """As its twin says; the sums are float32."""
    (rows, vocab), columns = score_NV.shape, len(column_D)
    assert score_NV.is_contiguous() and column_D.is_contiguous()
    out_ND = score_NV.new_empty((rows, columns), dtype=dtype)
    tile = min(_TILE, triton.next_power_of_2(vocab))
    _log_probs[(rows,)](score_NV, column_D, out_ND, vocab, columns, B=tile, num_warps=8)
    return out_ND


@triton.jit
def _log_probs(score_ptr, column_ptr, out_ptr, vocab, columns, B: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    score_ptr += row * vocab
    none = float("-inf")
    most_B = tl.full((B,), none, tl.float32)
    sum_B = tl.zeros((B,), tl.float32)
    for start in range(0, vocab, B):
        at_B = start + tl.arange(0, B)
        score_B = tl.load(score_ptr + at_B, mask=at_B < vocab, other=none).to(tl.float32)
        new_B = tl.maximum(most_B, score_B)
        base_B = tl.where(new_B == none, 0.0, new_B)
        sum_B = sum_B * tl.exp(most_B - base_B) + tl.exp(score_B - base_B)
        most_B = new_B
    most = tl.max(most_B, 0)
    lse = most + tl.log(tl.sum(sum_B * tl.exp(most_B - most), 0))
    for start in range(0, columns, B):
        at_B = start + tl.arange(0, B)
        column_B = tl.load(column_ptr + at_B, mask=at_B < columns, other=0)
        score_B = tl.load(score_ptr + column_B, mask=at_B < columns, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * columns + at_B, score_B - lse, mask=at_B < columns)

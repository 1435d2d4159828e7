"""Soft cross entropy in Triton: a row is read once, stays in registers, and is written once.

Twin of `soft_cross_entropy`. Legend: N rows, D columns, B columns of a program: all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.soft_cross_entropy import Objective, Scores

__all__ = ["soft_cross_entropy"]

_LARGE = 16384  # columns beyond which a row needs the most threads there are


def soft_cross_entropy(
    draft_ND: Tensor, log_p_ND: Tensor, bias_D: Tensor, weight_N: Tensor, objective: Objective
) -> Scores:
    """As its twin says; the sums are float32."""
    rows, columns = draft_ND.shape
    assert draft_ND.is_contiguous() and log_p_ND.is_contiguous() and bias_D.is_contiguous()
    assert log_p_ND.shape == draft_ND.shape and weight_N.is_contiguous()
    found = draft_ND.new_empty((3, rows), dtype=torch.float32)
    _score[(rows,)](
        draft_ND,
        log_p_ND,
        bias_D,
        weight_N,
        found,
        rows,
        columns,
        objective.kl_scale,
        objective.kl_decay,
        LK=objective.kind == "lk",
        B=triton.next_power_of_2(columns),
        num_warps=16 if columns <= _LARGE else 32,
    )
    return Scores(*found.unbind())


@triton.jit
def _score(
    draft_ptr,
    log_p_ptr,
    bias_ptr,
    weight_ptr,
    found_ptr,
    rows,
    columns,
    kl_scale,
    kl_decay,
    LK: tl.constexpr,
    B: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    at_B = tl.arange(0, B)
    used_B = at_B < columns
    none = float("-inf")
    raw_B = tl.load(draft_ptr + row * columns + at_B, mask=used_B, other=none).to(tl.float32)
    log_p_B = tl.load(log_p_ptr + row * columns + at_B, mask=used_B, other=none).to(tl.float32)
    agree = tl.argmax(raw_B, 0) == tl.argmax(log_p_B, 0)  # of equal ones the first
    bias_B = tl.load(bias_ptr + at_B, mask=used_B, other=0.0)
    p_B = tl.exp(log_p_B + bias_B)
    z_B = raw_B + bias_B
    most = tl.max(z_B, 0)
    q_B = tl.exp(z_B - most)
    total = tl.sum(q_B, 0)
    q_B = q_B / total
    mass = tl.sum(p_B, 0)
    dot = tl.sum(p_B * tl.where(used_B, z_B, 0.0), 0)
    overlap = tl.sum(tl.minimum(p_B, q_B), 0)
    slope_B = mass * q_B - p_B
    if LK:
        below_B = tl.where(q_B < p_B, 1.0, 0.0)
        part = kl_scale * tl.exp(-kl_decay * overlap)
        rise_B = q_B * (below_B - tl.sum(q_B * below_B, 0))
        slope_B = part * slope_B - (1.0 - part) * rise_B
    weight = tl.load(weight_ptr + row)
    tl.store(draft_ptr + row * columns + at_B, slope_B * weight, mask=used_B)
    tl.store(found_ptr + row, mass * (most + tl.log(total)) - dot)
    tl.store(found_ptr + rows + row, overlap)
    tl.store(found_ptr + 2 * rows + row, agree.to(tl.float32))

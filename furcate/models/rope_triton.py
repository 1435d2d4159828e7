"""The rotary turn on a GPU in one kernel, and its slope: the turn by the opposite angle.

Twin of `rope.turn`. Legend: T rows, H heads, D head size, half = D / 2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["turn"]

_LANES = 1024  # pairs of a program


def turn(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """As its twin says; products and sums are float32. The result is dense."""
    turned_THD: Tensor = _Turn.apply(x_THD, cos_T1D, sin_T1D)
    return turned_THD


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1D, sin_T1D)
        return _turned(x_THD, cos_T1D, sin_T1D, opposite=False)

    @staticmethod
    def backward(ctx: Any, slope_THD: Tensor) -> tuple[Tensor, None, None]:
        return _turned(slope_THD, *ctx.saved_tensors, opposite=True), None, None


def _turned(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, *, opposite: bool) -> Tensor:
    rows, heads, size = x_THD.shape
    assert x_THD.stride(2) == 1 and cos_T1D.is_contiguous() and sin_T1D.is_contiguous()
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    half = triton.next_power_of_2(size // 2)
    block = max(1, _LANES // half)  # heads of rows side by side
    _kernel[(triton.cdiv(rows * heads, block),)](
        x_THD,
        cos_T1D,
        sin_T1D,
        out_THD,
        rows * heads,
        heads,
        x_THD.stride(0),
        x_THD.stride(1),
        SIZE=size,
        OPPOSITE=opposite,
        BLOCK=block,
        HALF=half,
    )
    return out_THD


@triton.jit
def _kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    count,
    heads,
    row_stride,
    head_stride,
    SIZE: tl.constexpr,
    OPPOSITE: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
):
    """`BLOCK` heads, whichever rows they belong to; pair i is entries i and i + SIZE / 2."""
    at_B1 = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None].to(tl.int64)
    pair_1F = tl.arange(0, HALF)[None, :]
    used = (at_B1 < count) & (pair_1F < SIZE // 2)
    row_B1 = at_B1 // heads
    x_at = row_B1 * row_stride + (at_B1 % heads) * head_stride + pair_1F
    angle_at = row_B1 * SIZE + pair_1F
    first = tl.load(x_ptr + x_at, mask=used, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + x_at + SIZE // 2, mask=used, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + angle_at, mask=used, other=0.0).to(tl.float32)
    # the second half of `sin` has the sign of the turn, the first its opposite
    sin = tl.load(sin_ptr + angle_at + SIZE // 2, mask=used, other=0.0).to(tl.float32)
    if OPPOSITE:
        sin = -sin
    out_at = at_B1 * SIZE + pair_1F
    tl.store(out_ptr + out_at, first * cos - second * sin, mask=used)
    tl.store(out_ptr + out_at + SIZE // 2, second * cos + first * sin, mask=used)

"""A sum and its norm on a GPU in one kernel: one program a row.

Twin of `norm.add_norm`. Legend: T rows, C hidden size, B entries of a program: C padded to a power
of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from furcate.models.norm import RmsNorm
from furcate.pdl import LAUNCH, let_next_begin, wait_for_last

__all__ = ["add_norm"]


def add_norm(x: Tensor, more: Tensor | None, norm: RmsNorm) -> tuple[Tensor, Tensor]:
    """As its twin says; the norm is that of the rounded sum, computed in float32.

    A row's result does not depend on the rows beside it.
    """
    x_TC = _rows(x)
    more_TC = None if more is None else _rows(more)
    assert norm.weight.is_contiguous()
    assert more is None or (more.shape == x.shape and more.dtype == x.dtype)
    (rows, size), normed = x_TC.shape, x.new_empty(x.shape)
    total = x if more is None else x.new_empty(x.shape)
    block = triton.next_power_of_2(size)
    _add_norm[(rows,)](
        x_TC,
        more_TC,
        norm.weight,
        total,
        normed,
        size,
        x_TC.stride(0),
        0 if more_TC is None else more_TC.stride(0),
        norm.eps,
        B=block,
        num_warps=min(16, max(4, block // 512)),
        **LAUNCH,
    )
    return total, normed


def _rows(x: Tensor) -> Tensor:
    rows_TC = x.reshape(-1, x.shape[-1])
    return rows_TC if rows_TC.stride(1) == 1 else rows_TC.contiguous()


@triton.jit
def _add_norm(
    x_ptr,
    more_ptr,
    weight_ptr,
    sum_ptr,
    normed_ptr,
    size,
    x_stride,
    more_stride,
    eps,
    B: tl.constexpr,
):
    let_next_begin()
    row = tl.program_id(0).to(tl.int64)
    at_B = tl.arange(0, B)
    used_B = at_B < size
    weight_B = tl.load(weight_ptr + at_B, mask=used_B, other=0.0).to(tl.float32)
    wait_for_last()
    sum_B = tl.load(x_ptr + row * x_stride + at_B, mask=used_B, other=0.0).to(tl.float32)
    if more_ptr is not None:
        more_B = tl.load(more_ptr + row * more_stride + at_B, mask=used_B, other=0.0)
        rounded_B = (sum_B + more_B.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * size + at_B, rounded_B, mask=used_B)
        sum_B = rounded_B.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(sum_B * sum_B, 0) / size + eps)
    tl.store(normed_ptr + row * size + at_B, sum_B * scale * weight_B, mask=used_B)

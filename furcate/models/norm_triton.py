"""A sum and its norm on a GPU in one kernel: one program a row.

Twin of `norm.add_norm`. Legend: T rows, C hidden size, B entries of a program: C padded to a power
of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_norm"]


def add_norm(x_TC: Tensor, more_TC: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As its twin says; the norm is that of the rounded sum, computed in float32."""
    rows, size = x_TC.shape
    assert x_TC.shape == more_TC.shape and x_TC.dtype == more_TC.dtype
    assert x_TC.stride(1) == more_TC.stride(1) == 1 and weight_C.is_contiguous()
    sum_TC, normed_TC = x_TC.new_empty((rows, size)), x_TC.new_empty((rows, size))
    block = triton.next_power_of_2(size)
    _add_norm[(rows,)](
        x_TC,
        more_TC,
        weight_C,
        sum_TC,
        normed_TC,
        size,
        x_TC.stride(0),
        more_TC.stride(0),
        eps,
        B=block,
        num_warps=min(16, max(4, block // 512)),
    )
    return sum_TC, normed_TC


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
    row = tl.program_id(0).to(tl.int64)
    at_B = tl.arange(0, B)
    used_B = at_B < size
    x_B = tl.load(x_ptr + row * x_stride + at_B, mask=used_B, other=0.0).to(tl.float32)
    more_B = tl.load(more_ptr + row * more_stride + at_B, mask=used_B, other=0.0).to(tl.float32)
    weight_B = tl.load(weight_ptr + at_B, mask=used_B, other=0.0).to(tl.float32)
    sum_B = (x_B + more_B).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * size + at_B, sum_B, mask=used_B)
    sum_B = sum_B.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(sum_B * sum_B, 0) / size + eps)
    tl.store(normed_ptr + row * size + at_B, sum_B * scale * weight_B, mask=used_B)

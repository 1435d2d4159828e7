"""Rows picked, normed and laid side by side in Triton: one program a row and part.

Twin of `beside`. Legend: B requests, R rows of each, T = B * R flat rows, S rows to pick from, C
columns of a part, I columns of all parts, P parts, K columns of a program: C padded to a power of
two.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.beside import MOST_PARTS, Norm, Part, Rows

__all__ = ["beside"]


def beside(parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """As its twin says, in one launch; norms are computed in float32.

    A row's result does not depend on the rows beside it. Numbers lie dense.
    """
    assert 1 <= len(parts) <= MOST_PARTS
    first, last = parts[0][0], parts[-1][0]
    rows, width = first.number_BR.numel(), sum(part.x_SC.shape[1] for part, _ in parts)
    out_TI = first.x_SC.new_empty((rows, width))
    last_TC = first.x_SC.new_empty((rows, last.x_SC.shape[1]))
    given: list[Tensor | int | float | None] = []
    for part, norm in parts:
        assert part.x_SC.dtype == out_TI.dtype and part.x_SC.stride(1) == 1
        assert part.number_BR.shape == first.number_BR.shape and part.number_BR.is_contiguous()
        given += _arguments(part, norm)
    given += [None, None, None, 0.0, 0, 0, 0] * (MOST_PARTS - len(parts))
    block = triton.next_power_of_2(max(part.x_SC.shape[1] for part, _ in parts))
    _beside[(rows, len(parts))](
        *given,
        out_TI,
        last_TC,
        first.number_BR.shape[1],
        width,
        P=len(parts),
        K=block,
        num_warps=min(16, max(4, block // 512)),
    )
    return out_TI, last_TC


def _arguments(part: Rows, norm: Norm | None) -> list[Tensor | int | float | None]:
    """A part as the kernel takes it."""
    weight = None if norm is None else norm.weight
    assert weight is None or weight.is_contiguous()
    x_SC = part.x_SC
    eps = 0.0 if norm is None else norm.eps
    return [x_SC, part.number_BR, weight, eps, part.step, x_SC.stride(0), x_SC.shape[1]]


@triton.jit(do_not_specialize=["each", "step_a", "step_b", "step_c", "step_d"])
def _beside(
    a_ptr, number_a_ptr, norm_a_ptr, eps_a, step_a, stride_a, size_a,
    b_ptr, number_b_ptr, norm_b_ptr, eps_b, step_b, stride_b, size_b,
    c_ptr, number_c_ptr, norm_c_ptr, eps_c, step_c, stride_c, size_c,
    d_ptr, number_d_ptr, norm_d_ptr, eps_d, step_d, stride_d, size_d,
    out_ptr,
    last_ptr,
    each,
    width,
    P: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    request = t // each
    out_ptr += t * width
    if part == 0:
        row_ptr = a_ptr + (tl.load(number_a_ptr + t) + request * step_a) * stride_a
        _lay(row_ptr, norm_a_ptr, eps_a, size_a, out_ptr, last_ptr + t * size_a, P == 1, K)
    if P > 1:
        out_ptr += size_a
        if part == 1:
            row_ptr = b_ptr + (tl.load(number_b_ptr + t) + request * step_b) * stride_b
            _lay(row_ptr, norm_b_ptr, eps_b, size_b, out_ptr, last_ptr + t * size_b, P == 2, K)
    if P > 2:
        out_ptr += size_b
        if part == 2:
            row_ptr = c_ptr + (tl.load(number_c_ptr + t) + request * step_c) * stride_c
            _lay(row_ptr, norm_c_ptr, eps_c, size_c, out_ptr, last_ptr + t * size_c, P == 3, K)
    if P > 3:
        out_ptr += size_c
        if part == 3:
            row_ptr = d_ptr + (tl.load(number_d_ptr + t) + request * step_d) * stride_d
            _lay(row_ptr, norm_d_ptr, eps_d, size_d, out_ptr, last_ptr + t * size_d, P == 4, K)


@triton.jit
def _lay(
    row_ptr, norm_ptr, eps, size, out_ptr, last_ptr, LAST: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """One row of one part, and a copy of it as it is if it is the last."""
    k_K = tl.arange(0, K)
    used_K = k_K < size
    x_K = tl.load(row_ptr + k_K, mask=used_K, other=0.0)
    if LAST:
        tl.store(last_ptr + k_K, x_K, mask=used_K)
    if norm_ptr is not None:
        exact_K = x_K.to(tl.float32)
        weight_K = tl.load(norm_ptr + k_K, mask=used_K, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(exact_K * exact_K, 0) / size + eps)
        tl.store(out_ptr + k_K, exact_K * scale * weight_K, mask=used_K)
    else:
        tl.store(out_ptr + k_K, x_K, mask=used_K)

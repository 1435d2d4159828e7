"""Rows picked, normed and laid side by side in Triton, and their angles: a program a row and part.

Twin of `beside`, and of the models' `Rope`. Legend: B requests, R rows of each, T = B * R flat
rows, S rows to pick from, C columns of a part, I columns of all parts, P parts, K columns of a
program: C padded to a power of two, D head size, F = D / 2 frequencies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.angles_triton import lay_angles
from furcate.kernels.beside import MOST_PARTS, Angles, Laid, Norm, Part, Rows

__all__ = ["beside"]

_EVERY = (1 << 31) - 1  # rows: numbers are never above it

_Given = Tensor | int | float | None


def beside(parts: Sequence[Part], angles: Angles | None = None) -> Laid:
    """As its twin says, in one launch; norms and angles are computed in float32.

    A row's result does not depend on the rows beside it. Numbers and positions lie dense.
    """
    assert 1 <= len(parts) <= MOST_PARTS
    first, last = parts[0][0], parts[-1][0]
    rows, width = first.number_BR.numel(), sum(part.x_SC.shape[1] for part, _ in parts)
    out_TI = first.x_SC.new_empty((rows, width))
    last_TC = first.x_SC.new_empty((rows, last.x_SC.shape[1]))
    given: list[_Given] = []
    for part, norm in parts:
        assert part.x_SC.dtype == out_TI.dtype and part.x_SC.stride(1) == 1
        assert part.number_BR.shape == first.number_BR.shape and part.number_BR.is_contiguous()
        given += _arguments(part, norm)
    given += [None, None, None, 0.0, 0, 0, 0, 0] * (MOST_PARTS - len(parts))
    turned = None if angles is None else _unmade(angles, out_TI)
    pairs = 0 if angles is None else len(angles.freq_F)
    block = triton.next_power_of_2(max(part.x_SC.shape[1] for part, _ in parts))
    _beside[(rows, len(parts) + (angles is not None))](
        *given,
        out_TI,
        last_TC,
        *_bearing(angles, turned),
        first.number_BR.shape[1],
        width,
        P=len(parts),
        K=block,
        F=pairs,
        LANES_F=triton.next_power_of_2(max(1, pairs)),
        num_warps=min(16, max(4, block // 512)),
        enable_fp_fusion=False,  # angles round as the torch path's do
    )
    return Laid(out_TI, last_TC, turned)


def _arguments(part: Rows, norm: Norm | None) -> list[_Given]:
    """A part as the kernel takes it."""
    weight = None if norm is None else norm.weight
    assert weight is None or weight.is_contiguous()
    x_SC, last = part.x_SC, _EVERY if part.last is None else part.last
    eps = 0.0 if norm is None else norm.eps
    return [x_SC, part.number_BR, weight, eps, part.step, last, x_SC.stride(0), x_SC.shape[1]]


def _unmade(angles: Angles, like: Tensor) -> tuple[Tensor, Tensor]:
    """Room for cosines and sines, [T, 1, D] each."""
    assert angles.position_T.shape == (len(like),) and angles.freq_F.dtype == torch.float32
    assert angles.position_T.is_contiguous() and angles.freq_F.is_contiguous()
    size = (len(like), 1, 2 * len(angles.freq_F))
    return like.new_empty(size), like.new_empty(size)


def _bearing(angles: Angles | None, turned: tuple[Tensor, Tensor] | None) -> tuple[_Given, ...]:
    """Angles as the kernel takes them."""
    if angles is None or turned is None:
        return None, None, None, None, 0.0
    return angles.position_T, angles.freq_F, *turned, angles.factor


@triton.jit(
    do_not_specialize=[
        "each", "step_a", "step_b", "step_c", "step_d", "top_a", "top_b", "top_c", "top_d"
    ]
)  # fmt: skip
def _beside(
    a_ptr, number_a_ptr, norm_a_ptr, eps_a, step_a, top_a, stride_a, size_a,
    b_ptr, number_b_ptr, norm_b_ptr, eps_b, step_b, top_b, stride_b, size_b,
    c_ptr, number_c_ptr, norm_c_ptr, eps_c, step_c, top_c, stride_c, size_c,
    d_ptr, number_d_ptr, norm_d_ptr, eps_d, step_d, top_d, stride_d, size_d,
    out_ptr,
    last_ptr,
    position_ptr,
    freq_ptr,
    cos_ptr,
    sin_ptr,
    factor,
    each,
    width,
    P: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    LANES_F: tl.constexpr,
):  # fmt: skip
    """A part of a row, or behind the parts its angles."""
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    request = t // each
    out_ptr += t * width
    if part == 0:
        row_ptr = a_ptr + _row(number_a_ptr + t, top_a, request * step_a) * stride_a
        _lay(row_ptr, norm_a_ptr, eps_a, size_a, out_ptr, last_ptr + t * size_a, P == 1, K)
    if P > 1:
        out_ptr += size_a
        if part == 1:
            row_ptr = b_ptr + _row(number_b_ptr + t, top_b, request * step_b) * stride_b
            _lay(row_ptr, norm_b_ptr, eps_b, size_b, out_ptr, last_ptr + t * size_b, P == 2, K)
    if P > 2:
        out_ptr += size_b
        if part == 2:
            row_ptr = c_ptr + _row(number_c_ptr + t, top_c, request * step_c) * stride_c
            _lay(row_ptr, norm_c_ptr, eps_c, size_c, out_ptr, last_ptr + t * size_c, P == 3, K)
    if P > 3:
        out_ptr += size_c
        if part == 3:
            row_ptr = d_ptr + _row(number_d_ptr + t, top_d, request * step_d) * stride_d
            _lay(row_ptr, norm_d_ptr, eps_d, size_d, out_ptr, last_ptr + t * size_d, P == 4, K)
    if F > 0 and part == P:
        position = tl.load(position_ptr + t)
        lay_angles(position, t, freq_ptr, cos_ptr, sin_ptr, factor, F, LANES_F)


@triton.jit
def _row(number_ptr, top, first):
    """The row to pick, where a request's own begin at `first`."""
    return first + tl.minimum(tl.load(number_ptr), top)


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

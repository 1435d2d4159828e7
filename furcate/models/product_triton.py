"""A product with a weight that is read once for up to 64 rows, and what stands around it.

Twin of the products of `blocks.TORCH`: before it a norm, behind it a bias, a gate or a sum, all in
one kernel. Legend: T rows, I inputs, O outputs; of one program: M rows, N rows of the weight, K
inputs of a step; S programs share a tile's inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.models.linear import Matrix
from furcate.models.norm import RmsNorm
from furcate.models.norm_triton import add_norm
from furcate.models.product_cut import Size, Tile
from furcate.models.product_join_triton import arrived_last, joined, keep_part, parts_of, tickets
from furcate.pdl import LAUNCH, let_next_begin, wait_for_last
from furcate.shared_memory import shared_memory

__all__ = ["Multiply", "product", "tiled"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Multiply(Protocol):
    """A way to compute a product; see `product`."""

    def __call__(
        self,
        x: Tensor,
        by: Matrix,
        /,
        *,
        norm: RmsNorm | None = None,
        add: Tensor | None = None,
        gated: bool = False,
    ) -> Tensor: ...


def tiled(cut: Callable[[Size], Tile]) -> Multiply:
    """`product`, cut like this."""
    return partial(product, cut=cut)


def product(
    x_TI: Tensor,
    by: Matrix,
    cut: Callable[[Size], Tile],
    *,
    norm: RmsNorm | None = None,
    add: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """x Wᵀ + b in the dtype of x, [T, O]; sums are float32, and float32 is IEEE float32.

    Args:
        x_TI: entries of a row lie dense.
        by: the weight is dense, [O, I].
        cut: how it is cut.
        norm: x is normed first. Its scale is one number a row and multiplies the sums instead,
            but where the cut keeps it apart.
        add: [T, O], is added at the end; not where it is gated.
        gated: half of the outputs are gates and half ups, and the result is `gate.gated` of them.
    """
    (rows, inputs), outputs = x_TI.shape, by.weight.shape[0]
    assert x_TI.dtype in _DTYPES and by.weight.dtype == x_TI.dtype
    assert x_TI.stride(1) == 1 and by.weight.is_contiguous() and by.weight.shape[1] == inputs
    assert not gated or (add is None and outputs % 2 == 0)
    assert not torch.is_grad_enabled() or not by.weight.requires_grad, "there is no slope"
    size = Size(rows, outputs, inputs, x_TI.dtype, shared_memory(x_TI.device))
    tile = cut(size)
    if norm is not None and tile.apart:
        x_TI, norm = add_norm(x_TI, None, norm)[1], None
    width = outputs // 2 if gated else outputs
    if add is not None:
        assert add.shape == (rows, width) and add.stride(1) == 1
    shared = tile.splits > 1
    out_TO = x_TI.new_empty((rows, width))
    # tiles of rows that share a tile of the weight follow one another
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs), tile.splits)
    _product[grid](
        x_TI,
        None if norm is None else norm.weight,
        by.weight,
        by.bias,
        add,
        out_TO,
        parts_of(x_TI, size, tile) if shared else None,
        tickets(x_TI, tile.tiles(size)) if shared else None,
        rows,
        x_TI.stride(0),
        0 if add is None else add.stride(0),
        0.0 if norm is None else norm.eps,
        I=inputs,
        O=outputs,
        GATED=gated,
        M=tile.rows,
        N=tile.outputs,
        K=tile.inputs,
        S=tile.splits,
        STRETCH=tile.stretch(inputs),
        PRECISION="ieee" if x_TI.dtype == torch.float32 else None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **LAUNCH,
    )
    return out_TO


@triton.jit(do_not_specialize=["rows"])
def _product(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    add_ptr,
    out_ptr,
    part_ptr,
    ticket_ptr,
    rows,
    x_stride,
    add_stride,
    eps,
    I: tl.constexpr,  # noqa: E741 - inputs, as in the legend
    O: tl.constexpr,  # noqa: E741
    GATED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    STRETCH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A stretch of the inputs of one tile of rows and outputs. Weights are the left factor, whose
    side does not depend on M, so that the same instructions add up a row's products for every
    number of rows."""
    let_next_begin()
    wait_for_last()
    m_M = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    o_N = tl.program_id(1) * N + tl.arange(0, N)
    n_N = o_N.to(tl.int64)
    if GATED:  # each gate beside its up
        n_N = n_N // 2 + n_N % 2 * (O // 2)
    k_K = tl.arange(0, K)
    if S > 1:
        k_K += tl.program_id(2) * STRETCH
    used_M, used_N = m_M < rows, o_N < O
    x_at_MK = x_ptr + m_M[:, None] * x_stride + k_K[None, :]
    weight_at_NK = weight_ptr + n_N[:, None] * I + k_K[None, :]

    more_NM = tl.zeros((N, M), tl.float32)  # not a number: a branch may not change what it is
    if add_ptr is not None and S == 1:  # asked for ahead, or the end would wait for it
        more_NM = _more(add_ptr, add_stride, m_M, n_N, used_M, used_N)

    acc_NM = tl.zeros((N, M), tl.float32)
    square_MK = tl.zeros((M, K), tl.float32)
    if norm_ptr is not None:
        # as wide as x, so that both lie in the same registers, and always a step ahead
        norm_at_MK = norm_ptr + k_K[None, :] + tl.zeros((M, K), tl.int32)
        if STRETCH > K:
            norm_MK = tl.load(norm_at_MK, mask=(k_K < I)[None, :], other=0.0)
    for start in range(0, STRETCH, K):
        used_K = (start + k_K < I) | (S * STRETCH == I)
        used_NK = used_N[:, None] & used_K[None, :]
        weight_NK = tl.load(weight_at_NK + start, mask=used_NK, other=0.0)
        x_MK = tl.load(x_at_MK + start, mask=used_M[:, None] & used_K[None, :], other=0.0)
        if norm_ptr is not None:
            if STRETCH == K:  # nothing is ahead of it, and nothing waits for it alone
                norm_MK = tl.load(norm_at_MK, mask=used_K[None, :], other=0.0)
            exact_MK = x_MK.to(tl.float32)
            square_MK += exact_MK * exact_MK
            # a power of two rounds nothing but subnormals, and keeps float16 from overflowing
            scaled_MK = norm_MK.to(tl.float32) * 0.0625
            x_MK = (exact_MK * scaled_MK).to(x_ptr.dtype.element_ty)
            if STRETCH > K:
                next_K = (start + K + k_K < I)[None, :]
                norm_MK = tl.load(norm_at_MK + (start + K), mask=next_K, other=0.0)
        acc_NM = tl.dot(weight_NK, tl.trans(x_MK), acc_NM, input_precision=PRECISION)
    square_M = tl.sum(square_MK, 1)

    last = True
    if S > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        part_ptr += tile.to(tl.int64) * (S * (N * M + M))
        keep_part(part_ptr + tl.program_id(2) * (N * M + M), acc_NM, square_M)
        last = arrived_last(ticket_ptr + tile, S)
    if last:
        if S > 1:
            acc_NM, square_M = joined(part_ptr, S, N, M)
            if add_ptr is not None:
                more_NM = _more(add_ptr, add_stride, m_M, n_N, used_M, used_N)
        _finish(
            acc_NM,
            square_M,
            more_NM,
            norm_ptr,
            bias_ptr,
            out_ptr,
            m_M,
            n_N,
            used_M,
            used_N,
            eps,
            I,
            O,
            GATED,
        )


@triton.jit
def _more(add_ptr, add_stride, m_M, n_N, used_M, used_N):
    """What is added to the sums."""
    at_NM = m_M[None, :] * add_stride + n_N[:, None]
    used_NM = used_N[:, None] & used_M[None, :]
    return tl.load(add_ptr + at_NM, mask=used_NM, other=0.0).to(tl.float32)


@triton.jit
def _finish(
    acc_NM,
    square_M,
    more_NM,
    norm_ptr,
    bias_ptr,
    out_ptr,
    m_M,
    n_N,
    used_M,
    used_N,
    eps,
    I: tl.constexpr,  # noqa: E741
    O: tl.constexpr,  # noqa: E741
    GATED: tl.constexpr,
):
    """What stands behind the sums of all inputs; rounds once."""
    N: tl.constexpr = acc_NM.shape[0]
    M: tl.constexpr = acc_NM.shape[1]
    if norm_ptr is not None:
        scale_M = 16.0 / tl.sqrt(square_M / I + eps)
        acc_NM = acc_NM * scale_M[None, :]
    if bias_ptr is not None:
        acc_NM += tl.load(bias_ptr + n_N, mask=used_N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate_NM, up_NM = tl.split(tl.permute(tl.reshape(acc_NM, (N // 2, 2, M)), (0, 2, 1)))
        o_N = tl.program_id(1) * (N // 2) + tl.arange(0, N // 2)
        at_NM = m_M[None, :] * (O // 2) + o_N[:, None]
        used_NM = (o_N < O // 2)[:, None] & used_M[None, :]
        tl.store(out_ptr + at_NM, gate_NM / (1.0 + tl.exp(-gate_NM)) * up_NM, mask=used_NM)
    else:
        used_NM = used_N[:, None] & used_M[None, :]
        tl.store(out_ptr + m_M[None, :] * O + n_N[:, None], acc_NM + more_NM, mask=used_NM)

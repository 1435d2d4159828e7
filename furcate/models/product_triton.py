"""A product with a weight that is read once for up to 64 rows, and what stands around it.

Twin of the products of `blocks.TORCH`: before it a norm, behind it a bias, a gate or a sum, all in
one kernel. Legend: T rows, I inputs, O outputs; of one program: M rows, N rows of the weight, K
inputs of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.models.linear import Matrix
from furcate.models.norm import RmsNorm

__all__ = ["Multiply", "Size", "Tile", "fitting_tile", "one_tile", "product", "tiled"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST = 16  # of a side of a matrix unit
_MOST_ROWS = 64
_PROGRAMS = 96  # from so many on a device is busy, and programs may be wider instead
_WIDE = 64  # rows of the weight, from which on a step is work enough
_PROCESSORS = 132
_LONG = 2048  # inputs
_STAGED = 128 * 1024  # bytes on their way into the programs of a processor
_SHARING = 3  # programs of a processor that count on it


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


@dataclass(frozen=True, slots=True)
class Size:
    """Of a product; `outputs` are the rows of the weight."""

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut. The steps over the inputs are taken one after the other."""

    rows: int
    outputs: int  # rows of the weight; if gated, half of them are gates and half their ups
    inputs: int
    warps: int
    stages: int


def fitting_tile(size: Size) -> Tile:
    """All rows of a product in one program up to 64; the number of rows changes nothing else."""
    wanted = triton.next_power_of_2(size.rows)
    return _tile(size, max(_LEAST, min(_MOST_ROWS, wanted)))


def one_tile(size: Size) -> Tile:
    """The same for every number of rows."""
    return _tile(size, 32 if size.dtype.itemsize == 2 else _LEAST)


def tiled(cut: Callable[[Size], Tile]) -> Multiply:
    """`product`, cut like this."""
    return partial(product, cut=cut)


def _tile(size: Size, rows: int) -> Tile:
    # programs read all of x each, so fewer and wider ones read less, but take longer to get going
    widths = (128, 64, 32) if size.inputs >= _LONG else (64, 32)
    wide = next((n for n in widths if size.outputs >= n * _PROGRAMS), _LEAST)
    programs = triton.cdiv(size.outputs, wide)
    # few narrow programs take longer steps: each of them ends with a wait
    narrow = wide < _WIDE and programs <= _PROCESSORS
    step = 512 if narrow and size.inputs >= 1024 else 256
    inputs = min(step // size.dtype.itemsize, triton.next_power_of_2(size.inputs))
    inputs = max(_LEAST, inputs)
    share = _STAGED // min(_SHARING, triton.cdiv(programs, _PROCESSORS))
    stages = share // (inputs * (wide + rows) * size.dtype.itemsize)
    warps = 8 if rows == _MOST_ROWS and wide >= _WIDE else 4
    return Tile(rows, wide, inputs, warps, max(3, min(8, stages)))


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
        norm: x is normed first. Its scale is one number a row and multiplies the sums instead.
        add: [T, O], is added at the end; not where it is gated.
        gated: half of the outputs are gates and half ups, and the result is `gate.gated` of them.
    """
    (rows, inputs), outputs = x_TI.shape, by.weight.shape[0]
    assert x_TI.dtype in _DTYPES and by.weight.dtype == x_TI.dtype
    assert x_TI.stride(1) == 1 and by.weight.is_contiguous() and by.weight.shape[1] == inputs
    assert not gated or (add is None and outputs % 2 == 0)
    assert not torch.is_grad_enabled() or not by.weight.requires_grad, "there is no slope"
    tile = cut(Size(rows, outputs, inputs, x_TI.dtype))
    width = outputs // 2 if gated else outputs
    if add is not None:
        assert add.shape == (rows, width) and add.stride(1) == 1
    out_TO = x_TI.new_empty((rows, width))
    # tiles of rows that share a tile of the weight follow one another
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs))
    _product[grid](
        x_TI,
        None if norm is None else norm.weight,
        by.weight,
        by.bias,
        add,
        out_TO,
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
        PRECISION="ieee" if x_TI.dtype == torch.float32 else None,
        num_warps=tile.warps,
        num_stages=tile.stages,
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
    PRECISION: tl.constexpr,
):
    """One tile of rows and outputs. Weights are the left factor, whose side does not depend on M,
    so that the same instructions add up a row's products for every number of rows."""
    m_M = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    o_N = tl.program_id(1) * N + tl.arange(0, N)
    n_N = o_N.to(tl.int64)
    if GATED:  # each gate beside its up
        n_N = n_N // 2 + n_N % 2 * (O // 2)
    k_K = tl.arange(0, K)
    used_M, used_N = m_M < rows, o_N < O
    x_at_MK = x_ptr + m_M[:, None] * x_stride + k_K[None, :]
    weight_at_NK = weight_ptr + n_N[:, None] * I + k_K[None, :]

    acc_NM = tl.zeros((N, M), tl.float32)
    square_MK = tl.zeros((M, K), tl.float32)
    if norm_ptr is not None:
        # as wide as x, so that both lie in the same registers, and always a step ahead
        norm_at_MK = norm_ptr + k_K[None, :] + tl.zeros((M, K), tl.int32)
        norm_MK = tl.load(norm_at_MK, mask=(k_K < I)[None, :], other=0.0)
    for start in range(0, I, K):
        used_K = (start + k_K < I) | (I % K == 0)
        x_MK = tl.load(x_at_MK + start, mask=used_M[:, None] & used_K[None, :], other=0.0)
        if norm_ptr is not None:
            exact_MK = x_MK.to(tl.float32)
            square_MK += exact_MK * exact_MK
            # a power of two rounds nothing but subnormals, and keeps float16 from overflowing
            scaled_MK = norm_MK.to(tl.float32) * 0.0625
            x_MK = (exact_MK * scaled_MK).to(x_ptr.dtype.element_ty)
            next_K = (start + K + k_K < I)[None, :]
            norm_MK = tl.load(norm_at_MK + (start + K), mask=next_K, other=0.0)
        used_NK = used_N[:, None] & used_K[None, :]
        weight_NK = tl.load(weight_at_NK + start, mask=used_NK, other=0.0)
        acc_NM = tl.dot(weight_NK, tl.trans(x_MK), acc_NM, input_precision=PRECISION)

    if norm_ptr is not None:
        scale_M = 16.0 / tl.sqrt(tl.sum(square_MK, 1) / I + eps)
        acc_NM = acc_NM * scale_M[None, :]
    if bias_ptr is not None:
        acc_NM += tl.load(bias_ptr + n_N, mask=used_N, other=0.0).to(tl.float32)[:, None]
    used_NM = used_N[:, None] & used_M[None, :]
    if GATED:
        gate_NM, up_NM = tl.split(tl.permute(tl.reshape(acc_NM, (N // 2, 2, M)), (0, 2, 1)))
        o_N = tl.program_id(1) * (N // 2) + tl.arange(0, N // 2)
        at_NM = m_M[None, :] * (O // 2) + o_N[:, None]
        used_NM = (o_N < O // 2)[:, None] & used_M[None, :]
        tl.store(out_ptr + at_NM, gate_NM / (1.0 + tl.exp(-gate_NM)) * up_NM, mask=used_NM)
    else:
        if add_ptr is not None:
            add_at_NM = add_ptr + m_M[None, :] * add_stride + o_N[:, None]
            acc_NM += tl.load(add_at_NM, mask=used_NM, other=0.0).to(tl.float32)
        tl.store(out_ptr + m_M[None, :] * O + o_N[:, None], acc_NM, mask=used_NM)

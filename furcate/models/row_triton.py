"""A product with one row, without the matrix unit, and what stands around it.

Twin of the products of `blocks.TORCH` for one row. It is bound by reading the weight: every program
holds a few whole rows of it, all of whose loads are on their way at once, where a matrix unit would
take them step by step and leave most of its side unused. Legend: I inputs, O outputs; of one
program: N rows of the weight, K inputs of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.models.linear import Matrix
from furcate.models.norm import RmsNorm
from furcate.pdl import LAUNCH, let_next_begin, wait_for_last

__all__ = ["Hold", "fitting_hold", "row_product"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LONGEST = 2048  # inputs of a step: with four rows of the weight, what registers hold


@dataclass(frozen=True, slots=True)
class Hold:
    """What a program holds at a time; inputs beyond that take further steps."""

    outputs: int
    inputs: int
    warps: int


def fitting_hold(outputs: int, inputs: int) -> Hold:
    """Measured on an H200 in bf16: four rows of the weight, fewer where that leaves processors
    idle, and more of the short rows of a vocabulary."""
    step = min(_LONGEST, triton.next_power_of_2(inputs))
    if outputs < 1000:
        return Hold(2, step, 4 if step <= 1024 else 8)
    return Hold(8 if step <= 1024 and outputs > 32768 else 4, step, 4)


def row_product(
    x_1I: Tensor,
    by: Matrix,
    *,
    norm: RmsNorm | None = None,
    add: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """x Wᵀ + b in the dtype of x, [1, O]; sums are float32.

    Args:
        x_1I: its entries lie dense.
        by: the weight is dense, [O, I].
        norm: x is normed first. Its scale is one number and multiplies the sums instead.
        add: [1, O], is added at the end; not where it is gated.
        gated: half of the outputs are gates and half ups, and the result is `gate.gated` of them.
    """
    (rows, inputs), outputs = x_1I.shape, by.weight.shape[0]
    assert rows == 1 and x_1I.dtype in _DTYPES and by.weight.dtype == x_1I.dtype
    assert x_1I.stride(1) == 1 and by.weight.is_contiguous() and by.weight.shape[1] == inputs
    assert not gated or (add is None and outputs % 2 == 0)
    assert not torch.is_grad_enabled() or not by.weight.requires_grad, "there is no slope"
    width = outputs // 2 if gated else outputs
    if add is not None:
        assert add.shape == (1, width) and add.stride(1) == 1
    out_1O = x_1I.new_empty((1, width))
    hold = fitting_hold(outputs, inputs)
    _row[(triton.cdiv(outputs, hold.outputs),)](
        x_1I,
        None if norm is None else norm.weight,
        by.weight,
        by.bias,
        add,
        out_1O,
        0.0 if norm is None else norm.eps,
        I=inputs,
        O=outputs,
        GATED=gated,
        N=hold.outputs,
        K=hold.inputs,
        num_warps=hold.warps,
        **LAUNCH,
    )
    return out_1O


@triton.jit
def _row(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    add_ptr,
    out_ptr,
    eps,
    I: tl.constexpr,  # noqa: E741 - inputs, as in the legend
    O: tl.constexpr,  # noqa: E741
    GATED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """A few outputs. Products are summed by lane, and the lanes once at the end."""
    let_next_begin()
    o_N = tl.program_id(0) * N + tl.arange(0, N)
    n_N = o_N.to(tl.int64)
    if GATED:  # each gate beside its up
        n_N = n_N // 2 + n_N % 2 * (O // 2)
    used_N = (o_N < O) | (O % N == 0)
    k_K = tl.arange(0, K)
    weight_at_NK = weight_ptr + n_N[:, None] * I + k_K[None, :]

    # nobody reads a weight again in this pass
    used_NK = used_N[:, None] & ((k_K < I) | (I % K == 0))[None, :]
    weight_NK = tl.load(weight_at_NK, mask=used_NK, other=0.0, eviction_policy="evict_first")
    wait_for_last()
    # asked for here and not where it is added, or the end would wait for it
    more_N = tl.zeros((N,), tl.float32)
    if add_ptr is not None:
        more_N = tl.load(add_ptr + o_N, mask=used_N, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias_N = tl.load(bias_ptr + n_N, mask=used_N, other=0.0).to(tl.float32)

    acc_NK = tl.zeros((N, K), tl.float32)
    square_K = tl.zeros((K,), tl.float32)
    # unrolled, or no step's loads would be on their way before those of the one ahead are there
    for start in tl.static_range(0, I, K):
        used_K = (start + k_K < I) | (I % K == 0)
        if start > 0:
            used_NK = used_N[:, None] & used_K[None, :]
            weight_NK = tl.load(
                weight_at_NK + start, mask=used_NK, other=0.0, eviction_policy="evict_first"
            )
        x_K = tl.load(x_ptr + start + k_K, mask=used_K, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            square_K += x_K * x_K
            norm_K = tl.load(norm_ptr + start + k_K, mask=used_K, other=0.0).to(tl.float32)
            # rounded as the product of many rows has to, so that both multiply the same numbers
            x_K = (x_K * (norm_K * 0.0625)).to(x_ptr.dtype.element_ty).to(tl.float32)
        acc_NK += weight_NK.to(tl.float32) * x_K[None, :]
    acc_N = tl.sum(acc_NK, 1)

    if norm_ptr is not None:
        acc_N = acc_N * (16.0 / tl.sqrt(tl.sum(square_K, 0) / I + eps))
    if bias_ptr is not None:
        acc_N += bias_N
    if GATED:
        gate_N, up_N = tl.split(tl.reshape(acc_N, (N // 2, 2)))
        o_N = tl.program_id(0) * (N // 2) + tl.arange(0, N // 2)
        tl.store(out_ptr + o_N, gate_N / (1.0 + tl.exp(-gate_N)) * up_N, mask=o_N < O // 2)
    else:
        tl.store(out_ptr + o_N, acc_N + more_N, mask=used_N)

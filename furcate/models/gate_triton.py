"""SwiGLU's gate on a GPU in one kernel, and its slope in another.

Twin of `gate.gated`. Legend: T rows, I inner size, B entries of a program.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gated"]

_BLOCK = 1024


def gated(gate_up: Tensor) -> Tensor:
    """As its twin says; computed in float32."""
    gated_TI: Tensor = _Gated.apply(gate_up)
    return gated_TI


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        assert gate_up.is_contiguous()
        ctx.save_for_backward(gate_up)
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out_TI = gate_up.new_empty(rows, inner)
        grid = (rows, triton.cdiv(inner, _BLOCK))
        _forward[grid](gate_up, out_TI, inner, B=_BLOCK)
        return out_TI

    @staticmethod
    def backward(ctx: Any, slope_TI: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        slope_TI = slope_TI.contiguous()
        slope_gate_up = torch.empty_like(gate_up)
        rows, inner = slope_TI.shape
        grid = (rows, triton.cdiv(inner, _BLOCK))
        _backward[grid](gate_up, slope_TI, slope_gate_up, inner, B=_BLOCK)
        return slope_gate_up


@triton.jit
def _forward(gate_up_ptr, out_ptr, inner, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at_B = tl.program_id(1) * B + tl.arange(0, B)
    used_B = at_B < inner
    gate_B = tl.load(gate_up_ptr + row * 2 * inner + at_B, mask=used_B, other=0.0).to(tl.float32)
    up_B = tl.load(gate_up_ptr + row * 2 * inner + inner + at_B, mask=used_B, other=0.0)
    out_B = gate_B / (1.0 + tl.exp(-gate_B)) * up_B.to(tl.float32)
    tl.store(out_ptr + row * inner + at_B, out_B, mask=used_B)


@triton.jit
def _backward(gate_up_ptr, slope_ptr, slope_gate_up_ptr, inner, B: tl.constexpr):
    """With s = sigmoid(gate): d silu = s (1 + gate (1 - s))."""
    row = tl.program_id(0).to(tl.int64)
    at_B = tl.program_id(1) * B + tl.arange(0, B)
    used_B = at_B < inner
    base = row * 2 * inner
    gate_B = tl.load(gate_up_ptr + base + at_B, mask=used_B, other=0.0).to(tl.float32)
    up_B = tl.load(gate_up_ptr + base + inner + at_B, mask=used_B, other=0.0).to(tl.float32)
    slope_B = tl.load(slope_ptr + row * inner + at_B, mask=used_B, other=0.0).to(tl.float32)
    s_B = 1.0 / (1.0 + tl.exp(-gate_B))
    of_gate_B = slope_B * up_B * s_B * (1.0 + gate_B * (1.0 - s_B))
    tl.store(slope_gate_up_ptr + base + at_B, of_gate_B, mask=used_B)
    tl.store(slope_gate_up_ptr + base + inner + at_B, slope_B * gate_B * s_B, mask=used_B)

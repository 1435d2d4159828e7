"""SwiGLU's gate: SiLU of one half times the other. Legend: T rows, I inner size."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

__all__ = ["gated"]


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2 I], the gates first: [T, I] (Shazeer 2020, equation 5)."""
    gate_TI, up_TI = gate_up.chunk(2, -1)
    return functional.silu(gate_TI) * up_TI

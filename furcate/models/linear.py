"""A linear layer whose weight can be laid out for the CPU's matrix units.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Linear", "can_pack", "pack_weight", "packed_linear"]

_ROWS_HINT = 8  # the layout is chosen for about as many rows as a small tree has


class Linear(nn.Module):
    """y = x Wᵀ + b for flat rows [T, I]. `pack` is for inference only and cannot be undone."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, like: Tensor) -> None:
        """The weight is uninitialised; dtype and device are those of `like`."""
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(like.new_empty(outputs, inputs))
        self.bias = nn.Parameter(like.new_empty(outputs)) if bias else None
        self.packed: Tensor | None = None

    def forward(self, x_TI: Tensor) -> Tensor:
        if self.packed is not None:
            return packed_linear(x_TI, self.packed, self.bias)
        assert self.weight is not None
        return functional.linear(x_TI, self.weight, self.bias)

    def pack(self) -> None:
        """Replace the weight by its packed copy and free the plain one."""
        if self.weight is None:
            return
        self.packed = pack_weight(self.weight.detach())
        self.weight = None


def can_pack(weight: Tensor) -> bool:
    """Whether this weight has a packed layout: float32 on a CPU, with oneDNN built into torch."""
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    available: Callable[[], bool] = torch.backends.mkldnn.is_available
    return plain and available()


def pack_weight(weight_OI: Tensor) -> Tensor:
    """A copy of the weight in oneDNN's blocked layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _ROWS_HINT)
    return packed


def packed_linear(x_TI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    """x Wᵀ + b with a weight from `pack_weight`; no gradients."""
    y_TO: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_TI, packed, bias_O, "none", [], "")
    return y_TO

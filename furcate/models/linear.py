"""A linear layer whose weight can be laid out for the CPU's matrix units.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Linear", "Matrix", "Table", "can_pack", "can_pack_bfloat16", "linear", "pack_weight"]

_ROWS_HINT = 8  # the layout is chosen for about as many rows as a small tree has
_FEW = 1  # rows up to which the plain weight is read faster than the packed one


class Matrix(Protocol):
    """What a product multiplies by."""

    @property
    def weight(self) -> Tensor:
        """[O, I]."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """[O]."""
        ...

    @property
    def packed(self) -> Tensor | None:
        """A copy of the weight as `pack_weight` makes it."""
        ...


@dataclass(frozen=True, slots=True)
class Table:
    """A matrix that is something else too: embeddings that score."""

    weight: Tensor
    packed: Tensor | None = None
    bias: Tensor | None = None


class Linear(nn.Module):
    """y = x Wᵀ + b for flat rows [T, I]. `pack` is for inference only and cannot be undone."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, like: Tensor) -> None:
        """The weight is uninitialised; dtype and device are those of `like`."""
        super().__init__()
        self.weight = nn.Parameter(like.new_empty(outputs, inputs))
        self.bias = nn.Parameter(like.new_empty(outputs)) if bias else None
        self.packed: Tensor | None = None

    def forward(self, x_TI: Tensor) -> Tensor:
        return linear(x_TI, self)

    def pack(self, dtype: torch.dtype | None = None) -> None:
        """Lay a copy of the weight out for passes of several rows, and itself for a lone row.

        A product with one row reads a weight that is stored column by column 6 % faster. The copy
        may be of another dtype than what is multiplied by it.
        """
        if self.packed is None:
            self.packed = pack_weight(self.weight.detach(), dtype)
            by_column_OI = self.weight.detach().t().contiguous().t()
            self.weight = nn.Parameter(by_column_OI, requires_grad=False)


def linear(x_TI: Tensor, by: Matrix) -> Tensor:
    """x Wᵀ + b by the faster of the two layouts for this many rows; `packed` is for inference."""
    if by.packed is None or len(x_TI) <= _FEW:
        return functional.linear(x_TI, by.weight, by.bias)
    if by.packed.dtype is not x_TI.dtype:
        y_TO = _product(x_TI.to(by.packed.dtype), by.packed, None).to(x_TI.dtype)
        return y_TO if by.bias is None else y_TO + by.bias
    return _product(x_TI, by.packed, by.bias)


def _product(x_TI: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    y_TO: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_TI, packed, bias_O, "none", [], "")
    return y_TO


def can_pack(weight: Tensor) -> bool:
    """Whether this weight has a packed layout: float32 on a CPU, with oneDNN built into torch."""
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    available: Callable[[], bool] = torch.backends.mkldnn.is_available
    return plain and available()


def can_pack_bfloat16(weight: Tensor) -> bool:
    """Whether the packed copy can be in bfloat16: half the bytes, and its own unit on new CPUs."""
    return can_pack(weight) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_weight(weight_OI: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of the weight in oneDNN's blocked layout, in its own dtype or another one."""
    weight_OI = weight_OI if dtype is None else weight_OI.to(dtype)
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _ROWS_HINT)
    return packed

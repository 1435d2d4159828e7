"""What layers are made of: products, with the norm before them and the gate or sum behind them.

Legend: T flat rows, C hidden size, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from furcate.errors import Unsupported
from furcate.models.gate import gated
from furcate.models.linear import Matrix, linear
from furcate.models.norm import RmsNorm, add_norm

__all__ = ["TORCH", "Apart", "Blocks", "Stream", "blocks_of"]


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream between two blocks, which may leave the sum to whoever comes next."""

    x_TC: Tensor
    more_TC: Tensor | None = None  # still to be added

    def whole(self) -> Tensor:
        """The sum, [T, C]."""
        return self.x_TC if self.more_TC is None else self.x_TC + self.more_TC


class Blocks(Protocol):
    """One way to compute the blocks of a layer. Two ways differ by rounding and in speed only.

    Nothing here writes into what it is given.
    """

    def norm(self, stream: Stream, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        """The stream, and its norm over the last axis."""
        ...

    def linear(self, x_TI: Tensor, by: Matrix) -> Tensor:
        """x Wᵀ + b, [T, O]."""
        ...

    def norm_linear(
        self, stream: Stream, norm: RmsNorm | None, by: Matrix
    ) -> tuple[Tensor, Tensor]:
        """The stream, and the product of its norm, [T, O]; of the stream itself without a norm."""
        ...

    def gate_linear(self, stream: Stream, norm: RmsNorm, by: Matrix) -> tuple[Tensor, Tensor]:
        """The stream, and `gated` of the product of its norm, [T, O / 2]."""
        ...

    def linear_add(self, y_TI: Tensor, by: Matrix, x_TC: Tensor) -> Stream:
        """x + y Wᵀ + b."""
        ...


@dataclass(frozen=True, slots=True)
class Apart:
    """Norm, product and gate one after the other, each by a function of its own; see `Blocks`."""

    add_norm: Callable[[Tensor, Tensor | None, RmsNorm], tuple[Tensor, Tensor]]
    product: Callable[[Tensor, Matrix], Tensor]
    gated: Callable[[Tensor], Tensor]

    def norm(self, stream: Stream, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        return self.add_norm(stream.x_TC, stream.more_TC, norm)

    def linear(self, x_TI: Tensor, by: Matrix) -> Tensor:
        return self.product(x_TI, by)

    def norm_linear(
        self, stream: Stream, norm: RmsNorm | None, by: Matrix
    ) -> tuple[Tensor, Tensor]:
        if norm is None:
            x_TC = stream.whole()
            return x_TC, self.product(x_TC, by)
        x_TC, normed_TC = self.add_norm(stream.x_TC, stream.more_TC, norm)
        return x_TC, self.product(normed_TC, by)

    def gate_linear(self, stream: Stream, norm: RmsNorm, by: Matrix) -> tuple[Tensor, Tensor]:
        x_TC, gate_up = self.norm_linear(stream, norm, by)
        return x_TC, self.gated(gate_up)

    def linear_add(self, y_TI: Tensor, by: Matrix, x_TC: Tensor) -> Stream:
        return Stream(x_TC, self.product(y_TI, by))


TORCH: Blocks = Apart(add_norm, linear, gated)
"""The reference, and what a CPU runs."""


def blocks_of(device: torch.device, dtype: torch.dtype, *, batch_invariant: bool = False) -> Blocks:
    """The fastest that there are for a network.

    With `batch_invariant` a row's results are the same bit for bit whatever other rows there are;
    raises Unsupported where there is no such way.
    """
    here = device.type == "cuda" and dtype != torch.float64
    if not here and batch_invariant:
        raise Unsupported(
            "torch's products depend on the number of rows, and only a GPU has others, not float64",
            field="batch_invariant",
            value=f"{dtype} on {device}",
            hint="leave it out",
        )
    if not here:
        return TORCH
    # the twins need triton, which machines without a GPU need not have
    on_gpu = import_module("furcate.models.blocks_triton")
    found: Blocks = on_gpu.INVARIANT if batch_invariant else on_gpu.TRITON
    return found

"""Blocks of layers on a GPU: one kernel each for few rows, torch's products for many.

Legend: T flat rows, C hidden size, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.models import norm as reference
from furcate.models import norm_triton
from furcate.models.blocks import Apart, Blocks, Stream
from furcate.models.gate_triton import gated
from furcate.models.linear import Matrix, linear
from furcate.models.norm import RmsNorm
from furcate.models.product_triton import Size, Tile, fitting_tile, one_tile, product

__all__ = ["FEW", "INVARIANT", "TRITON", "ByRows", "Fused"]

FEW = 64  # rows up to which the fused products are taken


@dataclass(frozen=True, slots=True)
class Fused:
    """All that a block does happens in the kernel of its product; see `Blocks`.

    For inference only.
    """

    cut: Callable[[Size], Tile]

    def norm(self, stream: Stream, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        return norm_triton.add_norm(stream.x_TC, stream.more_TC, norm)

    def linear(self, x_TI: Tensor, by: Matrix) -> Tensor:
        return product(x_TI, by, self.cut)

    def norm_linear(
        self, stream: Stream, norm: RmsNorm | None, by: Matrix
    ) -> tuple[Tensor, Tensor]:
        x_TC = stream.whole()
        return x_TC, product(x_TC, by, self.cut, norm=norm)

    def gate_linear(self, stream: Stream, norm: RmsNorm, by: Matrix) -> tuple[Tensor, Tensor]:
        x_TC = stream.whole()
        return x_TC, product(x_TC, by, self.cut, norm=norm, gated=True)

    def linear_add(self, y_TI: Tensor, by: Matrix, x_TC: Tensor) -> Stream:
        return Stream(product(y_TI, by, self.cut, add_TO=x_TC))


@dataclass(frozen=True, slots=True)
class ByRows:
    """`few` up to so many rows where no gradients are asked for, else `many`; see `Blocks`."""

    few: Blocks
    many: Blocks
    most: int

    def norm(self, stream: Stream, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        return self._for(stream.x_TC).norm(stream, norm)

    def linear(self, x_TI: Tensor, by: Matrix) -> Tensor:
        return self._for(x_TI).linear(x_TI, by)

    def norm_linear(
        self, stream: Stream, norm: RmsNorm | None, by: Matrix
    ) -> tuple[Tensor, Tensor]:
        return self._for(stream.x_TC).norm_linear(stream, norm, by)

    def gate_linear(self, stream: Stream, norm: RmsNorm, by: Matrix) -> tuple[Tensor, Tensor]:
        return self._for(stream.x_TC).gate_linear(stream, norm, by)

    def linear_add(self, y_TI: Tensor, by: Matrix, x_TC: Tensor) -> Stream:
        return self._for(y_TI).linear_add(y_TI, by, x_TC)

    def _for(self, x: Tensor) -> Blocks:
        return self.few if len(x) <= self.most and _for_inference() else self.many


def _add_norm(x: Tensor, more: Tensor | None, norm: RmsNorm) -> tuple[Tensor, Tensor]:
    add_norm = norm_triton.add_norm if _for_inference() else reference.add_norm
    return add_norm(x, more, norm)


def _for_inference() -> bool:
    """Kernels without a slope may be taken; a compiler makes its own."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


TRITON: Blocks = ByRows(Fused(fitting_tile), Apart(_add_norm, linear, gated), FEW)

INVARIANT: Blocks = Fused(one_tile)
"""A row's results do not depend on the rows beside it: one cut for any number of them."""

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
# Of weights between these bytes torch's product is the faster one from so many rows on. Measured
# on an H200 in bf16, microseconds fused and apart: 50 MB 22 and 23 with 8 rows, 30 and 23 with 32,
# 49 and 23 with 64; 117 MB 37 and 34, 44 and 35, 67 and 38. Not so for 235 MB, gated: 65 and 78
# with 32 rows, 75 and 80 with 64; nor for scores, 1 GB: 252 and 268, 259 and 282.
_APART = (16 << 20, 160 << 20)
_APART_FROM = 9


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
        if norm is not None and stream.more_TC is not None:
            x_TC, normed_TC = self.norm(stream, norm)
            return x_TC, product(normed_TC, by, self.cut)
        x_TC = stream.whole()
        return x_TC, product(x_TC, by, self.cut, norm=norm)

    def gate_linear(self, stream: Stream, norm: RmsNorm, by: Matrix) -> tuple[Tensor, Tensor]:
        if stream.more_TC is not None:
            x_TC, normed_TC = self.norm(stream, norm)
            return x_TC, product(normed_TC, by, self.cut, gated=True)
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
        return self._for(x_TI, by).linear(x_TI, by)

    def norm_linear(
        self, stream: Stream, norm: RmsNorm | None, by: Matrix
    ) -> tuple[Tensor, Tensor]:
        return self._for(stream.x_TC, by).norm_linear(stream, norm, by)

    def gate_linear(self, stream: Stream, norm: RmsNorm, by: Matrix) -> tuple[Tensor, Tensor]:
        return self._for(stream.x_TC).gate_linear(stream, norm, by)

    def linear_add(self, y_TI: Tensor, by: Matrix, x_TC: Tensor) -> Stream:
        return self._for(y_TI, by).linear_add(y_TI, by, x_TC)

    def _for(self, x: Tensor, by: Matrix | None = None) -> Blocks:
        if len(x) > self.most or not _for_inference():
            return self.many
        least, most = _APART
        apart = by is not None and least <= by.weight.nbytes <= most and len(x) >= _APART_FROM
        return self.many if apart else self.few


def _add_norm(x: Tensor, more: Tensor | None, norm: RmsNorm) -> tuple[Tensor, Tensor]:
    add_norm = norm_triton.add_norm if _for_inference() else reference.add_norm
    return add_norm(x, more, norm)


def _for_inference() -> bool:
    """Kernels without a slope may be taken; a compiler makes its own."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


TRITON: Blocks = ByRows(Fused(fitting_tile), Apart(_add_norm, linear, gated), FEW)

INVARIANT: Blocks = Fused(one_tile)
"""A row's results do not depend on the rows beside it: one cut for any number of them."""

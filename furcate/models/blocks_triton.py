"""Blocks of layers on a GPU: one kernel each for few rows, torch's products for many.

Legend: T flat rows, C hidden size, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.models import norm as reference
from furcate.models import norm_triton
from furcate.models.blocks import Apart, Blocks, Stream
from furcate.models.gate_triton import gated
from furcate.models.linear import Matrix, linear
from furcate.models.norm import RmsNorm
from furcate.models.product_cut import Size, fitting_tile, measured_tile, one_tile
from furcate.models.product_triton import Multiply, tiled
from furcate.models.row_triton import row_product
from furcate.shared_memory import shared_memory

__all__ = ["FEW", "INVARIANT", "TRITON", "ByRows", "Fused"]

FEW = 64  # rows up to which the fused products are taken
# Of weights between these bytes torch's product is taken from so many rows on, but where a sweep
# found a faster cut. Measured on an H200
# in bf16, microseconds fused and by torch behind our norm: 50 MB 22 and 22 with 8 rows, 30 and 18
# with 32, 49 and 18 with 64; 117 MB 37 and 35, 44 and 35, 67 and 39; 235 MB, gated, 65 and 74 with
# 32 rows, 74 and 68 with 64. Not so for scores, 1 GB: 252 and 269, 259 and 283.
_APART = ((16 << 20, 160 << 20, 8), (160 << 20, 512 << 20, 33))


@dataclass(frozen=True, slots=True)
class Fused:
    """All that a block does happens in the kernel of its product; see `Blocks`.

    For inference only.
    """

    multiply: Multiply

    def norm(self, stream: Stream, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        return norm_triton.add_norm(stream.x_TC, stream.more_TC, norm)

    def linear(self, x_TI: Tensor, by: Matrix) -> Tensor:
        return self.multiply(x_TI, by)

    def norm_linear(
        self, stream: Stream, norm: RmsNorm | None, by: Matrix
    ) -> tuple[Tensor, Tensor]:
        x_TC, read_TC, left = _before(stream, norm)
        return x_TC, self.multiply(read_TC, by, norm=left)

    def gate_linear(self, stream: Stream, norm: RmsNorm, by: Matrix) -> tuple[Tensor, Tensor]:
        x_TC, read_TC, left = _before(stream, norm)
        return x_TC, self.multiply(read_TC, by, norm=left, gated=True)

    def linear_add(self, y_TI: Tensor, by: Matrix, x_TC: Tensor) -> Stream:
        return Stream(self.multiply(y_TI, by, add=x_TC))


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
        return self._for(stream.x_TC, by).gate_linear(stream, norm, by)

    def linear_add(self, y_TI: Tensor, by: Matrix, x_TC: Tensor) -> Stream:
        return self._for(y_TI, by).linear_add(y_TI, by, x_TC)

    def _for(self, x: Tensor, by: Matrix | None = None) -> Blocks:
        if len(x) > self.most or not _for_inference():
            return self.many
        return self.many if by is not None and _is_apart(len(x), by) else self.few


def _is_apart(rows: int, by: Matrix) -> bool:
    """Whether torch's product of so many rows is the faster one."""
    weight = by.weight
    if not any(a <= weight.nbytes <= b and rows >= start for a, b, start in _APART):
        return False
    outputs, inputs = weight.shape
    size = Size(rows, outputs, inputs, weight.dtype, shared_memory(weight.device))
    return measured_tile(size) is None


def _before(stream: Stream, norm: RmsNorm | None) -> tuple[Tensor, Tensor, RmsNorm | None]:
    """(the stream, what the product reads, the norm that is left to it): a sum is made once."""
    if norm is None or stream.more_TC is None:
        x_TC = stream.whole()
        return x_TC, x_TC, norm
    return *norm_triton.add_norm(stream.x_TC, stream.more_TC, norm), None


def _add_norm(x: Tensor, more: Tensor | None, norm: RmsNorm) -> tuple[Tensor, Tensor]:
    add_norm = norm_triton.add_norm if _for_inference() else reference.add_norm
    return add_norm(x, more, norm)


def _for_inference() -> bool:
    """Kernels without a slope may be taken; a compiler makes its own."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


_SOME = ByRows(Fused(tiled(fitting_tile)), Apart(_add_norm, linear, gated), FEW)

TRITON: Blocks = ByRows(Fused(row_product), _SOME, most=1)

INVARIANT: Blocks = Fused(tiled(one_tile))
"""A row's results do not depend on the rows beside it: one cut for any number of them."""

"""Zero what requests leave behind, in Triton: the pages of a pool, all layers, in one launch.

Twin of `wipe`. Legend: L layers, S slots, X pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["wipe"]

_TILE = 4096  # elements


def wipe(
    pools_LS: Sequence[Tensor], page_X: Tensor, page_size: int, buffers: Sequence[Tensor] = ()
) -> None:
    """As `furcate.kernels.wipe.wipe`; pools lie dense. A buffer is one memset of the driver's."""
    assert page_X.is_contiguous()
    for pool_LS in pools_LS if len(page_X) else ():
        assert pool_LS.is_contiguous()
        layers = pool_LS.shape[0]
        span = pool_LS[0, 0].numel() * page_size
        tiles = triton.cdiv(span, _TILE)
        _wipe[(len(page_X), layers, tiles)](pool_LS, page_X, pool_LS[0].numel(), span, N=_TILE)
    for buffer in buffers:
        buffer.zero_()


@triton.jit
def _wipe(pool_ptr, page_ptr, layer_stride, span, N: tl.constexpr):
    page = tl.maximum(tl.load(page_ptr + tl.program_id(0)), 0)
    n_N = tl.program_id(2) * N + tl.arange(0, N)
    at = tl.program_id(1).to(tl.int64) * layer_stride + page * span
    zero_N = tl.zeros([N], pool_ptr.dtype.element_ty)
    tl.store(pool_ptr + at + n_N, zero_N, mask=n_N < span)

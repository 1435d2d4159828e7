"""Paged keys and values on the device, and the attention of one pass over them.

Legend: B requests, R rows, T = B * R flat rows, L layers, S slots, K key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from furcate.kernels.draft import Verdict
from furcate.kernels.kv_move import move_path
from furcate.kernels.tree_attention import SCRATCH, Columns, Keys, packed, tree_attention

__all__ = ["CacheShape", "PagedCache", "zeros"]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Size of a cache; `pages` excludes the scratch page."""

    layers: int
    kv_heads: int
    head_dim: int
    pages: int
    page_size: int

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values together, scratch page included."""
        per_token = 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize
        return per_token * self.page_size * (self.pages + 1)


class PagedCache:
    """Keys and values of all layers by slot; page p holds slots [p * size, (p + 1) * size)."""

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        slots = (shape.pages + 1) * shape.page_size
        size = (shape.layers, slots, shape.kv_heads, shape.head_dim)
        self.shape = shape
        # zeros and not empty: a page that was never written must read as finite numbers
        self.k_LSKD = zeros(size, dtype, device)
        self.v_LSKD = zeros(size, dtype, device)

    def attend(
        self, columns: Columns, heads: int
    ) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        """How a decoder of `heads` query heads attends in this pass: write the rows' keys, then
        look at all that each row sees."""

        seen = packed(columns, heads // self.shape.kv_heads)

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            keys = Keys(self.k_LSKD[layer], self.v_LSKD[layer])
            keys.k_SKD.index_copy_(0, columns.write_T, k_TKD)
            keys.v_SKD.index_copy_(0, columns.write_T, v_TKD)
            # the pads of a request whose keys are NaN have written here, and all requests read it
            keys.k_SKD[SCRATCH].zero_()
            keys.v_SKD[SCRATCH].zero_()
            return tree_attention(q_THD, keys, seen)

        return attend

    def move(self, slot_BR: Tensor, verdict: Verdict) -> None:
        """Put the accepted path's keys and values in place."""
        move_path((self.k_LSKD, self.v_LSKD), slot_BR, verdict)

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page, all layers: before a shared page is written to."""
        size = self.shape.page_size
        old = slice(source * size, (source + 1) * size)
        new = slice(target * size, (target + 1) * size)
        for pool in (self.k_LSKD, self.v_LSKD):
            pool[:, new] = pool[:, old]


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost no memory on the CPU until they are written."""
    if device.type != "cpu" or 0 in size:
        return torch.zeros(size, dtype=dtype, device=device)
    # numpy asks the system for zero pages, where torch.zeros would write every one of them
    count = math.prod(size) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(size)

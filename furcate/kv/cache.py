"""Paged keys and values on the device, and the attention of one pass over them.

Legend: B requests, R rows, T = B * R flat rows, L layers, S slots, K key/value heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from furcate.kernels.backend import TORCH, Kernels, Look, TurnLook, TurnWrite
from furcate.kernels.draft import Verdict
from furcate.kernels.tree_attention import Keys, Sight

__all__ = ["Attending", "CacheShape", "PagedCache", "Turned", "zeros"]


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

    def __init__(
        self,
        shape: CacheShape,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels = TORCH,
    ) -> None:
        slots = (shape.pages + 1) * shape.page_size
        size = (shape.layers, slots, shape.kv_heads, shape.head_dim)
        self.shape = shape
        self.kernels = kernels.fitting(dtype, shape.head_dim)
        # zeros and not empty: a page that was never written must read as finite numbers
        self.k_LSKD = zeros(size, dtype, device)
        self.v_LSKD = zeros(size, dtype, device)

    def attend(self, sight: Sight, heads: int) -> Attending:
        """How a decoder of `heads` query heads attends in this pass: write the rows' keys, then
        look at all that each row sees."""
        kernels, group = self.kernels, heads // self.shape.kv_heads
        look = kernels.look(sight, group, self.k_LSKD.dtype)
        if kernels.turn_write is None:
            return Attending(self, sight.write_T, look)
        turn_look = kernels.turn_look and kernels.turn_look(sight, group, self.k_LSKD.dtype)
        return Turned(self, sight.write_T, look, kernels.turn_write, turn_look)

    def layer(self, layer: int) -> Keys:
        """The pool of one layer."""
        return Keys(self.k_LSKD[layer], self.v_LSKD[layer])

    def move(self, slot_BR: Tensor, verdict: Verdict) -> None:
        """Put the accepted path's keys and values in place."""
        self.kernels.move_path((self.k_LSKD, self.v_LSKD), slot_BR, verdict)

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page, all layers: before a shared page is written to."""
        size = self.shape.page_size
        old = slice(source * size, (source + 1) * size)
        new = slice(target * size, (target + 1) * size)
        for pool in (self.k_LSKD, self.v_LSKD):
            pool[:, new] = pool[:, old]


@dataclass(frozen=True, slots=True)
class Attending:
    """The attention of one pass, layer by layer."""

    cache: PagedCache
    slot_T: Tensor  # of the pass's rows
    look: Look

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """What the queries see, [T, H, D]; keys are turned already."""
        keys = self.cache.layer(layer)
        self.cache.kernels.write(keys, self.slot_T, k_TKD, v_TKD)
        return self.look(q_THD, keys)


@dataclass(frozen=True, slots=True)
class Turned(Attending):
    """The same, and it turns queries and keys by itself if it is given the angles."""

    turn_write: TurnWrite
    turn_look: TurnLook | None  # both in one launch

    def turning(self, layer: int, qkv_TAD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """What the queries see, [T, H, D], from one projection of queries, keys and values."""
        keys = self.cache.layer(layer)
        if self.turn_look is not None:
            return self.turn_look(qkv_TAD, angles, keys)
        return self.look(self.turn_write(qkv_TAD, angles, keys, self.slot_T), keys)


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that cost no memory on the CPU until they are written."""
    if device.type != "cpu" or 0 in size:
        return torch.zeros(size, dtype=dtype, device=device)
    # numpy asks the system for zero pages, where torch.zeros would write every one of them
    count = math.prod(size) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(size)

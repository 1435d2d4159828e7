"""How a pass looks at its keys in Triton: tree attention with a cut that suits what is seen.

Legend: T flat rows, A = H + 2 K heads of a fused projection (queries, keys, values), H query
heads, K key heads, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from furcate.kernels.attention_cut import one_tile, splits_for, tile_for
from furcate.kernels.tree_attention import Keys, Sight
from furcate.kernels.tree_attention_triton import tree_attention
from furcate.shared_memory import shared_memory

__all__ = ["look", "look_invariant", "turn_look"]

_CHUNK = 512  # columns of a split whose borders are fixed
_TURNED_ROWS = 16  # packed rows whose queries are turned anew by every split


def look(sight: Sight, group: int, dtype: torch.dtype) -> Callable[[Tensor, Keys], Tensor]:
    """As `furcate.kernels.tree_attention.look`."""

    def attend(q_THD: Tensor, keys: Keys) -> Tensor:
        return _fitting(q_THD, keys, sight, group)

    return attend


def turn_look(
    sight: Sight, group: int, dtype: torch.dtype
) -> Callable[[Tensor, tuple[Tensor, Tensor], Keys], Tensor] | None:
    """`turn_write` and then `look` in one launch, (qkv_TAD, angles, keys) -> out_THD.

    The slots are those of the sight's rows; pads write nothing. None where the rows are too many,
    since each split turns them anew.
    """
    if sight.rows * group > _TURNED_ROWS:
        return None

    def attend(qkv_TAD: Tensor, angles: tuple[Tensor, Tensor], keys: Keys) -> Tensor:
        return _fitting(qkv_TAD, keys, sight, group, angles)

    return attend


def _fitting(
    q_TAD: Tensor,
    keys: Keys,
    sight: Sight,
    group: int,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    (kv, size), columns = keys.k_SKD.shape[1:], sight.places.columns
    room = shared_memory(q_TAD.device)
    tile = tile_for(sight.rows * group, size, q_TAD.dtype, columns, room)
    programs = kv * triton.cdiv(sight.rows * group, tile.rows) * len(sight.live_B)
    splits = splits_for(programs, columns, tile)
    return tree_attention(q_TAD, keys, sight, splits=splits, tile=tile, angles=angles)


def look_invariant(
    sight: Sight, group: int, dtype: torch.dtype
) -> Callable[[Tensor, Keys], Tensor]:
    """As `look`; a row's result is the same bit for bit whatever other rows and requests there are.

    So one row of a chain sees what it would see alone.
    """

    def attend(q_THD: Tensor, keys: Keys) -> Tensor:
        tile = one_tile(keys.k_SKD.shape[2], dtype, shared_memory(q_THD.device))
        return tree_attention(q_THD, keys, sight, tile=tile, chunk=_CHUNK)

    return attend

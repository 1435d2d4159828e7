"""The accepted path's keys and values put in place in Triton: all layers in one launch.

Twin of `kv_move`. Legend: B requests, R rows, D accepted levels, L layers, S slots, E elements of a
slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.draft import Verdict

__all__ = ["move_path"]

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PROGRAMS = 2048  # where there are more, a program does several layers
_TILE = 4096  # elements in flight


def move_path(pools_LS: tuple[Tensor, Tensor], slot_BR: Tensor, verdict: Verdict) -> None:
    """As `furcate.kernels.kv_move.move_path`, for keys and values [L, S, ...] that lie dense.

    Nothing is read or written for a request whose likeliest path won: its rows are in place.
    """
    keys, values = (pool.view(_WHOLE[pool.itemsize]) for pool in pools_LS)
    assert keys.shape == values.shape and keys.dtype == values.dtype
    tensors = (keys, values, slot_BR, verdict.path_BD, verdict.count_B)
    assert all(x.is_contiguous() for x in tensors)
    layers, slots = keys.shape[:2]
    size = keys[0, 0].numel()
    batch, levels = verdict.path_BD.shape
    lanes = triton.next_power_of_2(levels)
    width = min(triton.next_power_of_2(size), max(32, _TILE // lanes))
    blocks = triton.cdiv(size, width)
    each = triton.cdiv(batch * blocks * layers, _PROGRAMS)
    _move[(batch, triton.cdiv(layers, each), blocks)](
        *tensors,
        slot_BR.shape[1],
        levels,
        layers,
        slots,
        size,
        each,
        D=lanes,
        E=width,
        num_warps=4,
    )


@triton.jit
def _move(
    k_ptr,
    v_ptr,
    slot_ptr,
    path_ptr,
    count_ptr,
    rows,
    levels,
    layers,
    slots,
    size,
    each,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """Some layers of one request, some elements of each slot: nobody else touches those."""
    b = tl.program_id(0)
    level_D = tl.arange(0, D)
    inside_D = (level_D > 0) & (level_D < levels) & (level_D < tl.load(count_ptr + b))
    row_D = tl.load(path_ptr + b * levels + level_D, mask=inside_D, other=0)
    moved_D = inside_D & (row_D != level_D)
    if tl.max(moved_D.to(tl.int32), 0) > 0:
        source_D = tl.load(slot_ptr + b * rows + row_D, mask=moved_D, other=0)
        target_D = tl.load(slot_ptr + b * rows + level_D, mask=moved_D, other=0)
        e_E = tl.program_id(2) * E + tl.arange(0, E)
        mask_DE = moved_D[:, None] & (e_E < size)[None, :]
        from_DE = source_D[:, None] * size + e_E[None, :]
        to_DE = target_D[:, None] * size + e_E[None, :]
        first = tl.program_id(1) * each
        for layer in range(first, tl.minimum(first + each, layers)):
            base = tl.cast(layer, tl.int64) * slots * size
            k_DE = tl.load(k_ptr + base + from_DE, mask=mask_DE)
            v_DE = tl.load(v_ptr + base + from_DE, mask=mask_DE)
            # a level's target may be an earlier level's source: all is read before any is written
            tl.debug_barrier()
            tl.store(k_ptr + base + to_DE, k_DE, mask=mask_DE)
            tl.store(v_ptr + base + to_DE, v_DE, mask=mask_DE)

"""The sums of a product's splits: where they wait, and the last split to arrive adds them up.

Legend: of one tile: S splits, N rows of the weight, M rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.models.product_cut import Size, Tile

__all__ = ["arrived_last", "joined", "keep_part", "parts_of", "tickets"]

_MOST_TICKETS = 1024
_TICKETS: dict[tuple[torch.device, int], Tensor] = {}


def parts_of(x_TI: Tensor, size: Size, tile: Tile) -> Tensor:
    """Unwritten room for what all splits of all tiles find, float32."""
    return x_TI.new_empty(tile.part_bytes(size) // 4, dtype=torch.float32)


def tickets(x_TI: Tensor, tiles: int) -> Tensor:
    """Counts of splits that have arrived, one for each tile; whoever is last clears it.

    They belong to the stream, on which products follow one another. Recordings made on one stream
    have the same ones, so that they may not be replayed at the same time.

    Raises:
        RuntimeError: the stream records and has none yet, since they must outlive a recording.
    """
    assert tiles <= _MOST_TICKETS
    stream = torch.cuda.current_stream(x_TI.device).cuda_stream if x_TI.is_cuda else 0
    key = x_TI.device, stream
    if key not in _TICKETS:
        if x_TI.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("launch this product on the stream once before it is recorded there")
        _TICKETS[key] = torch.zeros(_MOST_TICKETS, dtype=torch.int32, device=x_TI.device)
    return _TICKETS[key]


@triton.jit
def keep_part(part_ptr, acc_NM, square_M):
    """Stores what one split found, rows of the weight one after the other, then the squares."""
    N: tl.constexpr = acc_NM.shape[0]
    M: tl.constexpr = acc_NM.shape[1]
    m_M = tl.arange(0, M)
    tl.store(part_ptr + tl.arange(0, N)[:, None] * M + m_M[None, :], acc_NM)
    tl.store(part_ptr + N * M + m_M, square_M)


@triton.jit
def arrived_last(ticket_ptr, S: tl.constexpr):
    """Whether all other splits of a tile have kept their parts; the ticket is clear again then."""
    tl.debug_barrier()  # the parts of all threads are out before one thread says so
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu") == S - 1
    if last:
        tl.store(ticket_ptr, 0)  # for the next launch
    return last


@triton.jit
def joined(part_ptr, S: tl.constexpr, N: tl.constexpr, M: tl.constexpr):
    """The sums of all splits in their order, whoever comes last: [N, M], and the squares' [M].

    Reads pass by the processor's own cache, which may hold what was there before.
    """
    m_M = tl.arange(0, M)
    at_NM = tl.arange(0, N)[:, None] * M + m_M[None, :]
    acc_NM = tl.zeros((N, M), tl.float32)
    square_M = tl.zeros((M,), tl.float32)
    for s in tl.static_range(S):  # unrolled: all reads are on their way at once
        from_ptr = part_ptr + s * (N * M + M)
        acc_NM += tl.load(from_ptr + at_NM, cache_modifier=".cg")
        square_M += tl.load(from_ptr + N * M + m_M, cache_modifier=".cg")
    return acc_NM, square_M

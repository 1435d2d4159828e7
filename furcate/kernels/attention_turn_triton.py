"""Queries turned as they are read, and the rows' own keys turned and written, in tree attention.

What `turn_write_triton` does in a launch of its own. Legend: T rows, A = H + 2 K heads of a fused
projection (queries, keys, values), H query heads, K key heads, D head size, N rows that are read,
J rows whose keys are written at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["turned", "write_own"]

_WRITTEN = tl.constexpr(16)  # rows at a time


@triton.jit
def turned(x_ptr, cos_ptr, sin_ptr, at_N, row_N, used_N, D: tl.constexpr):
    """Heads that begin at `at`, turned by the angles of their rows and rounded; others are 0.

    Two half-precision numbers multiply exactly in float32, so that a sum of two such products is
    the same bit for bit however a compiler fuses it.
    """
    d_D = tl.arange(0, D)
    used_ND = used_N[:, None]
    angle_ND = row_N[:, None] * D + d_D
    x_ND = tl.load(x_ptr + at_N[:, None] + d_D, mask=used_ND, other=0.0)
    other_ND = tl.load(x_ptr + at_N[:, None] + (d_D + D // 2) % D, mask=used_ND, other=0.0)
    cos_ND = tl.load(cos_ptr + angle_ND, mask=used_ND, other=0.0).to(tl.float32)
    sin_ND = tl.load(sin_ptr + angle_ND, mask=used_ND, other=0.0).to(tl.float32)  # with its sign
    sum_ND = x_ND.to(tl.float32) * cos_ND + other_ND.to(tl.float32) * sin_ND
    return sum_ND.to(x_ND.dtype)


@triton.jit
def write_own(
    own_ptr,
    cos_ptr,
    sin_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    stride,
    rows,
    column,
    split,
    splits,
    KV: tl.constexpr,
    D: tl.constexpr,
    FIRST: tl.constexpr,
    N: tl.constexpr,
):
    """Keys and values of the rows in this split's steps, row 0 in `column`, go to their slots.

    No other split looks at these columns. Where the rows take several tiles each of them writes,
    and all write the same bits, so that each program reads what it wrote itself. Pointers are those
    of one request and key head. What is written is read behind a barrier.
    """
    first = tl.maximum(column // N - FIRST // N, 0)
    last = tl.maximum((column + rows - 1) // N - FIRST // N, 0)
    ahead = (split + splits - first % splits) % splits  # from the first step to one of this split
    if (rows > 0) & (first + ahead <= last):
        d_D = tl.arange(0, D)
        for start in range(0, rows, _WRITTEN):
            r_J = start + tl.arange(0, _WRITTEN)
            step_J = tl.maximum((column + r_J) // N - FIRST // N, 0)
            mine_J = (r_J < rows) & (step_J % splits == split)
            row_J = r_J.to(tl.int64)
            at_J = row_J * stride
            slot_J = tl.load(slot_ptr + r_J, mask=mine_J, other=0)
            k_JD = turned(own_ptr, cos_ptr, sin_ptr, at_J, row_J, mine_J, D)
            v_JD = tl.load(own_ptr + KV * D + at_J[:, None] + d_D, mask=mine_J[:, None], other=0.0)
            to_JD = slot_J[:, None] * (KV * D) + d_D
            tl.store(k_ptr + to_JD, k_JD, mask=mine_J[:, None])
            tl.store(v_ptr + to_JD, v_JD, mask=mine_J[:, None])
        tl.debug_barrier()

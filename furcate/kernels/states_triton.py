"""States that a draft network keeps by position, in Triton: one launch each way.

Twin of `states`. Legend: B requests, W token columns, R rows of one pass, X rows to be kept, S
slots, C size of a state; of a program: N rows and K columns, padded to powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels import tree_attention
from furcate.kernels.states import Tail
from furcate.kernels.tree_attention import Places

__all__ = ["keep", "tail"]

_MOST_COLUMNS = 4096


def tail(tokens_BW: Tensor, places: Places, drafted: tuple[int, int], rows: int) -> Tail:
    """As `furcate.kernels.states.TailOf`; lengths and entries of rows lie dense."""
    batch, length_B, table_BP = len(tokens_BW), places.length_B, places.table_BP
    assert tokens_BW.stride(1) == 1 and table_BP.stride(1) == 1 and length_B.is_contiguous()
    tokens_BR, position_BR, before_BR, slot_BR, end_BR = (
        length_B.new_empty((batch, rows)) for _ in range(5)
    )
    live_B, start_B, root_B, below_B = (length_B.new_empty(batch) for _ in range(4))
    _tail[(batch,)](
        tokens_BW,
        length_B,
        table_BP,
        tokens_BR,
        position_BR,
        before_BR,
        slot_BR,
        end_BR,
        live_B,
        start_B,
        root_B,
        below_B,
        tokens_BW.stride(0),
        table_BP.stride(0),
        *drafted,
        rows,
        PAGE=places.page_size,
        N=triton.next_power_of_2(rows),
        num_warps=1,
    )
    root_B1, below_B1 = root_B[:, None], below_B[:, None]
    return Tail(
        tokens_BR, position_BR, before_BR, slot_BR, end_BR, live_B, start_B, root_B1, below_B1
    )


def keep(state_SC: Tensor, places: Places, count_B: Tensor, state_TC: Tensor) -> None:
    """As `furcate.kernels.states.Keep`; counts, lengths and entries of rows lie dense."""
    (total, size), table_BP = state_TC.shape, places.table_BP
    assert state_SC.dtype == state_TC.dtype and state_SC.shape[1] == size
    assert state_SC.stride(1) == state_TC.stride(1) == table_BP.stride(1) == 1
    assert count_B.is_contiguous() and places.length_B.is_contiguous()
    block = min(_MOST_COLUMNS, triton.next_power_of_2(size))
    _keep[(total, triton.cdiv(size, block))](
        state_SC,
        table_BP,
        places.length_B,
        count_B,
        state_TC,
        total // len(count_B),
        size,
        state_SC.stride(0),
        table_BP.stride(0),
        state_TC.stride(0),
        PAGE=places.page_size,
        K=block,
        num_warps=max(1, min(8, block // 256)),
    )


_SCRATCH = tl.constexpr(tree_attention.SCRATCH)


@triton.jit(do_not_specialize=["tokens_stride", "table_stride", "first", "each"])
def _tail(
    tokens_ptr,
    length_ptr,
    table_ptr,
    out_tokens_ptr,
    position_ptr,
    before_ptr,
    slot_ptr,
    end_ptr,
    live_ptr,
    start_ptr,
    root_ptr,
    below_ptr,
    tokens_stride,
    table_stride,
    first,
    each,
    rows,
    PAGE: tl.constexpr,
    N: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    row_N = tl.arange(0, N)
    inside_N = row_N < rows
    length = tl.load(length_ptr + b)
    start = tl.maximum(length + 1 - rows, 0)
    live = length + 1 - start
    live_N = row_N < live
    position_N = start + tl.where(live_N, row_N, 0)
    token_N = tl.load(tokens_ptr + b * tokens_stride + position_N, mask=inside_N, other=0)
    table_ptr += b * table_stride
    root_N = row_N == live - 1
    mine_N = inside_N & live_N & (row_N < live - 1)  # the root's page may not be reserved yet
    page_N = tl.load(table_ptr + position_N // PAGE, mask=mine_N, other=0)
    slot_N = tl.where(mine_N, page_N * PAGE + position_N % PAGE, 0)
    slot_N = tl.where(root_N, first + b * each, slot_N)
    above_N = tl.maximum(position_N - 1, 0)
    known_N = inside_N & (position_N > 0)
    page_N = tl.load(table_ptr + above_N // PAGE, mask=known_N, other=0)
    before_N = tl.where(known_N, page_N * PAGE + above_N % PAGE, 0)
    out_N = b * rows + row_N
    tl.store(out_tokens_ptr + out_N, token_N, mask=inside_N)
    tl.store(position_ptr + out_N, position_N, mask=inside_N)
    tl.store(before_ptr + out_N, before_N, mask=inside_N)
    tl.store(slot_ptr + out_N, slot_N, mask=inside_N)
    tl.store(end_ptr + out_N, tl.where(live_N, live, row_N + 1), mask=inside_N)
    tl.store(live_ptr + b, live)
    tl.store(start_ptr + b, start)
    tl.store(root_ptr + b, live - 1)
    tl.store(below_ptr + b, length + 1)


@triton.jit(do_not_specialize=["each", "table_stride"])
def _keep(
    state_ptr,
    table_ptr,
    length_ptr,
    count_ptr,
    new_ptr,
    each,
    size,
    state_stride,
    table_stride,
    new_stride,
    PAGE: tl.constexpr,
    K: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    b = t // each
    row = t % each
    if row < tl.load(count_ptr + b):
        at = tl.load(length_ptr + b) + row
        slot = tl.load(table_ptr + b * table_stride + at // PAGE) * PAGE + at % PAGE
        k_K = tl.program_id(1) * K + tl.arange(0, K)
        new_K = tl.load(new_ptr + t * new_stride + k_K, mask=k_K < size)
        # the scratch slot stays zero: it is the state ahead of a text's first token
        used_K = (k_K < size) & (slot != _SCRATCH)
        tl.store(state_ptr + slot * state_stride + k_K, new_K, mask=used_K)

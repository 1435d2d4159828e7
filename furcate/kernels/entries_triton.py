"""What a round reads of its requests in Triton: one launch, a program a request.

Twin of `entries`. Legend: C slots, B requests, W token columns, P pages of a table, S stop ids,
F numbers of a law that are floats, I that are integers, N numbers that follow from them, L lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.draft import Draft
from furcate.kernels.entries import FLOATS, INTS, Book, Entries

__all__ = ["entries"]

_NUMBERS = 8  # slot, length, root, room, output, and the constants 0, 1, -1
_N = tl.constexpr(_NUMBERS)
_F = tl.constexpr(len(FLOATS))
_I = tl.constexpr(len(INTS))
_LIMIT = tl.constexpr(INTS.index("limit"))
_PROMPT = tl.constexpr(INTS.index("prompt"))
_LANES = 1024  # pages a turn
_ALIGNED = 4  # entries: 16 bytes of the narrower


def entries(book: Book, slot_B: Tensor, dummy: int | None = None) -> Entries:
    """As `furcate.kernels.entries.entries`, in one launch; the root alone comes with it."""
    slots, pages = book.table_CP.shape
    stops, batch = book.stop_CS.shape[1], len(slot_B)
    fields = [getattr(book, name) for name in Book.__slots__]
    assert all(x.is_contiguous() for x in (*fields, slot_B))
    pitch = -(-batch // _ALIGNED) * _ALIGNED  # every row begins where kernels like it to
    number_NB = slot_B.new_empty((_NUMBERS + len(INTS), pitch))
    real_FB = book.floats_FC.new_empty((len(FLOATS) + 1, pitch))
    table_BP, stop_BS = slot_B.new_empty((batch, pages)), slot_B.new_empty((batch, stops))
    _entries[(batch,)](
        slot_B,
        *fields,
        number_NB,
        real_FB,
        table_BP,
        stop_BS,
        pitch,
        slots,
        book.tokens_CW.shape[1],
        pages,
        stops,
        -1 if dummy is None else dummy,
        L=min(_LANES, triton.next_power_of_2(max(pages, stops))),
        num_warps=4,
    )
    number_NB, real_FB = number_NB[:, :batch], real_FB[:, :batch]
    slot, length, root, room, output, zero, one, minus = number_NB[:_NUMBERS].unbind(0)
    return Entries(
        slot_B=slot,
        length_B=length,
        root_B=root,
        room_B=room,
        output_B=output,
        table_BP=table_BP,
        stop_BS=stop_BS,
        floats_FB=real_FB[: len(FLOATS)],
        ints_IB=number_NB[_NUMBERS:],
        alone=_alone(root, zero, one, minus, real_FB[len(FLOATS)]),
    )


def _alone(root_B: Tensor, zero_B: Tensor, one_B: Tensor, minus_B: Tensor, real_B: Tensor) -> Draft:
    """As `select.lone_roots` has it."""
    zero_B1 = zero_B[:, None]
    return Draft(
        tokens_BR=root_B[:, None],
        parent_BR=zero_B1,
        depth_BR=zero_B1,
        end_BR=one_B[:, None],
        value_BR=real_B[:, None],
        live_B=one_B,
        tag_BR=minus_B[:, None],
    )


@triton.jit
def _entries(
    slot_ptr,
    tokens_ptr,
    length_ptr,
    finish_ptr,
    table_ptr,
    stop_ptr,
    floats_ptr,
    ints_ptr,
    number_ptr,
    real_ptr,
    out_table_ptr,
    out_stop_ptr,
    pitch,
    slots,
    width,
    pages,
    stops,
    dummy,
    L: tl.constexpr,
):
    b = tl.program_id(0)
    slot = tl.load(slot_ptr + b)
    finish = tl.load(finish_ptr + slot)
    if (dummy >= 0) & (finish > 0):
        slot = slot * 0 + dummy
        finish = tl.load(finish_ptr + slot)
    length = tl.load(length_ptr + slot)
    limit = tl.load(ints_ptr + _LIMIT * slots + slot)
    prompt = tl.load(ints_ptr + _PROMPT * slots + slot)
    tl.store(number_ptr + b, slot)
    tl.store(number_ptr + pitch + b, length)
    tl.store(number_ptr + 2 * pitch + b, tl.load(tokens_ptr + slot * width + length))
    tl.store(number_ptr + 3 * pitch + b, tl.where(finish > 0, 0, limit - length - 1))
    tl.store(number_ptr + 4 * pitch + b, length + 1 - prompt)
    tl.store(number_ptr + 5 * pitch + b, slot * 0)
    tl.store(number_ptr + 6 * pitch + b, slot * 0 + 1)
    tl.store(number_ptr + 7 * pitch + b, slot * 0 - 1)
    tl.store(real_ptr + _F * pitch + b, 0.0)
    for i in tl.static_range(_I):
        tl.store(number_ptr + (_N + i) * pitch + b, tl.load(ints_ptr + i * slots + slot))
    for f in tl.static_range(_F):
        tl.store(real_ptr + f * pitch + b, tl.load(floats_ptr + f * slots + slot))
    for first in range(0, pages, L):
        at_L = first + tl.arange(0, L)
        page_L = tl.load(table_ptr + slot * pages + at_L, mask=at_L < pages)
        tl.store(out_table_ptr + b * pages + at_L, page_L, mask=at_L < pages)
    for first in range(0, stops, L):
        at_L = first + tl.arange(0, L)
        stop_L = tl.load(stop_ptr + slot * stops + at_L, mask=at_L < stops)
        tl.store(out_stop_ptr + b * stops + at_L, stop_L, mask=at_L < stops)

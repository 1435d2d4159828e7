"""What a round reads of each request in it, from what the device knows of all of them.

Legend: C slots, B requests, W token columns, P pages of a table, S stop ids, F numbers of a law
that are floats, I that are integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.kernels.draft import Draft

__all__ = ["FLOATS", "INTS", "Book", "Entries", "ReadEntries", "entries"]

FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
INTS = ("top_k", "seed", "choice", "min_tokens", "prompt", "limit")


@dataclass(frozen=True, slots=True)
class Book:
    """All requests by slot; every tensor lies dense and stays where it is."""

    tokens_CW: Tensor  # int64; the last column takes what nobody wants
    length_C: Tensor  # int64, L: tokens whose keys are cached
    finish_C: Tensor  # int64, above 0 once an answer is finished
    table_CP: Tensor  # int64
    stop_CS: Tensor  # int64, -1 pads
    floats_FC: Tensor  # float32, in the order of FLOATS
    ints_IC: Tensor  # int64, in the order of INTS


@dataclass(frozen=True, slots=True)
class Entries:
    """The same of the requests in a round, and what follows from it."""

    slot_B: Tensor
    length_B: Tensor
    root_B: Tensor  # int64, tokens[L]
    room_B: Tensor  # int64, tokens that may still be emitted; 0 once the answer is finished
    output_B: Tensor  # int64, output tokens up to the root, the root among them if it is one
    table_BP: Tensor
    stop_BS: Tensor
    floats_FB: Tensor
    ints_IB: Tensor
    alone: Draft | None = None  # the root without a draft, where it costs nothing; nobody writes it


ReadEntries = Callable[[Book, Tensor, int | None], Entries]
"""(all requests, slot_B, dummy) -> entries; see `entries`."""


def entries(book: Book, slot_B: Tensor, dummy: int | None = None) -> Entries:
    """Look the requests in `slot_B` up; the torch reference.

    With `dummy` that slot is taken in place of those whose answer is finished.
    """
    if dummy is not None:
        slot_B = torch.where(book.finish_C[slot_B] > 0, dummy, slot_B)
    length_B = book.length_C[slot_B]
    ints_IB = book.ints_IC[:, slot_B]
    room_B = ints_IB[INTS.index("limit")] - length_B - 1
    return Entries(
        slot_B=slot_B,
        length_B=length_B,
        root_B=book.tokens_CW[slot_B, length_B],
        room_B=torch.where(book.finish_C[slot_B] > 0, 0, room_B),
        output_B=length_B + 1 - ints_IB[INTS.index("prompt")],
        table_BP=book.table_CP[slot_B],
        stop_BS=book.stop_CS[slot_B],
        floats_FB=book.floats_FC[:, slot_B],
        ints_IB=ints_IB,
    )

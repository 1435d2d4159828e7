"""What a round reads of its requests in Triton: the torch reference's, bit for bit.

Legend: C slots, B requests.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from poison import unwritten_numbers_are_poison  # noqa: F401 (a fixture)
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.kernels import entries_triton
from furcate.kernels.entries import FLOATS, INTS, Book, Entries, entries
from furcate.kernels.select import lone_roots

pytestmark = [*MARKS, pytest.mark.usefixtures("unwritten_numbers_are_poison")]


def book_of(slots: int, width: int, pages: int, stops: int) -> Book:
    """Random numbers of any size; every third request has finished, and so has the dummy."""
    rng = torch.Generator().manual_seed(width)

    def ints(*size: int, most: int = 2**40) -> Tensor:
        return torch.randint(-most, most, size, generator=rng)

    finish_C = torch.arange(slots) % 3
    finish_C[-1] = 1
    return Book(
        tokens_CW=ints(slots, width),
        length_C=torch.randint(0, width, (slots,), generator=rng),
        finish_C=finish_C.clamp_max(1),
        table_CP=ints(slots, pages),
        stop_CS=ints(slots, stops),
        floats_FC=torch.rand(len(FLOATS), slots, generator=rng),
        ints_IC=ints(len(INTS), slots, most=2**62),
    )


def numbers(found: Entries) -> list[Tensor]:
    return [getattr(found, f.name).cpu() for f in fields(found) if f.name != "alone"]


@pytest.mark.parametrize("at_work", [False, True])
@pytest.mark.parametrize(
    ("slots", "pages", "stops", "asked"),
    [
        (2, 1, 1, [0]),
        (5, 7, 64, [3, 1, 4]),
        (9, 33, 5, [8, 2, 2, 0, 7]),
        (4, 1500, 64, [2, 1]),
    ],
)
def test_entries_are_the_references(
    slots: int, pages: int, stops: int, asked: list[int], at_work: bool
) -> None:
    book, slot_B = book_of(slots, 11 + pages, pages, stops), torch.tensor(asked)
    there = Book(*(getattr(book, f.name).to(DEVICE) for f in fields(book)))
    dummy = slots - 1 if at_work else None
    found = entries_triton.entries(there, slot_B.to(DEVICE), dummy)
    told = entries(book, slot_B, dummy)
    for one, other in zip(numbers(found), numbers(told), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    alone, root = found.alone, lone_roots(told.root_B)
    assert alone is not None
    for field in fields(root):
        ours, theirs = getattr(alone, field.name), getattr(root, field.name)
        assert ours.is_contiguous() and ours.dtype == theirs.dtype
        assert torch.equal(ours.cpu(), theirs), field.name


def test_what_has_finished_gives_its_place_to_the_dummy() -> None:
    book, slot_B = book_of(6, 9, 2, 3), torch.tensor([0, 1, 2, 3, 4])
    assert entries(book, slot_B, 5).slot_B.tolist() == [0, 5, 5, 3, 5]
    assert entries(book, slot_B).slot_B.tolist() == slot_B.tolist()
    assert entries(book, slot_B, 5).room_B[[1, 2, 4]].tolist() == [0, 0, 0]


def test_every_number_lies_dense_and_aligned() -> None:
    book, slot_B = book_of(4, 9, 2, 3), torch.tensor([1, 2, 0])
    there = Book(*(getattr(book, f.name).to(DEVICE) for f in fields(book)))
    found = entries_triton.entries(there, slot_B.to(DEVICE))
    first = found.slot_B.data_ptr()
    for x_B in (found.length_B, found.root_B, *found.ints_IB):
        assert x_B.is_contiguous() and (x_B.data_ptr() - first) % 16 == 0

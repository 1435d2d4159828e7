"""A verdict committed in Triton: the book and the outcome of the torch reference, bit for bit.

Legend: B requests, C slots, R rows.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from poison import unwritten_numbers_are_poison  # noqa: F401 (a fixture)
from test_kernels_select_triton import random_pool
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.engine.emitted import Emitted, packed, unpacked
from furcate.kernels.accept import accept
from furcate.kernels.draft import Draft, Verdict
from furcate.kernels.entries import FLOATS, INTS, Book, Entries, entries
from furcate.kernels.ledger import Settled
from furcate.kernels.ledger_triton import settle
from furcate.kernels.select import lone_roots, select
from furcate.verify import stops
from furcate.verify.stops import Finish

pytestmark = [*MARKS, pytest.mark.usefixtures("unwritten_numbers_are_poison")]

VOCAB = 7  # few tokens, so that choices follow children and stop ids are met
SLOTS = 6  # the last is the dummy


def on(device: torch.device, record: Any) -> Any:
    """A copy of a record with its tensors on a device."""
    moved = {
        field.name: value.to(device, copy=True)
        for field in fields(record)
        if isinstance(value := getattr(record, field.name), Tensor)
    }
    return replace(record, **moved)


def book_of(rng: torch.Generator, stops_wide: int) -> Book:
    """Requests with little room, one of them finished; each with a few stop ids or none."""
    ints_IC = torch.zeros(len(INTS), SLOTS, dtype=torch.int64)
    length_C = torch.randint(0, 30, (SLOTS,), generator=rng)
    ints_IC[INTS.index("limit")] = length_C + 1 + torch.randint(0, 9, (SLOTS,), generator=rng)
    finish_C = torch.tensor([0, 0, 0, 1, 0, 1])
    length_C[-1] = 0
    return Book(
        tokens_CW=torch.full((SLOTS, 80), 55),
        length_C=length_C,
        finish_C=finish_C,
        table_CP=torch.zeros(SLOTS, 2, dtype=torch.int64),
        stop_CS=torch.randint(-9, 2, (SLOTS, stops_wide), generator=rng).clamp_min(-1),
        floats_FC=torch.ones(len(FLOATS), SLOTS),
        ints_IC=ints_IC,
    )


def judged(rng: torch.Generator, batch: int, rows: int) -> tuple[Draft, Verdict]:
    """Random trees whose choices mostly follow a child; some rows are broken."""
    draft = lone_roots(torch.arange(batch))
    if rows > 1:
        pool = random_pool(rows, 2 * rows, batch)
        allowed = torch.randint(1, rows + 1, (batch,), generator=rng)
        draft = select(pool, torch.arange(batch), rows, allowed)
    draft = replace(draft, tokens_BR=draft.tokens_BR % VOCAB)
    first_BR = (torch.arange(rows) + 1).clamp_max(rows - 1).expand(batch, -1)
    other_BR = torch.randint(0, rows, (batch, rows), generator=rng)
    sure_BR = torch.rand(batch, rows, generator=rng) < 0.8
    choice_BR = draft.tokens_BR.gather(1, torch.where(sure_BR, first_BR, other_BR))
    broken_BR = torch.rand(batch, rows, generator=rng) < 0.1
    return draft, accept(draft, choice_BR, int(draft.depth_BR.max()), broken_BR)


def settled(
    seed: int, asked: list[int], rows: int, stops_wide: int, withdrawn: bool, gains: int = 0
) -> list[tuple[Settled, Book, Tensor | None]]:
    """What the kernel makes of a round, and what the reference does."""
    rng = torch.Generator().manual_seed(seed)
    book = book_of(rng, stops_wide)
    draft, verdict = judged(rng, len(asked), rows)
    found: Entries = replace(entries(book, torch.tensor(asked)), alone=None)
    value_CP = torch.rand(SLOTS, 1030, generator=rng) if withdrawn else None
    made = []
    for by, device in ((settle, DEVICE), (stops.settle, torch.device("cpu"))):
        there = on(device, book)
        values = None if value_CP is None else value_CP.to(device, copy=True)
        given = (on(device, x) for x in (found, draft, verdict))
        told = by(there, *given, values, gains)
        made.append((told, there, values))
    return made


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("asked", "rows", "stops_wide", "withdrawn"),
    [
        ([1], 1, 64, True),
        ([2, 0, 3, 4], 1, 5, False),
        ([4, 5, 1, 5, 5], 9, 1, True),
        ([3, 2, 1, 0, 5], 40, 64, False),
    ],
)
def test_book_and_outcome_are_the_references(
    seed: int, asked: list[int], rows: int, stops_wide: int, withdrawn: bool
) -> None:
    (told, book, values), (truth, judge, dead) = settled(seed, asked, rows, stops_wide, withdrawn)
    for field in fields(truth):
        ours, theirs = getattr(told, field.name).cpu(), getattr(truth, field.name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), field.name
    for field in fields(judge):
        ours, theirs = getattr(book, field.name).cpu(), getattr(judge, field.name)
        if field.name == "tokens_CW":  # the last column is for what nobody wants
            ours, theirs = ours[:, :-1], theirs[:, :-1]
        assert torch.equal(ours, theirs), field.name
    if values is not None and dead is not None:
        assert torch.equal(values.cpu(), dead)
        assert values[asked].isneginf().all() and not values.isneginf().all()


def test_the_rounds_end_in_every_way() -> None:
    ends: set[int] = set()
    flags: set[tuple[str, bool]] = set()
    for seed in range(8):
        told = settled(seed, [0, 1, 2, 3, 4], 9, 3, False)[0][0]
        ends |= set(told.finish_B.tolist())
        for name in ("offered_B", "strayed_B", "broken_B"):
            flags |= {(name, flag) for flag in getattr(told, name).tolist()}
    assert ends == {int(finish) for finish in Finish} and len(flags) == 6


@pytest.mark.parametrize("nodes", [0, 5])
def test_the_host_reads_it_as_one_block_that_need_not_be_packed(nodes: int) -> None:
    (told, *_), (truth, *_) = settled(3, [1, 0, 2], 9, 3, False, nodes)
    assert told.gain_BN.shape == truth.gain_BN.shape == (3, nodes)
    for one in (told, truth):
        one.gain_BN.copy_(torch.arange(3 * nodes).view(3, nodes))
    shown = {field.name: getattr(told, field.name) for field in fields(told)}
    emitted = Emitted(**shown, raw=None, processed=None)
    block = packed(emitted)
    assert block.untyped_storage().data_ptr() == told.tokens_BD.untyped_storage().data_ptr()
    read = unpacked(block.cpu(), emitted)
    for field in fields(truth):
        assert torch.equal(getattr(read, field.name), getattr(truth, field.name)), field.name

"""N-gram matches in Triton: every token and place of the torch reference, on poisoned memory.

Legend: B requests, W columns of the text, K cells of the table of rates.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from poison import unwritten_numbers_are_poison  # noqa: F401 (a fixture)
from test_kernels_tally_triton import DUMMY, round_of
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.drafters.judge import judge
from furcate.drafters.ngram_calibration import Rates
from furcate.kernels.draft import Proposal
from furcate.kernels.ngram import Search, lookup
from furcate.kernels.ngram_triton import lookup as on_device
from furcate.kernels.tally_triton import tally_rates

pytestmark = [*MARKS, pytest.mark.usefixtures("unwritten_numbers_are_poison")]

CPU = torch.device("cpu")
NEAR = {"rtol": 1e-5, "atol": 1e-5}  # sums of a path's logs
USUAL = Search(depth=16, matches=8, shortest=1, longest=4)
SEARCHES = {
    "usual": USUAL,
    "one chain of one": Search(1, 1, 1, 1),
    "odd": Search(5, 3, 2, 7),
    "more matches than columns": Search(3, 21, 1, 3),
    "wide and long": Search(33, 17, 1, 16),
    "only long ones": Search(6, 5, 6, 9),
}


def learned(device: torch.device = CPU, seed: int = 0) -> Rates:
    """Rates that have seen something."""
    rng = torch.Generator().manual_seed(seed)
    rates = Rates(device)
    tried_K = torch.rand(len(rates.tried_K), generator=rng) * 40
    rates.tried_K.copy_(tried_K)
    rates.right_K.copy_(tried_K * torch.rand(len(tried_K), generator=rng))
    return rates


def texts(batch: int, width: int, words: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(tokens with passages that recur, lengths up to the last column; columns behind are junk)."""
    rng = torch.Generator().manual_seed(seed + width)
    tokens_BW = torch.randint(0, words, (batch, width), generator=rng)
    for b in range(batch):
        for _ in range(width // 12):
            size = int(torch.randint(2, 24, (), generator=rng))
            source, target = torch.randint(0, width, (2,), generator=rng).tolist()
            size = min(size, width - source, width - target)
            tokens_BW[b, target : target + size] = tokens_BW[b, source : source + size].clone()
    length_B = torch.randint(width // 2, width, (batch,), generator=rng)
    length_B[0] = width - 1
    return tokens_BW, length_B


def both(tokens_BW: Tensor, length_B: Tensor, search: Search = USUAL) -> tuple[Proposal, Proposal]:
    """(the kernels' proposal, the reference's)."""
    temperature_B = torch.tensor([0.0, 0.7, 1.3, 5.0]).repeat(len(length_B))[: len(length_B)]
    given = (tokens_BW, length_B, temperature_B)
    words, lengths, temperatures = (x.to(DEVICE) for x in given)
    there = on_device(words, lengths, temperatures, search, learned(DEVICE).table)
    here = Proposal(*(getattr(there, f.name).cpu() for f in fields(Proposal)))
    return here, lookup(*given, search, learned().table)


def differing(one: Any, other: Any) -> list[str]:
    pairs = {f.name: (getattr(one, f.name), getattr(other, f.name)) for f in fields(one)}
    return [name for name, (a, b) in pairs.items() if not same(a, b)]


def same(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.allclose(a, b, **NEAR) if a.is_floating_point() else torch.equal(a, b)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("words", [2, 9])
@pytest.mark.parametrize("width", [7, 100])
def test_trees_of_texts_that_repeat_come_out_as_in_torch(
    width: int, words: int, search: str
) -> None:
    assert differing(*both(*texts(3, width, words), SEARCHES[search])) == []


@pytest.mark.parametrize("width", [256, 257, 777])
def test_matches_of_several_stretches_are_ranked_together(width: int) -> None:
    made, told = both(*texts(2, width, 5))
    assert differing(made, told) == []
    assert (told.value_BP > -torch.inf).sum() > 20


@pytest.mark.parametrize("batch", [1, 5])
def test_where_nothing_recurs_nothing_is_alive(batch: int) -> None:
    tokens_BW = torch.arange(40).repeat(batch, 1)
    made, told = both(tokens_BW, torch.full((batch,), 39))
    assert differing(made, told) == []
    assert bool((made.value_BP == -torch.inf).all())


def test_requests_of_any_length_and_the_dummys_empty_row_come_out_as_in_torch() -> None:
    tokens_BW = torch.randint(0, 3, (6, 50), generator=torch.Generator().manual_seed(4))
    tokens_BW[5] = 0
    made, told = both(tokens_BW, torch.tensor([0, 1, 2, 49, 30, 0]))
    assert differing(made, told) == []
    assert bool((made.value_BP[[0, 5]] == -torch.inf).all())


@pytest.mark.parametrize("period", [1, 2, 5])
def test_a_text_that_goes_round_and_round_is_followed_round_and_round(period: int) -> None:
    tokens_BW = (torch.arange(64) % period).repeat(2, 1)
    assert differing(*both(tokens_BW, torch.tensor([63, 40]))) == []


def test_the_comparison_can_fail() -> None:
    tokens_BW, length_B = texts(3, 100, 4)
    made, told = both(tokens_BW, length_B)
    assert differing(made, told) == []
    shorter = lookup(tokens_BW, length_B - 1, torch.zeros(3), USUAL, learned().table)
    assert {"tokens_BP", "parent_BP", "value_BP", "tag_BP"} <= set(differing(made, shorter))
    cooler = lookup(tokens_BW, length_B, torch.zeros(3), USUAL, learned().table)
    assert differing(made, cooler) == ["value_BP"]
    assert differing(made, replace(told, value_BP=told.value_BP - 1e-3)) == ["value_BP"]


@pytest.mark.parametrize("rows", [2, 33, 64])
@pytest.mark.parametrize("batch", [1, 2, 19])
def test_what_rounds_say_of_each_cell_is_counted_as_in_torch(batch: int, rows: int) -> None:
    draft, verdict = round_of(batch, rows, 1)
    assert draft.tag_BR is not None
    ours, told = learned(DEVICE), learned()
    tag_BR = torch.where(draft.tag_BR < 0, -1, draft.tag_BR % len(told.tried_K))
    draft = replace(draft, tag_BR=tag_BR)
    slot_B = torch.arange(batch)
    there = [
        type(x)(*(getattr(x, name).to(DEVICE) for name in x.__slots__)) for x in (draft, verdict)
    ]
    for _ in range(2):
        counts = (ours.tried_K, ours.right_K)
        tally_rates(there[0], there[1], slot_B.to(DEVICE), DUMMY, counts)
        told.update(tag_BR, judge(draft, verdict, slot_B != DUMMY))
    assert torch.allclose(ours.tried_K.cpu(), told.tried_K, **NEAR)
    assert torch.allclose(ours.right_K.cpu(), told.right_K, **NEAR)
    assert batch < 3 or not torch.allclose(told.right_K, learned().right_K, **NEAR)

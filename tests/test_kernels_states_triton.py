"""The tail of a round and the states it leaves, in Triton: bit for bit torch's, on poison.

Legend: B requests, W token columns, P pages, S slots, C size of a state.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from poison import unwritten_numbers_are_poison  # noqa: F401 (a fixture)
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.kernels import states as reference
from furcate.kernels.states import Tail
from furcate.kernels.states_triton import keep, tail
from furcate.kernels.tree_attention import SCRATCH, Places

pytestmark = [*MARKS, pytest.mark.usefixtures("unwritten_numbers_are_poison")]

PAGE = 4
PAGES = 6  # of a request
LENGTHS = [0, 1, 3, 4, 13, 20]


def places(lengths: list[int]) -> Places:
    rng = torch.Generator().manual_seed(len(lengths))
    table_BP = torch.randperm(len(lengths) * PAGES, generator=rng).view(-1, PAGES) + 1
    length_B = torch.tensor(lengths, device=DEVICE)
    return Places(table_BP.to(DEVICE), length_B, PAGE, columns=24)


def differing(one: Tail, other: Tail) -> list[str]:
    names = [f.name for f in fields(Tail)]
    return [name for name in names if not torch.equal(getattr(one, name), getattr(other, name))]


@pytest.mark.parametrize("rows", [1, 2, 5, 9, 16])
@pytest.mark.parametrize("lengths", [LENGTHS, [0], [7, 2]])
def test_the_tail_of_a_round_is_torchs(rows: int, lengths: list[int]) -> None:
    tokens_BW = torch.arange(len(lengths) * 24, device=DEVICE).view(-1, 24)
    given = (tokens_BW[:, :22], places(lengths), (900, 17), rows)
    assert differing(tail(*given), reference.tail(*given)) == []


def kept(way: reference.Keep, counts: list[int], wide: int, size: int, spoilt: bool) -> Tensor:
    at = places(LENGTHS[-len(counts) :])
    rng = torch.Generator().manual_seed(wide)
    state_SC = torch.randn((len(counts) * PAGES + 1) * PAGE, size, generator=rng).to(DEVICE)
    state_SC[SCRATCH] = 0
    new_TC = torch.randn(len(counts) * wide, size + 3, generator=rng).to(DEVICE)[:, 1 : 1 + size]
    if spoilt:
        new_TC[wide - 1 :: wide] = torch.nan
    way(state_SC, at, torch.tensor(counts, device=DEVICE), new_TC)
    return state_SC


@pytest.mark.parametrize("size", [1, 16, 37])
@pytest.mark.parametrize("counts", [[0, 1, 2, 3], [3], [2, 0, 1]])
def test_states_are_kept_where_torch_keeps_them(counts: list[int], size: int) -> None:
    for spoilt in (False, True):
        given = (counts, 3, size, spoilt)
        heard, told = kept(keep, *given), kept(reference.keep, *given)
        assert torch.equal(heard.nan_to_num(7), told.nan_to_num(7))
        assert heard[SCRATCH].abs().sum() == 0


def test_a_request_without_pages_leaves_the_scratch_state_zero() -> None:
    """The dummy has no page but the scratch page, and a verdict of at least one token."""
    at = places([5, 0])
    at = replace(at, table_BP=at.table_BP * torch.tensor([[1], [0]], device=DEVICE))
    new_TC = torch.ones(4, 8, device=DEVICE)
    states = []
    for way in (keep, reference.keep):
        state_SC = torch.zeros((2 * PAGES + 1) * PAGE, 8, device=DEVICE)
        way(state_SC, at, torch.tensor([2, 2], device=DEVICE), new_TC)
        states.append(state_SC)
    assert torch.equal(*states)
    assert states[0][SCRATCH].abs().sum() == 0 and states[0].sum() > 0


def test_the_comparison_can_fail() -> None:
    tokens_BW = torch.arange(48, device=DEVICE).view(2, 24)
    at = places([7, 2])
    told = reference.tail(tokens_BW, at, (900, 17), 5)
    assert "slot_BR" in differing(tail(tokens_BW, at, (900, 16), 5), told)
    moved = replace(at, table_BP=at.table_BP.flip(1))
    assert "before_BR" in differing(tail(tokens_BW, moved, (900, 17), 5), told)
    assert not torch.equal(kept(keep, [1, 2], 3, 4, False), kept(keep, [2, 2], 3, 4, False))

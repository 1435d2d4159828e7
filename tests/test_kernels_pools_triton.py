"""Proposals put into a state's pool in Triton: whole numbers and values bit for bit, gains close.

Legend: B requests, P nodes of a proposal, N best nodes.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from poison import unwritten_numbers_are_poison  # noqa: F401 (a fixture)
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.kernels import pools as reference
from furcate.kernels.draft import Proposal
from furcate.kernels.pools_triton import put

pytestmark = [*MARKS, pytest.mark.usefixtures("unwritten_numbers_are_poison")]


def proposal(rows: int, nodes: int, *, seed: int, tagged: bool = True) -> Proposal:
    rng = torch.Generator().manual_seed(seed)
    tokens, parent, depth, tag = (
        torch.randint(-1, 90_000, (rows, nodes), generator=rng).to(DEVICE) for _ in "tpdg"
    )
    value = -torch.rand(rows, nodes, generator=rng) * 4
    value[torch.rand(rows, nodes, generator=rng) < 0.2] = -torch.inf
    return Proposal(tokens, parent, depth, value.to(DEVICE), tag if tagged else None)


def both(
    slots: list[int], nodes: int, most: int, *, tagged: bool = True, more: int = 0
) -> list[str]:
    """Where the kernel differs from the reference, in a pool of `more` nodes than are proposed."""
    new, slot_B = proposal(len(slots), nodes, seed=1, tagged=tagged), torch.tensor(slots)
    heard, told = (proposal(6, nodes + more, seed=2) for _ in range(2))
    gain, want = (torch.full((len(slots), most), torch.nan, device=DEVICE) for _ in "gw")
    put(heard, slot_B.to(DEVICE), new, gain)
    reference.put(told, slot_B.to(DEVICE), new, want)
    torch.testing.assert_close(gain, want, rtol=1e-6, atol=1e-7)
    return differing(heard, told)


def differing(one: Proposal, other: Proposal) -> list[str]:
    def same(a: Tensor, b: Tensor) -> bool:
        return torch.equal(a, b)

    names = [f.name for f in fields(Proposal)]
    return [name for name in names if not same(getattr(one, name), getattr(other, name))]


@pytest.mark.parametrize("slots", [[0], [5, 1], [3, 0, 4, 2]])
@pytest.mark.parametrize(("nodes", "most"), [(1, 1), (7, 20), (70, 15), (100, 64), (33, 33)])
def test_proposals_lie_in_their_slots_and_gain_what_torch_says(
    slots: list[int], nodes: int, most: int
) -> None:
    assert both(slots, nodes, most) == []


@pytest.mark.parametrize(("nodes", "more"), [(1, 1), (10, 100), (15, 1), (16, 16), (20, 50)])
def test_a_narrower_proposal_takes_the_place_of_a_wider_one(nodes: int, more: int) -> None:
    assert both([5, 1, 2], nodes, 16, more=more) == []
    assert both([3], nodes, 3, more=more, tagged=False) == []


def test_a_proposal_without_tags_gets_zeros() -> None:
    assert both([2, 4], 9, 5, tagged=False) == []


def test_the_comparison_can_fail() -> None:
    new, slot_B = proposal(2, 9, seed=1), torch.tensor([1, 2], device=DEVICE)
    heard, told = proposal(6, 9, seed=2), proposal(6, 9, seed=2)
    gain = torch.empty(2, 4, device=DEVICE)
    put(heard, slot_B, new, gain)
    reference.put(told, slot_B + 1, replace(new, tag_BP=None), gain)
    assert set(differing(heard, told)) == {f.name for f in fields(Proposal)}

"""Select and order in Triton: every number of the torch reference, on poisoned memory.

Legend: B requests, P pool nodes, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from poison import unwritten_numbers_are_poison  # noqa: F401 (a fixture)
from test_kernels_select import DEAD, Case, Node, cases, proposal_of
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.kernels.draft import Draft, Proposal
from furcate.kernels.select import select
from furcate.kernels.select_triton import select as on_device

pytestmark = [*MARKS, pytest.mark.usefixtures("unwritten_numbers_are_poison")]


def run(proposal: Proposal, rows: int, allowance: Sequence[int]) -> tuple[Draft, Draft]:
    """(the kernel's draft, the reference's)."""
    root_B, allowance_B = torch.arange(len(allowance)) + 100, torch.tensor(allowance)
    there = Proposal(*(_moved(getattr(proposal, f.name), DEVICE) for f in fields(Proposal)))
    draft = on_device(there, root_B.to(DEVICE), rows, allowance_B.to(DEVICE))
    here = Draft(*(_moved(getattr(draft, f.name), torch.device("cpu")) for f in fields(Draft)))
    return here, select(proposal, root_B, rows, allowance_B)


def test_the_requests_rows_may_be_anywhere_in_a_proposal() -> None:
    slots = [4, 0, 3]
    proposal, root_B = random_pool(7, 21, batch=5), torch.tensor([50, 51, 52])
    rows, allowance_B, slot_B = 9, torch.tensor([9, 1, 6]), torch.tensor(slots)
    there = Proposal(*(_moved(getattr(proposal, f.name), DEVICE) for f in fields(Proposal)))
    asked = (root_B.to(DEVICE), rows, allowance_B.to(DEVICE), slot_B.to(DEVICE))
    draft = on_device(there, *asked)
    here = Draft(*(_moved(getattr(draft, f.name), torch.device("cpu")) for f in fields(Draft)))
    chosen = Proposal(
        *(None if (x := getattr(proposal, f.name)) is None else x[slots] for f in fields(Proposal))
    )
    assert differing(here, select(proposal, root_B, rows, allowance_B, slot_B)) == []
    assert differing(here, select(chosen, root_B, rows, allowance_B)) == []


def _moved(x: Tensor | None, device: torch.device) -> Tensor | None:
    return None if x is None else x.to(device)


def differing(one: Draft, other: Draft) -> list[str]:
    pairs = {f.name: (getattr(one, f.name), getattr(other, f.name)) for f in fields(Draft)}
    return [name for name, (a, b) in pairs.items() if not same(a, b)]


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a, b)


def random_pool(seed: int, size: int, batch: int = 2, fan: int = 4) -> Proposal:
    """Trees in order of birth with values of a few steps, so that ties abound; some slots dead."""
    rng = torch.Generator().manual_seed(seed)
    parent_BP = torch.full((batch, size), -1)
    depth_BP = torch.ones(batch, size, dtype=torch.int64)
    value_BP = torch.zeros(batch, size)
    for b in range(batch):
        for i in range(size):
            up = int(torch.randint(-fan, max(i, 1), (), generator=rng)) if i else -1
            up = max(up, -1) if up < 0 or value_BP[b, up] > DEAD else -1
            loss = int(torch.randint(0, 4, (), generator=rng)) / 4
            dead = float(torch.rand((), generator=rng)) < 0.1
            parent_BP[b, i] = up
            depth_BP[b, i] = 1 if up < 0 else int(depth_BP[b, up]) + 1
            value_BP[b, i] = DEAD if dead else (0.0 if up < 0 else value_BP[b, up]) - loss
    tokens_BP = torch.randint(0, 10**6, (batch, size), generator=rng)
    tag_BP = torch.randint(0, 99, (batch, size), generator=rng)
    return Proposal(tokens_BP, parent_BP, depth_BP, value_BP, tag_BP)


@given(cases(most=36))
@settings(max_examples=15, deadline=None)
def test_the_draft_is_that_of_the_reference(case: Case) -> None:
    assert differing(*run(proposal_of(case.pools), case.rows, case.allowance)) == []


@pytest.mark.parametrize("rows", [1, 2, 16, 33, 64, 65])
@pytest.mark.parametrize("size", [1, 40, 130])
def test_large_pools_and_odd_sizes_come_out_the_same(size: int, rows: int) -> None:
    proposal = random_pool(size, size)
    assert differing(*run(proposal, rows, [rows, max(1, rows // 2)])) == []


@pytest.mark.parametrize("shape", ["chain", "star", "comb"])
def test_the_deepest_and_the_widest_tree_come_out_whole(shape: str) -> None:
    nodes = 127
    parents = {
        "chain": list(range(-1, nodes - 1)),
        "star": [-1] * nodes,
        "comb": [i - 1 if i % 2 == 0 else max(i - 2, -1) for i in range(nodes)],
    }[shape]
    pool: list[Node] = []
    for i, parent in enumerate(parents):
        above = pool[parent] if parent >= 0 else Node(0, -1, 0, 0.0, 0)
        pool.append(Node(i, parent, above.depth + 1, above.value - 0.25, i))
    draft, told = run(proposal_of([pool]), nodes + 1, [nodes + 1])
    assert int(draft.live_B) == nodes + 1
    assert differing(draft, told) == []


def test_the_comparison_can_fail() -> None:
    proposal = random_pool(7, 60)
    draft = run(proposal, 32, [32, 32])[0]
    raised = replace(proposal, value_BP=proposal.value_BP * 0.5)
    assert differing(draft, run(raised, 32, [32, 32])[1]) != []
    assert "live_B" in differing(draft, run(proposal, 32, [9, 32])[1])


def test_minus_zero_ties_with_zero() -> None:
    pool = [Node(7, -1, 1, -0.0, 1), Node(8, 0, 2, 0.0, 2), Node(9, 1, 3, -0.0, 3)]
    assert differing(*run(proposal_of([pool]), 4, [4])) == []


def test_a_pool_without_tags_gives_a_draft_without() -> None:
    proposal = replace(random_pool(1, 20), tag_BP=None)
    draft, told = run(proposal, 8, [8, 8])
    assert draft.tag_BR is None
    assert differing(draft, told) == []

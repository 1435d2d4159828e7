"""The accepted path in Triton: every number of the torch reference, on poisoned memory.

Legend: B requests, R rows, D deepest level.
"""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest
import torch
from poison import unwritten_numbers_are_poison  # noqa: F401 (a fixture)
from test_verify_accept import cases
from torch import Tensor
from triton_device import DEVICE, MARKS
from verify_cases import draft_of, law_of, random_draft, rows_of, stacked

from furcate.kernels.accept import accept
from furcate.kernels.accept_triton import accept as on_device
from furcate.kernels.draft import Draft, Verdict
from furcate.kernels.select import lone_roots
from furcate.verify.coupled import verify

pytestmark = [*MARKS, pytest.mark.usefixtures("unwritten_numbers_are_poison")]

ROWS = [1, 2, 8, 31, 32, 33, 64, 65, 200]


def there(draft: Draft) -> Draft:
    moved = {f.name: getattr(draft, f.name) for f in fields(Draft)}
    return Draft(**{name: None if x is None else x.to(DEVICE) for name, x in moved.items()})


def run(draft: Draft, choice_BR: Tensor, depth: int, broken_BR: Tensor | None = None) -> Verdict:
    broken_BR = None if broken_BR is None else broken_BR.to(DEVICE)
    verdict = on_device(there(draft), choice_BR.to(DEVICE), depth, broken_BR)
    return Verdict(*(getattr(verdict, f.name).cpu() for f in fields(Verdict)))


def differing(one: Verdict, other: Verdict) -> list[str]:
    pairs = {f.name: (getattr(one, f.name), getattr(other, f.name)) for f in fields(Verdict)}
    return [name for name, (a, b) in pairs.items() if a.dtype != b.dtype or not torch.equal(a, b)]


@pytest.mark.parametrize("rows", ROWS)
def test_the_verdict_is_that_of_the_reference(rows: int) -> None:
    draft, choice_BR = cases(rows, rows, batch=24)
    for depth in (6, 11, 40):
        assert differing(run(draft, choice_BR, depth), accept(draft, choice_BR, depth)) == []


def test_the_comparison_can_fail() -> None:
    draft, choice_BR = cases(1, 32)
    other_BR = choice_BR.roll(1, 1)
    assert "path_BD" in differing(run(draft, other_BR, 6), accept(draft, choice_BR, 6))


@pytest.mark.parametrize("rows", [33, 64])
def test_every_path_of_a_tree_can_win(rows: int) -> None:
    rng = random.Random(rows)
    draft = random_draft(rng, rows, rows - 2, 9, vocab=10**6)
    goals = range(rows - 2)
    choice_BR = torch.full((len(goals), rows), -1)
    for goal in goals:
        here = goal
        while here:
            choice_BR[goal, draft.parent_BR[0, here]] = draft.tokens_BR[0, here]
            here = int(draft.parent_BR[0, here])
    many = stacked([draft] * len(goals))
    verdict = run(many, choice_BR, 9)
    assert verdict.path_BD[:, -1].tolist() == list(goals)
    assert differing(verdict, accept(many, choice_BR, 9)) == []


def test_siblings_of_one_token_tie_for_the_lowest_row() -> None:
    draft = draft_of([1, 2, 2, 3], [0, 0, 0, 2], pads=[2, 3])
    choice_BR = torch.tensor([[2, 9, 9, 9, 2, 3]])
    for choices in (choice_BR, torch.full_like(choice_BR, 2), torch.full_like(choice_BR, 3)):
        assert differing(run(draft, choices, 3), accept(draft, choices, 3)) == []
    assert run(draft, choice_BR, 3).path_BD.tolist() == [[0, 1, 1, 1]]


def test_a_pad_is_told_by_its_index() -> None:
    draft = draft_of([1, 2], [0, 0], pads=[3, 3])
    draft = replace(draft, depth_BR=torch.tensor([[0, 1, 1, 1]]))
    verdict = run(draft, torch.full((1, 4), 3), 2)
    assert verdict.accepted_B.tolist() == [0]


def test_a_lone_root_emits_its_choice() -> None:
    verdict = run(lone_roots(torch.tensor([5, 6])), torch.tensor([[8], [9]]), 0)
    assert verdict.emitted_BD.tolist() == [[8], [9]]
    assert verdict.count_B.tolist() == [1, 1]


@pytest.mark.parametrize("rows", [1, 9, 33])
def test_a_broken_row_cuts_the_count_where_the_torch_path_cuts_it(rows: int) -> None:
    draft, _ = cases(rows, rows, batch=16)
    rng = torch.Generator().manual_seed(rows)
    logits_BRV = torch.randn(16, rows, rows, generator=rng)
    for b in range(16):
        for j in range(1, int(draft.live_B[b])):
            logits_BRV[b, draft.parent_BR[b, j], draft.tokens_BR[b, j]] += 3
    logits_BRV[torch.rand(16, rows, generator=rng) < 0.3] = float("nan")
    told = verify(logits_BRV, law_of(16, rows), rows_of(draft))
    broken_BR = logits_BRV.isnan().any(-1)
    verdict = run(draft, logits_BRV.argmax(-1), int(draft.depth_BR.max()), broken_BR)
    assert told.broken_B.any() and (rows == 1 or (told.verdict.count_B > 1).any())
    assert differing(verdict, told.verdict) == []
    assert torch.equal(verdict.count_B <= verdict.accepted_B, told.broken_B)

"""Counting a round in Triton: the counts of the torch reference.

Legend: B requests, R rows of a draft, D levels, K bins.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_kernels_select_triton import random_pool
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.drafters.judge import judge
from furcate.drafters.trust import Trust
from furcate.kernels.accept import accept
from furcate.kernels.draft import Draft, Verdict
from furcate.kernels.grow import STEPS
from furcate.kernels.select import select
from furcate.kernels.tally_triton import tally

pytestmark = MARKS

DUMMY = 1  # the second request teaches nothing
NEAR = {"rtol": 1e-5, "atol": 1e-6}  # float32 sums of a few hundred weights, in any order


def round_of(batch: int, rows: int, kinds: int) -> tuple[Draft, Verdict]:
    """Random trees with tags, some of none, and choices that often follow a child."""
    rng = torch.Generator().manual_seed(rows)
    draft = select(
        random_pool(rows, max(2, rows), batch),
        torch.arange(batch),
        rows,
        torch.randint(1, rows + 1, (batch,), generator=rng),
    )
    assert draft.tag_BR is not None
    draft.tag_BR.random_(0, kinds * STEPS, generator=rng)
    draft.tag_BR[torch.rand(batch, rows, generator=rng) < 0.2] = -1
    follows_BR = torch.randint(0, rows, (batch, rows), generator=rng)
    first_BR = (torch.arange(rows) + 1).clamp_max(rows - 1).expand(batch, -1)  # in preorder
    sure_BR = torch.rand(batch, rows, generator=rng) < 0.8
    choice_BR = draft.tokens_BR.gather(1, torch.where(sure_BR, first_BR, follows_BR))
    return draft, accept(draft, choice_BR, max(1, int(draft.depth_BR.max())))


def counted(draft: Draft, verdict: Verdict, kinds: int, dummy: int = DUMMY) -> list[Tensor]:
    """Counts after two rounds: the kernel's, and the reference's."""
    trusts = [Trust(torch.device("cpu"), kinds) for _ in "kr"]
    ours = [x_K.to(DEVICE) for x_K in (trusts[0].expected_K, trusts[0].accepted_K)]
    slot_B = torch.arange(len(draft.tokens_BR))
    assert draft.tag_BR is not None
    there = [
        type(x)(*(getattr(x, name).to(DEVICE) for name in x.__slots__)) for x in (draft, verdict)
    ]
    for _ in range(2):
        tally(there[0], there[1], slot_B.to(DEVICE), dummy, (ours[0], ours[1]))
        trusts[1].update(draft.tag_BR, judge(draft, verdict, slot_B != DUMMY))
    return [*(x_K.cpu() for x_K in ours), trusts[1].expected_K, trusts[1].accepted_K]


@pytest.mark.parametrize("kinds", [1, 3])
@pytest.mark.parametrize("rows", [2, 16, 33, 63, 64])
@pytest.mark.parametrize("batch", [1, 2, 19])
def test_counts_are_those_of_the_reference(batch: int, rows: int, kinds: int) -> None:
    expected, accepted, told, known = counted(*round_of(batch, rows, kinds), kinds)
    assert torch.allclose(expected, told, **NEAR)
    assert torch.allclose(accepted, known, **NEAR)


def test_the_comparison_can_fail() -> None:
    draft, verdict = round_of(19, 33, 1)
    expected, _, told, known = counted(draft, verdict, 1, dummy=-1)
    assert known.sum() > 1
    assert not torch.allclose(expected, told, **NEAR)
    nowhere = replace(verdict, path_BD=verdict.path_BD * 0)
    accepted = counted(draft, nowhere, 1)[1]
    assert not torch.allclose(accepted, known, **NEAR)

"""A proposal kept in Triton: every number of the torch reference, gains to float32 rounding.

Legend: B requests, P pool nodes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from poison import unwritten_numbers_are_poison  # noqa: F401 (a fixture)
from test_kernels_select_triton import random_pool
from triton_device import DEVICE, MARKS

from furcate.kernels.draft import Proposal
from furcate.kernels.keep import keep
from furcate.kernels.keep_triton import keep as on_device

pytestmark = [*MARKS, pytest.mark.usefixtures("unwritten_numbers_are_poison")]

SLOTS = 6


def blank(pool: int, *, tags: bool) -> Proposal:
    ints = [torch.full((SLOTS, pool), 9 + n, device=DEVICE) for n in range(4)]
    value_BP = torch.full((SLOTS, pool), -3.0, device=DEVICE)
    return Proposal(*ints[:3], value_BP, ints[3] if tags else None)


@pytest.mark.parametrize(("kept_tags", "tags"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("asked", "pool", "most"), [([2], 1, 3), ([4, 0, 1], 13, 5), ([5, 3], 40, 0), ([0, 2], 33, 33)]
)
def test_slots_and_gains_are_the_references(
    asked: list[int], pool: int, most: int, kept_tags: bool, tags: bool
) -> None:
    given = random_pool(pool, pool, len(asked))
    tag_BP = torch.arange(pool).expand(len(asked), -1) if tags else None  # does not lie dense
    new = replace(given, tag_BP=tag_BP)
    new = Proposal(*(None if x is None else x.to(DEVICE) for x in parts(new)))
    ours, theirs = blank(pool, tags=kept_tags), blank(pool, tags=kept_tags)
    slot_B = torch.tensor(asked, device=DEVICE)
    gain_BN = on_device(ours, slot_B, new, most)
    torch.testing.assert_close(gain_BN, keep(theirs, slot_B, new, most), rtol=1e-5, atol=0)
    for one, other in zip(parts(ours), parts(theirs), strict=True):
        assert one is other is None or torch.equal(one, other)


def parts(proposal: Proposal) -> list[torch.Tensor]:
    return [getattr(proposal, name) for name in Proposal.__slots__]

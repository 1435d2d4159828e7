"""Two pools as one in Triton: places, notes and values of the torch reference, on poisoned memory.

Legend: B requests, P pool nodes, W columns of a text, X nodes of a level, K bins.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from poison import unwritten_numbers_are_poison  # noqa: F401 (a fixture)
from test_kernels_ngram_triton import learned, texts
from test_kernels_tally_triton import DUMMY, round_of
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.drafters.judge import judge
from furcate.drafters.trust import Trust
from furcate.kernels.draft import Proposal
from furcate.kernels.grow import BINS, STEPS
from furcate.kernels.joint import BOTH, MATCH, OWN_ROOM, Pools, joined, packed, unpacked
from furcate.kernels.joint_tally_triton import tally_joint
from furcate.kernels.joint_triton import join
from furcate.kernels.ngram import Search, lookup

pytestmark = [*MARKS, pytest.mark.usefixtures("unwritten_numbers_are_poison")]

CPU = torch.device("cpu")
NEAR = {"rtol": 1e-4, "atol": 2e-5}  # odds and shares of shares, and sums of their logs


@dataclass(frozen=True)
class Case:
    children: tuple[int, ...]  # of a row, level by level
    search: Search
    width: int = 3  # rows that go on
    batch: int = 3
    words: int = 5
    spoilt: float = 0.1  # share of the network's nodes that are dead
    seed: int = 0

    def proposals(self) -> tuple[Proposal, Proposal, Pools]:
        """What a network that knows few words says, and matches of a text of such words."""
        tokens_BW, length_B = texts(self.batch, 80, self.words, self.seed)
        warm_B = torch.linspace(0, 1, self.batch)
        second = lookup(tokens_BW, length_B, warm_B, self.search, learned().table)
        first, sizes = self.network(second)
        begin_L = torch.tensor([*accumulate(sizes, initial=0)], dtype=torch.int32)
        return first, second, Pools(tuple(sizes), begin_L, self.search.depth)

    def network(self, second: Proposal) -> tuple[Proposal, list[int]]:
        """Random levels; rows that go on are drawn, children of a row differ in their token."""
        rng = torch.Generator().manual_seed(self.seed)
        up = torch.full((self.batch, 1), -1)
        above, levels, begin = torch.zeros(self.batch, 1), [], 0
        sizes: list[int] = []
        for d, children in enumerate(self.children, start=1):
            shape = (self.batch, up.shape[1], max(self.words, children))
            token = torch.rand(shape, generator=rng).argsort(2)[..., :children]
            chance = (torch.rand(token.shape, generator=rng) * 3).softmax(2) * 0.97
            value = above[..., None] + chance.log()
            value[torch.rand(value.shape, generator=rng) < self.spoilt] = -torch.inf
            size = value[0].numel()
            parent = up[..., None].expand_as(token).flatten(1)
            tag = (chance * (STEPS - 1)).long().flatten(1)
            depth = torch.full_like(tag, d)
            levels.append((token.flatten(1), parent, depth, value.flatten(1), tag))
            pick = torch.rand(self.batch, size, generator=rng).argsort(1)[:, : self.width]
            above, up = value.flatten(1).gather(1, pick), pick + begin
            begin, sizes = begin + size, [*sizes, size]
        return Proposal(*(torch.cat(x, 1) for x in zip(*levels, strict=True))), sizes


def trust_of(seed: int = 3) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    expected_K, accepted_K = torch.rand(2, 3 * BINS, generator=rng) * 30
    return expected_K, accepted_K


def moved(x: Any) -> Any:
    """A record's tensors, there."""
    return type(x)(*(_moved(getattr(x, f.name)) for f in fields(x)))


def _moved(x: Any) -> Any:
    return x.to(DEVICE).contiguous() if isinstance(x, Tensor) else x


def both(case: Case) -> tuple[Proposal, Proposal]:
    """(the kernel's proposal, the reference's)."""
    first, second, pools = case.proposals()
    expected_K, accepted_K = trust_of()
    counts = (expected_K.to(DEVICE), accepted_K.to(DEVICE))
    made = join(moved(first), moved(second), moved(pools), counts)
    here = Proposal(*(getattr(made, f.name).cpu() for f in fields(Proposal)))
    return here, joined(first, second, pools, (expected_K, accepted_K))


def differing(one: Proposal, other: Proposal) -> list[str]:
    pairs = {f.name: (getattr(one, f.name), getattr(other, f.name)) for f in fields(one)}
    return [name for name, (a, b) in pairs.items() if not same(name, a, b)]


def same(name: str, a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if name == "tag_BP":  # a weight in 65,535 steps, rounded down, beside two other notes
        return bool(((a - b).abs() <= 1).all())
    return torch.allclose(a, b, **NEAR) if a.is_floating_point() else torch.equal(a, b)


CASES = {
    "usual": Case((4, 4, 4), Search(6, 8, 1, 4)),
    "deep network": Case((3, 2, 3, 2, 2), Search(2, 4, 1, 4)),
    "one level each": Case((5,), Search(1, 3, 1, 4)),
    "chain beside one match": Case((1, 1, 1), Search(4, 1, 1, 4), width=1, words=2),
    "odd": Case((7, 3, 5), Search(5, 5, 1, 6), width=5, batch=2, words=7),
    "wide": Case((10, 10), Search(3, 17, 1, 4), width=10, words=11, batch=1),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_joint_pools_come_out_as_in_torch(case: str, seed: int) -> None:
    assert differing(*both(replace(CASES[case], seed=seed))) == []


@pytest.mark.parametrize("spoilt", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("words", [2, 300])
def test_dead_nodes_and_pools_that_share_all_or_nothing_come_out_as_in_torch(
    words: int, spoilt: float
) -> None:
    case = replace(CASES["usual"], children=(2, 2, 2), spoilt=spoilt, words=words)
    assert differing(*both(case)) == []


def test_all_kinds_of_nodes_are_compared() -> None:
    told = both(CASES["usual"])[1]
    assert told.tag_BP is not None
    kinds = (told.tag_BP[told.value_BP > -torch.inf] % OWN_ROOM // STEPS).bincount(minlength=3)
    assert kinds.min() > 5 and kinds[BOTH] and kinds[MATCH]


def test_the_comparison_can_fail() -> None:
    made = both(CASES["usual"])[0]
    first, second, pools = CASES["usual"].proposals()
    plain = joined(first, second, pools, (torch.zeros(3 * BINS), torch.zeros(3 * BINS)))
    assert differing(made, plain) == ["value_BP"]
    apart = replace(second, tokens_BP=second.tokens_BP + 99)
    other = joined(first, apart, pools, trust_of())
    assert {"tokens_BP", "parent_BP", "value_BP", "tag_BP"} <= set(differing(made, other))


@pytest.mark.parametrize("rows", [2, 33, 64])
@pytest.mark.parametrize("batch", [1, 2, 19])
def test_a_round_is_counted_for_both_as_in_torch(batch: int, rows: int) -> None:
    draft, verdict = round_of(batch, rows, 3)
    assert draft.tag_BR is not None
    rng, shape = torch.Generator().manual_seed(rows), draft.tag_BR.shape
    network, match = (torch.randint(-1, n, shape, generator=rng) for n in (STEPS, 72))
    tag_BR = torch.where(draft.tag_BR < 0, -1, packed(draft.tag_BR, network, match))
    draft = replace(draft, tag_BR=tag_BR)
    trusts, rates = (Trust(DEVICE, 3), Trust(CPU, 3)), (learned(DEVICE), learned())
    slot_B = torch.arange(batch)
    for _ in range(2):
        found_BR = tally_joint(
            moved(draft),
            moved(verdict),
            slot_B.to(DEVICE),
            DUMMY,
            (trusts[0].expected_K, trusts[0].accepted_K),
            (rates[0].tried_K, rates[0].right_K),
        )
        own_BR, network_BR, match_BR = unpacked(tag_BR)
        trusts[1].update(own_BR, judge(draft, verdict, slot_B != DUMMY))
        matches = replace(draft, tag_BR=match_BR)
        rates[1].update(match_BR, judge(matches, verdict, slot_B != DUMMY))
        assert torch.equal(found_BR.cpu(), network_BR)
    assert torch.allclose(trusts[0].expected_K.cpu(), trusts[1].expected_K, **NEAR)
    assert torch.allclose(trusts[0].accepted_K.cpu(), trusts[1].accepted_K, **NEAR)
    assert torch.allclose(rates[0].tried_K.cpu(), rates[1].tried_K, **NEAR)
    assert torch.allclose(rates[0].right_K.cpu(), rates[1].right_K, **NEAR)
    assert batch < 3 or trusts[1].accepted_K.sum() > 1

"""A level of a growing tree in Triton: pool and frontier of the torch reference, on poison.

Legend: B requests, F frontier rows, C children of a row, D draft vocabulary, P pool nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from poison import unwritten_numbers_are_poison  # noqa: F401 (a fixture)
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.drafters.expand import Grower, Manner, places
from furcate.drafters.plan import Plan, dynamic, static
from furcate.drafters.prune import NO_PRUNING, Pruning
from furcate.drafters.vocabulary import Vocabulary
from furcate.kernels.draft import Proposal
from furcate.kernels.grow import Frontier, Grow, Likeliest, Trees
from furcate.kernels.grow_triton import grow
from furcate.tree.calibration import Calibration, ValueMap
from furcate.tree.topology import Topology

pytestmark = [*MARKS, pytest.mark.usefixtures("unwritten_numbers_are_poison")]

WORDS = 50
# logs and exponentials of two implementations differ by a unit or two in the last place (6e-8),
# relative to a probability; a path of few levels sums as many, a map divides by its knots' spacing
UNMAPPED = ValueMap()
NEAR = {"rtol": 1e-5, "atol": 3e-6}
MAP = ValueMap((0.05, 0.2, 0.5, 0.9), (0.1, 0.3, 0.4, 0.8))
CHOICES = [[0], [1], [3], [0, 0], [0, 2], [1, 0], [3, 1], [0, 2, 0], [0, 2, 1]]


@dataclass(frozen=True)
class Case:
    plan: Plan
    pruning: Pruning = NO_PRUNING
    values: ValueMap = UNMAPPED
    mapped: bool = True  # draft ids stand for other ids
    shared: bool = False  # one row of children serves all rows
    batch: int = 3
    spoilt: float = 0.1  # share of weights that are NaN or -inf
    steps: int | None = None  # how many weights there are at all; None: any

    def grower(self) -> Grower:
        rng = torch.Generator().manual_seed(1)
        token_D = (torch.randperm(9 * WORDS, generator=rng)[:WORDS]).to(DEVICE)
        words = Vocabulary(token_D if self.mapped else None, WORDS)
        manner = Manner(self.plan, Calibration(values=self.values), self.pruning)
        grower = manner.grower(words, DEVICE)
        trust = grower.plausible.trust
        for counts_K in (trust.expected_K, trust.accepted_K):
            counts_K.copy_(torch.rand(len(counts_K), generator=rng) * 40)
        return grower

    def likeliest(self, level: int, rows: int, children: int) -> Likeliest:
        rng = torch.Generator().manual_seed(level)
        shape = (self.batch, 1 if self.shared else rows, children)
        weight = (torch.rand(shape, generator=rng) * 3).exp().log_softmax(2)
        if self.steps:
            weight = -torch.randint(1, self.steps + 1, shape, generator=rng) / 2.0
        weight = weight.sort(dim=2, descending=True).values
        which = torch.rand(shape, generator=rng)
        weight[which < self.spoilt] = -torch.inf
        weight[which < self.spoilt / 2] = torch.nan
        word = torch.rand(*shape[:2], WORDS, generator=rng).argsort(2)[..., :children]
        entropy = torch.rand(shape[:2], generator=rng) * 2
        entropy[torch.rand(shape[:2], generator=rng) < self.spoilt / 2] = torch.nan
        asked = entropy.to(DEVICE) if self.pruning.asks_entropy else None
        return Likeliest(word.contiguous().to(DEVICE), weight.to(DEVICE), asked)


def grown(case: Case, way: Callable[[Grower], Grow]) -> tuple[Proposal, list[Frontier]]:
    """(the pool, all frontiers) that one implementation comes to."""
    grower = case.grower()
    length_B = torch.arange(case.batch, device=DEVICE) * 3 + 5
    size = (case.batch, sum(step.candidates for step in case.plan))
    tokens, parent, depth, tag = (torch.full(size, -77, device=DEVICE) for _ in "tpdt")
    value_BP = torch.full(size, torch.nan, device=DEVICE)
    pool = Proposal(tokens, parent, depth, value_BP, tag)
    frontier: Frontier | None = None
    frontiers = []
    for step, place in zip(grower.plan, places(grower.plan), strict=True):
        rows = step.candidates // step.children
        likeliest = case.likeliest(place.depth, rows, step.children)
        trees = Trees(pool, length_B)
        frontier = way(grower)(likeliest, frontier, grower.yardstick, place, trees)
        assert (frontier is not None) == (place.rows > 0)
        if frontier is not None:
            frontiers.append(frontier)
    return pool, frontiers


def both(case: Case) -> list[str]:
    """Where the kernel differs from the reference."""
    pool, frontiers = grown(case, lambda grower: grow)
    told, known = grown(case, lambda grower: grower.spelled_out)
    found = [f"pool.{name}" for name in differing(pool, told)]
    for depth, (one, other) in enumerate(zip(frontiers, known, strict=True), start=1):
        ours = replace(one, at_BF=None, below_BF=None)
        found += [f"{depth}.{name}" for name in differing(ours, other)]
    return found


def differing(one: Any, other: Any) -> list[str]:
    pairs = {f.name: (getattr(one, f.name), getattr(other, f.name)) for f in fields(one)}
    return [name for name, (a, b) in pairs.items() if not same(name, a, b)]


def same(name: str, a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if name == "tag_BP":  # a weight in 65,535 steps, rounded down
        return bool(((a - b).abs() <= 1).all())
    return torch.allclose(a, b, **NEAR) if a.is_floating_point() else torch.equal(a, b)


SHAPES = {
    "eagle": dynamic(4, 10, 10),
    "chain": dynamic(3, 1, 1),
    "one level": dynamic(1, 5, 7),
    "star": dynamic(1, 1, 50),
    "odd": dynamic(3, 7, 9),
    "narrow": dynamic(3, 2, 3),
    "wide": dynamic(3, 33, 21),
    "static": static(Topology.from_choices(CHOICES), DEVICE),
}
PRUNINGS = {
    "all": NO_PRUNING,
    "cap": Pruning(kappa=0.7),
    "gate": Pruning(gamma=0.4, least=0.02),
    "least": Pruning(least=0.01),
    "each": Pruning(kappa=1.1, gamma=0.2, least=0.005),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shared", [False, True], ids=["own children", "shared children"])
def test_trees_come_out_as_in_torch(shape: str, shared: bool) -> None:
    assert both(Case(SHAPES[shape], shared=shared)) == []


@pytest.mark.parametrize("pruning", PRUNINGS)
@pytest.mark.parametrize("shape", ["eagle", "odd", "static"])
def test_what_is_pruned_is_pruned_alike(shape: str, pruning: str) -> None:
    assert both(Case(SHAPES[shape], PRUNINGS[pruning])) == []
    assert both(Case(SHAPES[shape], PRUNINGS[pruning], shared=True)) == []


@pytest.mark.parametrize("values", [MAP, ValueMap((0.3,), (0.2,))], ids=["knots", "one knot"])
@pytest.mark.parametrize("shape", ["eagle", "static"])
def test_a_map_of_values_is_the_curve_in_torch(shape: str, values: ValueMap) -> None:
    assert both(Case(SHAPES[shape], values=values)) == []


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("spoilt", [0.0, 0.6, 1.0])
def test_any_batch_with_sound_spoilt_and_no_weights_at_all(batch: int, spoilt: float) -> None:
    assert both(Case(SHAPES["odd"], batch=batch, spoilt=spoilt, mapped=False)) == []


def test_of_equally_valuable_nodes_the_first_goes_on() -> None:
    case = Case(dynamic(2, 10, 10), steps=2, spoilt=0.5)
    assert both(case) == []
    level = grown(case, lambda grower: grow)[0].value_BP[:, :10]
    assert all(len(set(row)) < len(row) for row in level.tolist())


def test_children_of_rows_stand_behind_the_root() -> None:
    frontiers = grown(Case(SHAPES["odd"]), lambda grower: grow)[1]
    for depth, frontier in enumerate(frontiers, start=1):
        rows = frontier.tokens_BF.shape[1]
        want_BF = torch.tensor([[6 + depth], [9 + depth], [12 + depth]]).expand(-1, rows)
        assert frontier.at_BF is not None and torch.equal(frontier.at_BF.cpu(), want_BF - 1)
        assert frontier.below_BF is not None and torch.equal(frontier.below_BF.cpu(), want_BF)


def test_the_comparison_can_fail() -> None:
    case = Case(SHAPES["eagle"])
    pool, frontiers = grown(case, lambda grower: grow)
    told = grown(replace(case, pruning=Pruning(least=0.3)), lambda grower: grower.spelled_out)[0]
    assert "value_BP" in differing(pool, told)
    cooled, others = grown(replace(case, spoilt=0.3), lambda grower: grower.spelled_out)
    assert {"value_BP", "tag_BP"} <= set(differing(pool, cooled))
    assert "row_BF" in differing(frontiers[1], others[1])
    tag_BP = pool.tag_BP
    assert tag_BP is not None and not same("tag_BP", tag_BP, tag_BP + 2)

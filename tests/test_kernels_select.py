"""Select and order: the kept tree, its preorder, its pads."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from furcate.kernels.draft import Draft, Proposal
from furcate.kernels.select import ancestors_of, gains, lone_roots, select

DEAD = -float("inf")


@dataclass(frozen=True)
class Node:
    token: int
    parent: int
    depth: int
    value: float
    tag: int


Pool = list[Node]


@st.composite
def pools(draw: st.DrawFn, size: int) -> Pool:
    """A legal pool; values are multiples of 1/4, so that ties are common and sums exact."""
    nodes: Pool = []
    taken: set[tuple[int, int]] = set()
    for index in range(size):
        live = [i for i, node in enumerate(nodes) if node.value > DEAD]
        token = draw(st.integers(0, 30))
        if draw(st.integers(0, 4)) == 0:  # dead, and the rest of it is garbage
            nodes.append(
                Node(token, draw(st.integers(-1, size - 1)), draw(st.integers(1, 9)), DEAD, 5)
            )
            continue
        parent = draw(st.sampled_from([-1, *live]))
        while (parent, token) in taken:
            token += 1
        taken.add((parent, token))
        above = nodes[parent] if parent >= 0 else Node(0, -1, 0, 0.0, 0)
        loss = draw(st.integers(0, 3)) / 4
        nodes.append(Node(token, parent, above.depth + 1, above.value - loss, index))
    return nodes


@dataclass(frozen=True)
class Case:
    pools: list[Pool]
    rows: int
    allowance: list[int]

    def run(self) -> Draft:
        root_B = torch.arange(len(self.pools)) + 100
        return select(proposal_of(self.pools), root_B, self.rows, torch.tensor(self.allowance))


@st.composite
def cases(draw: st.DrawFn, most: int = 20) -> Case:
    size, rows = draw(st.integers(1, most)), draw(st.integers(1, most + 6))
    batch = draw(st.lists(pools(size), min_size=1, max_size=3))
    return Case(batch, rows, [draw(st.integers(1, rows + 2)) for _ in batch])


def proposal_of(batch: Sequence[Pool]) -> Proposal:
    def ints(name: str) -> torch.Tensor:
        return torch.tensor([[getattr(node, name) for node in pool] for pool in batch])

    return Proposal(
        tokens_BP=ints("token"),
        parent_BP=ints("parent"),
        depth_BP=ints("depth"),
        value_BP=ints("value").float(),
        tag_BP=ints("tag"),
    )


def laid_out(pool: Pool, root: int, rows: int, allowance: int) -> list[tuple[float, ...]]:
    """Slow and plain: (token, parent, depth, end, value, tag) of every live row."""
    order = [i for i, node in enumerate(pool) if node.value > DEAD]
    order.sort(key=lambda i: (-pool[i].value, pool[i].depth, i))
    kept = order[: min(rows, max(allowance, 1)) - 1]
    made: list[list[float]] = []

    def visit(node: int, parent_row: int) -> None:
        row = len(made)
        here = Node(root, -1, 0, 0.0, -1) if node < 0 else pool[node]
        made.append([here.token, parent_row, here.depth, 0, here.value, here.tag])
        for child in kept:
            if pool[child].parent == node:
                visit(child, row)
        made[row][3] = len(made)

    visit(-1, 0)
    return [tuple(row) for row in made]


def live_rows(draft: Draft, b: int) -> list[tuple[float, ...]]:
    assert draft.tag_BR is not None
    parts = (draft.tokens_BR, draft.parent_BR, draft.depth_BR, draft.end_BR, draft.value_BR)
    columns = [part[b, : int(draft.live_B[b])].tolist() for part in (*parts, draft.tag_BR)]
    return list(zip(*columns, strict=True))


@given(cases())
@settings(max_examples=120, deadline=None)
def test_the_kept_tree_is_the_slow_ones(case: Case) -> None:
    draft = case.run()
    for b, pool in enumerate(case.pools):
        assert live_rows(draft, b) == laid_out(pool, 100 + b, case.rows, case.allowance[b])


def broken_invariants(draft: Draft, rows: int, allowance: Sequence[int]) -> list[str]:
    """What a Draft's docstring promises and this one does not keep."""
    assert draft.tag_BR is not None
    found: list[str] = []

    def need(holds: bool, what: str) -> None:
        if not holds:
            found.append(what)

    for b in range(len(draft.live_B)):
        parent, depth = draft.parent_BR[b].tolist(), draft.depth_BR[b].tolist()
        end, value = draft.end_BR[b].tolist(), draft.value_BR[b].tolist()
        tag, live = draft.tag_BR[b].tolist(), int(draft.live_B[b])
        need(len(parent) == len(depth) == len(end) == len(value) == len(tag) == rows, "rows")
        need(1 <= live <= min(rows, max(1, allowance[b])), "live")
        need((parent[0], depth[0], end[0], value[0], tag[0]) == (0, 0, live, 0.0, -1), "root")
        above = {0: {0}}
        for i in range(1, live):
            need(0 <= parent[i] < i, "parents come first")
            above[i] = {i, *above[parent[i]]}
            need(depth[i] == depth[parent[i]] + 1 == len(above[i]) - 1, "depth")
            need(DEAD < value[i] <= value[parent[i]], "value")
        for i in range(live):
            need(above[i] == {j for j in range(live) if j <= i < end[j]}, "ancestors by end")
            below = [value[j] for j in range(1, live) if parent[j] == i]
            need(below == sorted(below, reverse=True), "most valuable child first")
        for i in range(live, rows):
            pad = (parent[i], depth[i], end[i], value[i], tag[i])
            need(pad == (0, 0, i + 1, DEAD, -1), "pad")
    return found


@given(cases(most=40))
@settings(max_examples=60, deadline=None)
def test_every_promise_of_a_draft_is_kept(case: Case) -> None:
    assert broken_invariants(case.run(), case.rows, case.allowance) == []


def test_the_check_of_promises_can_fail() -> None:
    chain = [Node(i, i - 1, i + 1, -float(i), i) for i in range(5)]
    draft = Case([chain], 8, [8]).run()
    assert broken_invariants(draft, 8, [8]) == []
    short = draft.end_BR.clone()
    short[0, 2] -= 1
    assert broken_invariants(replace(draft, end_BR=short), 8, [8]) == ["ancestors by end"]


@given(pools(size=7), st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_no_tree_of_the_same_size_is_worth_more(pool: Pool, nodes: int) -> None:
    live = [i for i, node in enumerate(pool) if node.value > DEAD]
    size = min(nodes, len(live))
    worths = [
        sum(torch.tensor(pool[i].value).double().exp().item() for i in chosen)
        for chosen in itertools.combinations(live, size)
        if all(pool[i].parent in (-1, *chosen) for i in chosen)
    ]
    draft = Case([pool], nodes + 1, [nodes + 1]).run()
    assert int(draft.live_B) == size + 1
    assert draft.value_BR[0, 1:].double().exp().sum().item() == pytest.approx(
        max(worths), abs=1e-12
    )


@pytest.mark.parametrize("nodes", [1, 31, 63, 255])
@pytest.mark.parametrize("shape", ["chain", "star", "comb"])
def test_large_trees_come_out_whole(nodes: int, shape: str) -> None:
    parents = {
        "chain": list(range(-1, nodes - 1)),
        "star": [-1] * nodes,
        "comb": [i - 1 if i % 2 == 0 else max(i - 2, -1) for i in range(nodes)],
    }[shape]
    pool: Pool = []
    for i, parent in enumerate(parents):
        above = pool[parent] if parent >= 0 else Node(0, -1, 0, 0.0, 0)
        pool.append(Node(i, parent, above.depth + 1, above.value - 0.25, i))
    case = Case([pool, pool], nodes + 1, [nodes + 1, nodes // 2 + 1])
    draft = case.run()
    assert broken_invariants(draft, nodes + 1, case.allowance) == []
    for b, allowance in enumerate(case.allowance):
        assert live_rows(draft, b) == laid_out(pool, 100 + b, nodes + 1, allowance)


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_a_request_is_not_moved_by_its_neighbours(case: Case, rng: random.Random) -> None:
    together = case.run()
    b = rng.randrange(len(case.pools))
    alone = Case([case.pools[b]], case.rows, [case.allowance[b]]).run()
    assert [row[1:] for row in live_rows(alone, 0)] == [row[1:] for row in live_rows(together, b)]


def test_tags_stay_absent_where_the_drafter_gives_none() -> None:
    pool = [Node(3, -1, 1, -1.0, 0)]
    proposal = replace(proposal_of([pool]), tag_BP=None)
    for rows in (2, 4):
        assert select(proposal, torch.tensor([9]), rows, torch.tensor([rows])).tag_BR is None


def test_lone_roots_are_a_legal_draft_of_one_row() -> None:
    draft = lone_roots(torch.tensor([7, 8, 9]))
    assert broken_invariants(draft, 1, [1, 1, 1]) == []
    assert draft.tokens_BR.tolist() == [[7], [8], [9]]
    empty = Case([[Node(0, -1, 1, DEAD, 0)]], 1, [1]).run()
    assert live_rows(empty, 0) == live_rows(lone_roots(torch.tensor([100])), 0)


@given(pools(size=9), st.integers(0, 14))
@settings(max_examples=30, deadline=None)
def test_gains_are_the_probabilities_of_the_best_nodes(pool: Pool, most: int) -> None:
    told = gains(proposal_of([pool]), most)[0].tolist()
    known = sorted((node.value for node in pool), reverse=True)
    best = torch.tensor(known).exp().tolist() + [0.0] * most
    assert told == best[:most]


@given(cases())
@settings(max_examples=30, deadline=None)
def test_ancestors_of_is_the_climb(case: Case) -> None:
    draft = case.run()
    told_BRR = ancestors_of(draft.end_BR)
    for b in range(len(case.pools)):
        for row in range(case.rows):
            here, climb = row, {row}
            while here and row < int(draft.live_B[b]):
                here = int(draft.parent_BR[b, here])
                climb.add(here)
            assert set(told_BRR[b, row].nonzero()[:, 0].tolist()) == climb


def test_select_never_asks_the_device() -> None:
    """Under FakeTensorMode nothing has a value, so reading one raises."""
    pool = [Node(i, -1, 1, -1.0, i) for i in range(12)]
    real = proposal_of([pool, pool])
    with FakeTensorMode() as mode:
        fake = Proposal(
            *(mode.from_tensor(getattr(real, name)) for name in Proposal.__dataclass_fields__)
        )
        root_B = mode.from_tensor(torch.tensor([1, 2]))
        for rows in (1, 2, 8, 13, 32):
            draft = select(fake, root_B, rows, mode.from_tensor(torch.tensor([rows, 3])))
            assert draft.tokens_BR.shape == (2, rows)
            assert ancestors_of(draft.end_BR).shape == (2, rows, rows)
        assert gains(fake, 20).shape == (2, 20)
        assert lone_roots(root_B).tokens_BR.shape == (2, 1)
        with pytest.raises(DataDependentOutputException):
            int(root_B[0])

"""Fewer levels than a drafter has: the draft is that of a shallower drafter."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from test_drafters_heads import gap, led, streams_of
from tiny_engine import finished, judged, prompt_of, tiny_engine
from tiny_heads import around, beside, network

from furcate.config import SamplingParams
from furcate.drafters.base import View
from furcate.drafters.plan import cut, depths, dynamic, static
from furcate.kernels.draft import Proposal
from furcate.kernels.pools import put
from furcate.tree.topology import Topology

CPU = torch.device("cpu")
LEVELS = 2  # asked for
WHOLE = 4  # that there are


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "seed": 3, "ignore_eos": True, **more})


def shallower(drafter: Any, made: list[Proposal], levels: int) -> Any:
    """The same drafter, asked for so many levels whatever the engine wants."""
    real = drafter.propose

    def propose(view: View, _: int) -> Proposal:
        made.append(real(view, levels))
        return made[-1]

    drafter.propose = propose
    return drafter


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("make", [around, beside], ids=["alone", "beside matches"])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_shallower_draft_equals_that_of_a_shallower_drafter(
    kind: str, make: Any, temperature: float
) -> None:
    asked = [(prompt_of(n, n), params(temperature=temperature)) for n in (9, 30)]
    told: list[list[Proposal]] = []
    drafted: list[list[int]] = []
    for depth in (WHOLE, LEVELS):
        made: list[Proposal] = []
        drafter = shallower(make(network(kind), {"depth": depth}, max_batch=2), made, LEVELS)
        with tiny_engine(drafter, max_batch=2) as engine:
            outputs = finished(engine, [engine.submit(*ask) for ask in asked])
        assert [list(o.token_ids) for o in outputs] == [judged(*ask) for ask in asked]
        told.append(made)
        drafted.append([n for o in outputs for n in (o.stats.rounds, o.stats.drafted)])
    assert drafted[0] == drafted[1], "and as much of it is scored"
    assert len(told[0]) == len(told[1]) > 10
    for one, other in zip(*told, strict=True):
        for field in fields(Proposal):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if field.name == "value_BP":
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            elif field.name != "tag_BP":  # which may round either way
                assert torch.equal(a, b)


def test_the_comparison_can_fail() -> None:
    made: list[Proposal] = []
    drafter = shallower(around(network("eagle3"), {"depth": WHOLE}, max_batch=1), made, WHOLE)
    with tiny_engine(drafter, max_batch=1) as engine:
        engine.collect(engine.submit(prompt_of(9), params()))
    assert int(made[-1].depth_BP.max()) == WHOLE
    assert made[-1].tokens_BP.shape[1] == drafter.pool


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "mtp"])
def test_what_deep_paths_commit_is_caught_up_with_before_shallow_drafts(kind: str) -> None:
    asked = [(prompt_of(n, n), params(max_tokens=60)) for n in (8, 30)]
    streams = streams_of(asked)
    drafter, turns = led(kind, streams, max_batch=2), [0]
    real = drafter.propose

    def propose(view: View, _: int) -> Proposal:
        turns[0] += 1
        return real(view, (WHOLE, LEVELS, LEVELS)[turns[0] % 3])

    drafter.propose = propose  # type: ignore[method-assign]
    with tiny_engine(drafter, max_batch=2) as engine:
        size = engine.built.scheduler.book.page_size
        names = [engine.submit(*ask) for ask in asked]
        while engine.step():
            players = engine.built.scheduler.decoding()
            assert all(gap(drafter, r, size) < 1e-10 for r in players)
        outputs = finished(engine, names)
    assert [[*a[0], *o.token_ids] for a, o in zip(asked, outputs, strict=True)] == streams
    assert max(len(o.stats.accepted_by_depth) for o in outputs) == WHOLE


def test_what_a_wider_proposal_left_in_the_pool_is_worth_nothing() -> None:
    def proposal(nodes: int) -> Proposal:
        whole = torch.ones(2, nodes, dtype=torch.int64)
        return Proposal(whole, whole - 2, whole, -torch.ones(2, nodes), whole)

    pool, slot_B = proposal(6), torch.tensor([1])
    one = Proposal(*(getattr(proposal(4), field.name)[:1] for field in fields(Proposal)))
    gain = put(pool, slot_B, one, 5)
    assert (pool.value_BP > -torch.inf).sum(1).tolist() == [6, 4]
    assert (gain > 0).sum() == 4


@pytest.mark.parametrize("depth", range(1, 65))
def test_levels_to_choose_from_are_few_and_end_with_all_of_them(depth: int) -> None:
    found = depths(dynamic(depth, 3, 3))
    assert found[-1] == depth and list(found) == sorted(set(found))
    assert len(found) <= 4 if depth <= 10 else len(found) <= 10


def test_the_first_levels_of_a_plan_are_the_plan_of_fewer_levels() -> None:
    plan = dynamic(6, 4, 3)
    assert all(cut(plan, levels) == dynamic(levels, 4, 3) for levels in range(1, 7))


def test_a_tree_of_fixed_ranks_is_drafted_whole() -> None:
    plan = static(Topology.from_choices([(0,), (0, 0), (0, 0, 0), (1,)]), CPU)
    assert depths(plan) == (3,)


def test_drafters_of_one_cost_have_one_number_of_levels() -> None:
    assert around(network("medusa"), max_batch=1).depths == (WHOLE,)
    assert beside(network("medusa"), max_batch=1).depths == (WHOLE,)
    assert around(network("eagle3"), {"depth": 7}, max_batch=1).depths == (2, 4, 7)
    hybrid = beside(network("eagle3"), {"depth": 7}, max_batch=1)
    assert hybrid.depths == (2, 4, 7) and hybrid.depth == 16

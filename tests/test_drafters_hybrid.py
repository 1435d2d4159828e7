"""Matches and a network's guesses as one tree: joined where they say the same, and legal."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drafter_views import paths_of
from tiny_engine import Script, finished, judged, prompt_of, tiny_engine
from tiny_heads import Knowing, around, beside, network

from furcate.config import SamplingParams
from furcate.drafters.base import View
from furcate.kernels.draft import Proposal
from furcate.kernels.joint import BOTH, MATCH, NETWORK, join, packed, pooled, unpacked

Tree = dict[tuple[int, ...], float]  # log of the chance of each path
LEVELS = 3


def tree(seed: int, width: int, words: int = 4) -> Tree:
    """A random tree; children of a node differ, and are less likely than it."""
    rng, found = random.Random(seed), {(): 0.0}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(LEVELS):
        below = []
        for path in frontier:
            for token in rng.sample(range(words), width):
                found[(*path, token)] = found[path] + math.log(rng.uniform(0.05, 0.9 / width))
                below.append((*path, token))
        frontier = rng.sample(below, width)
    del found[()]
    return found


def by_levels(some: Tree) -> tuple[Proposal, list[int]]:
    """Level after level, as a network proposes."""
    order = sorted(some, key=len)
    sizes = [sum(len(path) == d for path in order) for d in range(1, LEVELS + 1)]
    return proposal([some], [order]), sizes


def by_chains(some: Tree) -> Proposal:
    """Chain after chain, as n-gram matches are proposed: each node by the first chain with it."""
    chains = [path for path in some if len(path) == LEVELS]
    order: list[tuple[int, ...]] = []
    seen: set[tuple[int, ...]] = set()
    for chain in chains:
        for d in range(1, LEVELS + 1):
            order.append(chain[:d] if chain[:d] not in seen else (-1, len(order)))
            seen.add(chain[:d])
    return proposal([some], [order])


def proposal(trees: Sequence[Tree], orders: Sequence[list[tuple[int, ...]]]) -> Proposal:
    rows: dict[str, list[list[Any]]] = {"tokens": [], "parent": [], "depth": [], "value": []}
    for some, order in zip(trees, orders, strict=True):
        place = {path: i for i, path in enumerate(order)}
        alive = [path in some for path in order]
        rows["tokens"].append([p[-1] if a else 0 for p, a in zip(order, alive, strict=True)])
        rows["parent"].append([place.get(p[:-1], -1) for p in order])
        rows["depth"].append([len(p) for p in order])
        rows["value"].append([some.get(p, -torch.inf) for p in order])
    made = {name: torch.tensor(values) for name, values in rows.items()}
    return Proposal(
        made["tokens"], made["parent"], made["depth"], made["value"], made["tokens"] * 0 + 7
    )


def only_chains(some: Tree) -> Tree:
    whole = {path for path in some if len(path) == LEVELS}
    return {path: v for path, v in some.items() if any(w[: len(path)] == path for w in whole)}


@pytest.mark.parametrize("seed", range(30))
def test_what_is_joined_is_exactly_what_says_the_same(seed: int) -> None:
    first, second = tree(seed, 2), only_chains(tree(seed + 100, 3))
    network, sizes = by_levels(first)
    joint = join(network, by_chains(second), sizes, LEVELS)
    step = torch.where(joint.alive_BN, -1.0, -torch.inf)
    values = step.clone()
    for d in range(2, LEVELS + 1):
        above = values.gather(1, joint.parent_BN.clamp_min(0))
        values = torch.where(joint.depth_BN == d, step + above, values)
    whole = Proposal(joint.tokens_BN, joint.parent_BN, joint.depth_BN, values)
    found = paths_of(whole)
    assert set(found) == set(first) | set(second)
    place = _places(whole)
    for path, at in place.items():
        for opinion, theirs in ((joint.first, first), (joint.second, second)):
            assert (opinion.tag_BN[0, at] == 7) == (path in theirs)
            if path in theirs:
                want = theirs[path] - theirs.get(path[:-1], 0.0)
                assert float(opinion.step_BN[0, at]) == pytest.approx(want, abs=1e-5)


def _places(whole: Proposal) -> dict[tuple[int, ...], int]:
    place: dict[int, tuple[int, ...]] = {-1: ()}
    found = {}
    for at, (token, up) in enumerate(
        zip(whole.tokens_BP[0].tolist(), whole.parent_BP[0].tolist(), strict=True)
    ):
        if whole.value_BP[0, at] > -torch.inf:
            place[at] = (*place[up], token)
            found[place[at]] = at
    return found


@pytest.mark.parametrize("seed", range(10))
def test_the_chances_of_siblings_stay_chances(seed: int) -> None:
    network, sizes = by_levels(tree(seed, 3))
    joint = join(network, by_chains(only_chains(tree(seed + 50, 2))), sizes, LEVELS)
    chance = torch.where(joint.alive_BN, pooled(joint).exp(), 0.0)
    total = torch.zeros(1, chance.shape[1] + 1).scatter_add(1, joint.parent_BN + 1, chance)
    assert total.max() <= 1 + 1e-5


def test_a_sure_match_takes_from_the_networks_other_children() -> None:
    network, sizes = by_levels({(1,): math.log(0.5), (2,): math.log(0.4)} | DEEP)
    sure = proposal([{(2,): math.log(0.9)}], [[(2,), (-1, 0), (-1, 1)]])
    doubtful = proposal([{(3,): math.log(0.03)}], [[(3,), (-1, 0), (-1, 1)]])
    agreed = pooled(join(network, sure, sizes, LEVELS)).exp()[0]
    doubted = pooled(join(network, doubtful, sizes, LEVELS)).exp()[0]
    assert agreed[1] > 0.6
    assert agreed[0] < 0.4
    assert doubted[0] == pytest.approx(0.5, abs=0.03)


DEEP: Tree = {(1, 1): math.log(0.2), (1, 1, 1): math.log(0.1)}


def test_three_notes_fit_one_number() -> None:
    own = torch.tensor([0, 3 * 65536 - 1, 5])
    network, match = torch.tensor([-1, 65535, 0]), torch.tensor([0, 71, -1])
    again = unpacked(packed(own, network, match))
    assert [x.tolist() for x in again] == [x.tolist() for x in (own, network, match)]
    assert [x.tolist() for x in unpacked(torch.tensor([-1]))] == [[-1], [-1], [-1]]
    assert len({NETWORK, MATCH, BOTH}) == 3


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "seed": 3, "ignore_eos": True, **more})


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_every_proposal_is_a_legal_tree(kind: str) -> None:
    drafter = beside(network(kind, True), max_batch=2)
    real, seen = drafter.propose, [0]

    def propose(view: View, levels: int) -> Proposal:
        made = real(view, levels)
        for b in range(len(view.length_B)):
            seen[0] += len(paths_of(made, b))
        return made

    drafter.propose = propose  # type: ignore[method-assign]
    with tiny_engine(drafter, max_batch=2) as engine:
        asked = [(prompt_of(n), params(temperature=n % 2)) for n in (30, 41)]
        outputs = finished(engine, [engine.submit(*ask) for ask in asked])
    assert [list(o.token_ids) for o in outputs] == [judged(*ask) for ask in asked]
    assert seen[0] > 1000


def test_matches_go_on_where_the_network_ends() -> None:
    """A text that repeats, and a head that knows it four levels ahead."""
    stream = prompt_of(20, seed=3) * 8
    script, rounds = Script(stream), []
    for make in (around, beside):
        drafter = make(Knowing(script), {"beta": 1.0}, max_batch=1)
        with tiny_engine(drafter, target=script, draft={"num_draft_tokens": 30}) as engine:
            out = engine.collect(engine.submit(stream[:45], params(temperature=0)))
        assert list(out.token_ids) == stream[45:105]
        rounds.append(out.stats.rounds)
    assert rounds[0] == 12
    assert rounds[1] <= 5


def test_both_hear_of_their_own_nodes() -> None:
    stream = prompt_of(20, seed=3) * 8
    script = Script(stream)
    drafter = beside(Knowing(script), {"beta": 1.0}, max_batch=1)
    with tiny_engine(drafter, target=script, draft={"num_draft_tokens": 30}) as engine:
        engine.collect(engine.submit(stream[:45], params(temperature=0)))
    assert drafter.network.plausible.trust.accepted_K.sum() > 3
    assert drafter.ngram.rates.right_K.sum() > 3
    assert drafter.trust.accepted_K.view(3, -1).sum(1)[BOTH] > 3

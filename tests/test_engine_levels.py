"""How many levels the next draft has: the best tokens per second, by costs that are given here."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from furcate.engine.budget import Budget
from furcate.engine.costs import Costs
from furcate.engine.levels import Levels
from furcate.engine.reach import PRIOR, RECENT, Reach
from furcate.verify.law import Needs

DEPTHS = (2, 4, 7)
WIDEST = 64
GPU = 0.083  # a level beside a pass that takes 0.7: an H200's EAGLE-3


@dataclass
class Probe:
    """Seconds of a round, and what was asked: (requests, rows, levels)."""

    level: float = GPU
    tail: float = 0.1
    plain: Callable[[int], float] = lambda rows: 0.7 * (1 + 0.005 * rows)
    asked: list[tuple[int, int, int]] = field(default_factory=list)

    def __call__(self, requests: int, rows: int, levels: int) -> float:
        self.asked.append((requests, rows, levels))
        draft = requests**0.5 * (self.tail + self.level * levels) if levels else 0.0
        return self.plain(rows) + draft


def costs_of(probe: Probe, depths: tuple[int, ...] = DEPTHS) -> Costs:
    return Costs(probe, depths, WIDEST)


def accepted(rates: Sequence[float], levels: int, rng: random.Random) -> int:
    """Nodes of one round."""
    got = 0
    while got < levels and rng.random() < rates[got]:
        got += 1
    return got


@dataclass
class Run:
    """What a run of rounds chose, and its tokens a second beside those of fixed levels."""

    chosen: list[int]
    share: float  # of the best fixed number's rate
    best: int


def run(
    rates: Sequence[float],
    probe: Probe,
    *,
    rounds: int = 600,
    seed: int = 0,
    batch: int = 1,
    depths: tuple[int, ...] = DEPTHS,
) -> Run:
    rng, costs, levels = random.Random(seed), costs_of(probe, depths), Levels(depths, depths[-1])
    chosen: list[int] = []
    tokens = seconds = 0.0
    for _ in range(rounds):
        n = levels.choose(costs, 16 * batch, batch)
        got = [accepted(rates, n, rng) for _ in range(batch)]
        levels.heard([(n, one) for one in got])
        chosen.append(n)
        tokens += sum(got) + batch
        seconds += costs.of(16 * batch, requests=batch, levels=n)
    rate = {n: fixed(rates, n, costs, batch) for n in depths}
    best = max(depths, key=lambda n: rate[n])
    return Run(chosen, tokens / seconds / rate[best], best)


def fixed(rates: Sequence[float], levels: int, costs: Costs, batch: int) -> float:
    """Expected tokens a second if every draft had so many levels."""
    total = chance = 1.0
    for rate in rates[:levels]:
        chance *= rate
        total += chance
    return batch * total / costs.of(16 * batch, requests=batch, levels=levels)


@pytest.mark.parametrize("rate", [0.2, 0.45, 0.7, 0.9])
def test_shallow_drafts_are_preferred_where_levels_are_dear_and_deep_ones_where_cheap(
    rate: float,
) -> None:
    last = [run([rate] * 7, Probe(level)).chosen[-1] for level in (0.0, 0.083, 0.3, 2.0)]
    assert last == sorted(last, reverse=True)
    assert last[-1] == 2
    assert last[0] == 7 or rate < 0.5


def test_shallow_drafts_are_preferred_where_little_is_accepted_and_deep_ones_where_much() -> None:
    last = [run([rate] * 7, Probe()).chosen[-1] for rate in (0.2, 0.65, 0.95)]
    assert last == [2, 4, 7]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("level", [0.02, 0.083, 0.3])
def test_little_is_lost_against_whoever_knew_the_best_number_beforehand(
    level: float, batch: int
) -> None:
    for rate in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9):
        shares = [run([rate] * 7, Probe(level), seed=seed, batch=batch).share for seed in range(3)]
        assert sum(shares) / 3 > 0.95


def test_the_numbers_that_are_played_are_few_and_seldom_change() -> None:
    """Each of them is recorded with rows of every size."""
    for rate in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9):
        chosen = run([rate] * 7, Probe(), rounds=2000).chosen
        changes = sum(one != other for one, other in pairwise(chosen))
        assert changes <= 8, (rate, changes)


def test_before_anything_is_known_the_prior_chooses() -> None:
    rate = {n: fixed([PRIOR] * 7, n, costs_of(Probe()), 1) for n in DEPTHS}
    assert run([0.5] * 7, Probe(), rounds=1).chosen == [max(DEPTHS, key=lambda n: rate[n])] == [4]
    assert run([0.5] * 7, Probe(0.0), rounds=1).chosen == [7]
    assert run([0.5] * 7, Probe(1.0), rounds=1).chosen == [2]


def test_a_depth_that_disappointed_is_tried_again_once_that_is_long_ago() -> None:
    levels, costs, rng = Levels(DEPTHS, 7), costs_of(Probe()), random.Random(1)
    rates = [0.85, 0.85, 0.85, 0.85, 0.0, 0.0, 0.0]
    chosen = []
    for _ in range(3000):
        chosen.append(levels.choose(costs, 16, 1))
        levels.heard([(chosen[-1], accepted(rates, chosen[-1], rng))])
    tries = [at for at in range(1, 3000) if chosen[at] == 7 != chosen[at - 1]]
    assert 2 <= len(tries) <= 30
    assert sum(n == 7 for n in chosen) < 300, "and given up soon"


def test_no_depth_is_tried_that_would_not_pay_even_if_all_went_on_as_above() -> None:
    assert 7 not in run([0.5] * 7, Probe(), rounds=3000).chosen[1:]


def test_what_is_accepted_is_counted_for_the_levels_that_were_drafted() -> None:
    reach = Reach(7)
    for _ in range(2000):
        reach.note([(4, 4)])
    assert reach.tokens(4) > 4.7
    known = reach.tokens(4)
    assert reach.tokens(7) > known + 2.5, "nothing was asked of the fifth: it is as good"
    for _ in range(300):
        reach.note([(7, 4)])
    assert reach.tokens(7) < known + 0.3
    assert reach.tokens(2) == pytest.approx(3, abs=0.1)


def test_what_comes_without_a_level_is_not_the_levels_merit() -> None:
    """Matches go on below a network's levels."""
    reach = Reach(16)
    for _ in range(500):
        reach.note([(4, 12)])
    assert reach.tokens(2) == pytest.approx(reach.tokens(4), abs=0.1) == pytest.approx(13, abs=0.4)
    for levels, accepts, want in ((4, 4, 7), (4, 12, 2), (7, 12, 2), (7, 7, 7)):
        chooser = Levels(DEPTHS, 16)
        for _ in range(500):
            chooser.heard([(levels, accepts)])
        assert chooser.choose(costs_of(Probe()), 16, 1) == want


def test_a_round_of_long_ago_counts_for_little() -> None:
    reach = Reach(1)
    for _ in range(int(8 / RECENT)):
        reach.note([(1, 1)])
    high = reach.tokens(1)
    for _ in range(int(2 / RECENT)):
        reach.note([(1, 0)])
    assert high > 1.95 and reach.tokens(1) < 1.25


def test_a_draft_costs_what_its_levels_do_whatever_is_scored() -> None:
    probe = Probe()
    costs = costs_of(probe)
    for rows in (1, 3, 16, 40):
        size = 1 << (rows - 1).bit_length()
        for levels in (0, 2, 3, 4, 5, 7):
            want = probe.plain(size) + (probe.tail + levels * probe.level if levels else 0)
            assert costs.of(rows, levels=levels) == pytest.approx(want)
    assert costs.drafting(8, 4) == pytest.approx(8**0.5 * costs.drafting(1, 4))


def test_a_rounds_cost_is_measured_with_the_draft_that_is_made_then() -> None:
    probe = Probe()
    costs = costs_of(probe)
    costs.of(1, levels=4)
    assert probe.asked == [(1, 1, 0), (1, 1, 2), (1, 1, 7)], "the ends, and a line between them"
    del probe.asked[:]
    for rows in (2, 4, 8, 16):
        costs.of(rows, levels=4)
    assert probe.asked == [(1, 1, 4), *((1, rows, 4) for rows in (2, 4, 8, 16))]
    del probe.asked[:]
    costs.of(128, requests=2)
    assert probe.asked == [(2, 128, 0)], "several requests: their draft has another price"
    del probe.asked[:]
    costs.of(16, requests=4, levels=4)
    assert probe.asked == [(4, 4, 2), (4, 4, 7)]


@pytest.mark.parametrize("requests", [1, 8])
def test_the_widest_round_is_measured_as_it_is_played_not_as_several_narrow_ones(
    requests: int,
) -> None:
    probe = Probe()
    costs = Costs(probe, DEPTHS, widest=41)
    costs.of(41 * requests, requests=requests)
    assert (requests, 41 * requests, 0) in probe.asked
    assert max(rows for _, rows, _ in probe.asked) == 41 * requests


def test_a_clock_that_errs_makes_no_round_cheaper_than_plain_decoding() -> None:
    costs = Costs(lambda requests, rows, levels: 1.0 if levels == 0 else 0.5, DEPTHS, WIDEST)
    assert costs.of(16, levels=7) == costs.of(1) == 1.0


def test_a_drafter_of_one_cost_is_asked_for_all_it_has_and_nothing_is_measured() -> None:
    probe = Probe()
    levels = Levels((5,), 5)
    levels.heard([(5, 0)])
    assert levels.choose(costs_of(probe, (5,)), 1, 1) == 5
    assert Levels((), 0).choose(costs_of(probe, ()), 1, 1) == 0
    assert probe.asked == []


def test_an_engine_told_to_draft_so_many_nodes_drafts_all_levels() -> None:
    def probe(needs: Needs, requests: int, rows: int, levels: int) -> float:
        raise AssertionError("nothing is measured")

    budget = Budget(probe, most_nodes=15, adaptive=False, depths=DEPTHS, deepest=7)
    for _ in range(50):
        budget.levels.heard([(7, 0)])
        assert budget.levels_behind(Needs(), 16, 1) == 7

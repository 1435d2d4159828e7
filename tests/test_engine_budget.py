"""How many rows a round gets: the best expected tokens per second, by measured costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from tiny_engine import prompt_of, tiny_engine

from furcate.config import SamplingParams
from furcate.engine.budget import RECENT, WORTH, Budget, Returns
from furcate.verify.law import Needs

NEEDS = Needs()
Cost = Callable[[int], float]


class Probe:
    """Costs by total rows, and which sizes were asked for."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.asked: list[int] = []

    def __call__(self, needs: Needs, requests: int, rows: int, levels: int) -> float:
        self.asked.append(rows)
        return self.cost(rows)


def budget_of(cost: Cost, most_nodes: int = 63, adaptive: bool = True) -> tuple[Budget, Probe]:
    probe = Probe(cost)
    return Budget(probe, most_nodes=most_nodes, adaptive=adaptive), probe


def best_rows(cost: Cost, gains: Sequence[Sequence[float]], most_nodes: int) -> int:
    """The definition: argmax of E/T over all sizes; a tree must beat one row by a margin."""
    sizes = [r for r in (1, 2, 4, 8, 16, 32, 64, 128, 256) if r <= most_nodes] + [most_nodes + 1]

    def rate(rows: int) -> float:
        tokens = len(gains) + sum(sum(mine[: rows - 1]) for mine in gains)
        plain = WORTH if rows == 1 else 1.0
        widest = (most_nodes + 1) * (1 << (len(gains) - 1).bit_length())
        return plain * tokens / cost(min(1 << (rows * len(gains) - 1).bit_length(), widest))

    return max(sizes, key=lambda rows: (rate(rows), -rows))


def falling(rng: random.Random, length: int, first: float) -> list[float]:
    found = [first]
    while len(found) < length:
        found.append(found[-1] * rng.uniform(0.6, 1.0))
    return found


def test_the_rows_are_those_of_the_best_rate() -> None:
    rng = random.Random(1)
    chosen = set()
    for _ in range(400):
        base, slope = rng.uniform(0.1, 5), rng.choice((0.0, 0.01, 0.05, 0.2, 1.0))
        steps = sorted(rng.uniform(0, 2) for _ in range(12))

        def cost(
            rows: int, base: float = base, slope: float = slope, steps: list[float] = steps
        ) -> float:
            return base + slope * rows + steps[rows.bit_length()]

        most = rng.choice((1, 3, 10, 31, 63))
        batch = rng.randint(1, 8)
        gains = [falling(rng, rng.randint(1, most), rng.uniform(0.01, 0.99)) for _ in range(batch)]
        budget, _ = budget_of(cost, most)
        rows = budget.rows(NEEDS, gains)
        assert rows == best_rows(cost, gains, most)
        chosen.add(rows)
    assert {1, 2, 4, 8, 16, 32} <= chosen, "every size pays somewhere"


@pytest.mark.parametrize("gains", [[[]], [[0.0] * 63], [[], []], [[0.0], [0.0]]])
def test_without_gains_nothing_is_drafted_and_nothing_measured(gains: list[list[float]]) -> None:
    budget, probe = budget_of(lambda rows: 1.0)
    assert budget.rows(NEEDS, gains) == 1
    assert probe.asked == []


def test_where_nodes_cost_more_than_they_bring_nothing_is_drafted() -> None:
    budget, _ = budget_of(float)
    assert budget.rows(NEEDS, [[0.9, 0.8, 0.7]]) == 1


def test_of_equal_rates_the_smallest_round_is_taken() -> None:
    budget, _ = budget_of(float)
    assert budget.rows(NEEDS, [[1.0]]) == 1
    budget, _ = budget_of(lambda rows: (1.0, 1.0, 2.0, 4.0)[rows.bit_length()] * 0.75)
    assert budget.rows(NEEDS, [[1.0, 1.0, 1.0]]) == 1


def test_sizes_that_cannot_pay_are_never_measured() -> None:
    budget, probe = budget_of(lambda rows: 1.0 + 0.01 * rows)
    assert budget.rows(NEEDS, [[0.5]]) == 2
    assert sorted(set(probe.asked)) == [1, 2], "one node brings no more in a larger round"
    budget, probe = budget_of(lambda rows: 10.0 if rows > 8 else 1.0)
    falling_gains = [0.9, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02] + [0.001] * 56
    assert budget.rows(NEEDS, [falling_gains]) == 8
    assert max(probe.asked) <= 16


def test_each_size_is_measured_once_for_each_kind_of_round() -> None:
    budget, probe = budget_of(lambda rows: 1.0 + 0.001 * rows)
    for _ in range(3):
        budget.rows(NEEDS, [[0.9, 0.8, 0.7]])
    first = list(probe.asked)
    assert len(first) == len(set(first))
    budget.rows(Needs(noise=True), [[0.9, 0.8, 0.7]])
    assert len(probe.asked) == 2 * len(first)


def test_a_slower_machine_moves_all_sizes_alike() -> None:
    budget, _ = budget_of(lambda rows: 1.0 + 0.01 * rows)
    costs = budget.costs(NEEDS)
    before = [costs.of(rows) for rows in (1, 8, 64)]
    for _ in range(200):
        budget.observe(NEEDS, 8, 2 * 1.08)
    assert costs.drift == pytest.approx(2.0, rel=1e-3)
    after = [costs.of(rows) for rows in (1, 8, 64)]
    assert [b / a for a, b in zip(before, after, strict=True)] == pytest.approx([2.0] * 3, rel=1e-3)


def test_a_round_that_drafts_has_a_cost_of_its_own() -> None:
    asked: list[tuple[int, int]] = []

    def probe(needs: Needs, requests: int, rows: int, levels: int) -> float:
        asked.append((rows, levels))
        return 2.0 if levels else 1.0

    costs = Budget(probe, most_nodes=7, adaptive=True, depths=(4,), deepest=4).costs(NEEDS)
    assert (costs.of(1, levels=4), costs.of(1)) == (2.0, 1.0)
    costs.observe(1, 1.5)
    assert costs.of(1, levels=4) == pytest.approx(2 * costs.of(1))
    assert asked == [(1, 0), (1, 4)]


def test_drafts_pay_while_their_rounds_emit_more_than_plain_ones_would() -> None:
    returns = Returns()
    assert returns.positive, "nothing is known yet"
    returns.note(1, 2.0)
    assert not returns.positive
    returns.note(4, 2.0)
    assert returns.positive and returns.lead == pytest.approx(0.5)
    for _ in range(300):
        returns.note(2, 2.3)
    assert returns.lead == pytest.approx(-0.3, abs=1e-4)
    returns.note(2.3 + 1 / RECENT, 2.3)
    assert returns.positive, "a round weighs RECENT at the end"
    returns.note(0, 100.0)
    returns.forget()
    assert returns.positive


def test_one_hiccup_changes_little() -> None:
    budget, _ = budget_of(lambda rows: 1.0)
    budget.observe(NEEDS, 4, 1000.0)
    assert budget.costs(NEEDS).drift <= 1.2


def test_what_is_observed_lets_no_choice_swing() -> None:
    budget, _ = budget_of(lambda rows: 1.0 + 0.02 * rows)
    rng, chosen = random.Random(3), set()
    gains = [[0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]]
    for _ in range(100):
        rows = budget.rows(NEEDS, gains)
        chosen.add(rows)
        budget.observe(NEEDS, rows, (1.0 + 0.02 * rows) * rng.uniform(0.7, 1.5))
    assert len(chosen) == 1, "the drift is shared, so noise moves no size against another"


@pytest.mark.parametrize("most_nodes", [0, 1, 15, 16, 63, 200])
def test_an_engine_told_to_draft_so_many_nodes_does(most_nodes: int) -> None:
    budget, probe = budget_of(float, most_nodes, adaptive=False)
    assert budget.rows(NEEDS, [[0.0]]) == most_nodes + 1
    budget.observe(NEEDS, most_nodes + 1, 1.0)
    assert probe.asked == []


def test_an_adaptive_engine_drafts_where_text_repeats_and_measures_with_nobodys_pages() -> None:
    prompt = prompt_of(6) * 6
    asked = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    outputs = []
    for adaptive in (True, False):
        with tiny_engine("ngram", draft={"adaptive": adaptive}) as engine:
            book = engine.built.scheduler.book
            outputs.append(engine.collect(engine.submit(prompt, asked)))
            held = book.pool.count - book.pool.free
            assert held == book.pages_for(len(prompt) + 29), "probes took no page"
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[1].stats.drafted > 0

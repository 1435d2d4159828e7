"""Cost tables: the budget is the best bucket, plain decoding is one of them, records round-trip."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furcate.errors import BadFile, BadRequest
from furcate.tree.cost import CostTable, Observation, pooled_gains
from furcate.tree.origin import Origin

HERE = Origin("test device", "abc1234", "2026-12-01", "measured")
STEPPED = CostTable((1, 8, 16, 32), (1.0, 1.1, 1.2, 2.0), HERE)
Gains = list[float]


def descending(most: int = 40) -> st.SearchStrategy[Gains]:
    return st.lists(st.floats(0, 1), max_size=most).map(lambda gains: sorted(gains, reverse=True))


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    rows = sorted({1, *draw(st.lists(st.integers(2, 64), max_size=6))})
    seconds = draw(st.lists(st.floats(1e-4, 10), min_size=len(rows), max_size=len(rows)).map(tuple))
    return CostTable(tuple(rows), seconds, HERE)


@settings(deadline=None)
@given(tables(), descending())
def test_no_bucket_has_a_better_rate_than_the_best(table: CostTable, gains: Gains) -> None:
    def rate(rows: int) -> float:
        earned = 1 + sum(map(Fraction, gains[: rows - 1]))
        return float(earned / Fraction(table.cost(rows)))

    chosen = table.best(gains)
    assert rate(chosen) >= max(map(rate, table.rows)) * (1 - 1e-12)


@settings(deadline=None)
@given(tables())
def test_without_gains_the_cheapest_bucket_wins(table: CostTable) -> None:
    assert table.cost(table.best([])) == min(table.seconds)


def test_not_speculating_wins_ties() -> None:
    table = CostTable((1, 2, 3), (1.0, 1.5, 2.0), HERE)
    assert table.best([0.5, 0.5]) == 1
    assert table.best([0.501, 0.5]) == 2


def test_not_speculating_is_an_answer() -> None:
    assert STEPPED.best([0.01] * 31) == 1
    assert STEPPED.best([]) == 1


def test_further_nodes_within_a_bucket_are_free() -> None:
    gains = [0.02] * 31
    # the first node alone would not pay for the step to 8 rows, seven of them do
    assert 1.02 / 1.1 < 1 < 1.14 / 1.1
    assert STEPPED.best(gains) == 16


def test_a_step_is_not_a_place_to_stop() -> None:
    plateau = CostTable((1, 4, 8, 16), (1.0, 1.5, 1.5, 1.5), HERE)
    # the marginal rule would stop at the first step, which does not pay by itself
    assert plateau.best([0.1] * 15) == 16


def test_a_batch_counts_every_request() -> None:
    likely, unlikely = [0.9, 0.8, 0.5], [0.2]
    pooled = pooled_gains([likely, unlikely])
    assert pooled == pytest.approx((1.1, 0.8, 0.5))
    table = CostTable((1, 2, 4), (1.0, 1.4, 1.6), HERE)
    # rates 2 / 1, 3.1 / 1.4, 4.4 / 1.6
    assert table.best(pooled, requests=2) == 4
    assert table.best(pooled_gains([unlikely, unlikely]), requests=2) == 1
    assert pooled_gains([]) == ()


@pytest.mark.parametrize("gains", [[0.1, 0.2], [1.5], [-0.1], [0.5, float("nan")], [float("nan")]])
def test_gains_that_are_no_descending_probabilities_are_refused(gains: Gains) -> None:
    with pytest.raises(BadRequest, match="gains"):
        STEPPED.best(gains)


def test_rows_cost_what_their_bucket_costs() -> None:
    assert [STEPPED.cost(rows) for rows in (1, 2, 8, 9, 32)] == [1.0, 1.1, 1.1, 1.2, 2.0]
    for rows in (0, 33):
        with pytest.raises(BadRequest, match="rows"):
            STEPPED.cost(rows)


def test_an_observation_moves_its_own_bucket_only() -> None:
    moved = STEPPED.merged(Observation(5, 2.1), weight=0.5)
    assert moved.seconds == pytest.approx((1.0, 1.6, 1.2, 2.0))
    assert STEPPED.seconds == (1.0, 1.1, 1.2, 2.0)


@settings(deadline=None)
@given(st.floats(0.01, 1), st.floats(1e-3, 1e3))
def test_repeated_observations_become_the_cost(weight: float, seconds: float) -> None:
    table = STEPPED
    for _ in range(int(20 / weight)):
        table = table.merged(Observation(16, seconds), weight=weight)
    assert table.cost(16) == pytest.approx(seconds, rel=1e-4)


def test_a_guess_that_was_observed_is_neither_guess_nor_measurement() -> None:
    guess = CostTable((1,), (1.0,), Origin("any", "paper", "2026-12-01", "assumed"))
    assert guess.merged(Observation(1, 2.0)).origin.kind == "fitted"
    assert STEPPED.merged(Observation(1, 2.0)).origin == HERE


@settings(deadline=None)
@given(tables())
def test_a_table_comes_back_from_json(table: CostTable) -> None:
    assert CostTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rows": [2, 4, 8, 16]}, r"cost_table\.rows"),
        ({"rows": [1, 8, 8, 16]}, r"cost_table\.rows"),
        ({"rows": [1, 8.5, 16, 32]}, r"cost_table\.rows\[1\]"),
        ({"rows": 7}, r"cost_table\.rows"),
        ({"seconds": [1.0]}, r"cost_table\.seconds"),
        ({"seconds": [1.0, 1.1, 0.0, 2.0]}, r"cost_table\.seconds\[2\]"),
        ({"seconds": [1.0, 1.1, "2", 2.0]}, r"cost_table\.seconds\[2\]"),
        ({"seconds": [1.0, 1.1, float("inf"), 2.0]}, r"cost_table\.seconds\[2\]"),
        ({"origin": {"device": "x"}}, r"origin\.commit"),
        ({"origin": HERE.to_dict() | {"kind": "guessed"}}, r"origin\.kind"),
        ({"origin": HERE.to_dict() | {"date": "yesterday"}}, r"origin\.date"),
        ({"origin": HERE.to_dict() | {"device": ""}}, r"origin\.device"),
        ({"origin": HERE.to_dict() | {"commit": 7}}, r"origin\.commit"),
        ({"colour": "red"}, r"cost_table\.colour"),
    ],
)
def test_a_spoilt_table_is_refused_by_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(BadFile, match=field):
        CostTable.from_dict(STEPPED.to_dict() | change)


def test_what_is_no_table_at_all_is_refused() -> None:
    with pytest.raises(BadFile, match="cost_table"):
        CostTable.from_dict([1, 2])


def test_a_table_that_was_built_wrong_is_the_callers_mistake() -> None:
    with pytest.raises(BadRequest, match="rows"):
        CostTable((), (), HERE)
    with pytest.raises(BadRequest, match="weight"):
        STEPPED.merged(Observation(1, 1.0), weight=0)
    with pytest.raises(BadRequest, match="seconds"):
        Observation(1, -1.0)
    with pytest.raises(BadRequest, match="rows"):
        Observation(0, 1.0)
    with pytest.raises(BadRequest, match="requests"):
        STEPPED.best([], requests=0)

"""Calibration: the map is monotone and fitted best, the default changes nothing."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from furcate.errors import BadFile, BadRequest
from furcate.tree.calibration import (
    BINS,
    Bin,
    Calibration,
    DepthScale,
    ValueMap,
    equal_bins,
    fit_value_map,
)
from furcate.tree.origin import Origin

Pairs = list[tuple[float, bool]]
probability = st.floats(0, 1)
# spaced estimates: below that, a difference of two is lost in rounding anyway
estimates = st.integers(1, 1000).map(lambda thousandths: thousandths / 1000)
pairs = st.lists(st.tuples(estimates, st.booleans()), min_size=1, max_size=200)
bins = st.lists(
    st.builds(Bin, estimates, probability, st.floats(0.5, 50)),
    min_size=1,
    max_size=BINS,
    unique_by=lambda b: b.estimate,
)


@settings(deadline=None)
@given(bins)
def test_pooling_is_the_least_squares_monotone_fit(some: list[Bin]) -> None:
    fitted = fit_value_map(some)
    some = sorted(some, key=lambda b: b.estimate)
    best = isotonic_regression([b.accepted for b in some], weights=[b.weight for b in some]).x
    assert fitted.estimated == tuple(b.estimate for b in some)
    assert fitted.empirical == pytest.approx(list(best), abs=1e-9)


def test_the_fit_check_can_fail() -> None:
    some = [Bin(0.2, 0.6, 1.0), Bin(0.4, 0.0, 3.0)]
    assert fit_value_map(some).empirical == pytest.approx((0.15, 0.15))
    assert fit_value_map(some).empirical != pytest.approx((0.3, 0.3))  # weights forgotten


@settings(deadline=None)
@given(pairs, st.lists(probability, min_size=2, max_size=20))
def test_the_map_never_swaps_two_nodes(some: Pairs, values: list[float]) -> None:
    fitted = fit_value_map(equal_bins(some))
    mapped = [fitted(value) for value in sorted(values)]
    assert mapped == sorted(mapped)
    assert all(0 <= value <= 1 for value in mapped)


@settings(deadline=None)
@given(pairs, estimates)
def test_no_node_becomes_worthless_for_ever(some: Pairs, value: float) -> None:
    assert fit_value_map(equal_bins(some))(value) > 0


@settings(deadline=None)
@given(pairs)
def test_bins_hold_every_pair_once_and_part_no_equals(some: Pairs) -> None:
    made = equal_bins(some)
    assert 1 <= len(made) <= BINS
    # each bin holds one imagined node besides
    assert sum(b.weight - 1 for b in made) == len(some)
    estimated = [b.estimate for b in made]
    assert estimated == sorted(set(estimated))


def test_many_pairs_fill_all_bins_alike() -> None:
    made = equal_bins([(n / 1600, n % 2 == 0) for n in range(1, 1601)])
    assert [b.weight for b in made] == [101.0] * BINS


def test_a_drafter_that_is_too_sure_is_found_out() -> None:
    rng = random.Random(7)
    estimated = [rng.random() for _ in range(20_000)]
    fitted = fit_value_map(equal_bins((v, rng.random() < v * v) for v in estimated))
    # 1250 nodes a bin: one deviation is at most 0.0142; five at any of 5 points: 1 in 300,000
    for value in (0.1, 0.3, 0.5, 0.7, 0.9):
        assert fitted(value) == pytest.approx(value * value, abs=0.071)
    assert abs(fitted(0.5) - 0.5) > 0.071  # the identity would be caught


@settings(deadline=None)
@given(probability)
def test_the_default_changes_nothing(value: float) -> None:
    plain = Calibration()
    assert plain.values(value) == value
    assert plain.scale(1) == plain.scale(9) == DepthScale(1.0, 1.0)
    assert plain.origin.kind == "assumed"


def test_outside_its_knots_the_map_keeps_their_ratio() -> None:
    fitted = ValueMap((0.2, 0.8), (0.1, 0.9))
    assert fitted(0.1) == pytest.approx(0.05)
    assert fitted(0.5) == pytest.approx(0.5)
    assert fitted(0.85) == pytest.approx(0.95625)
    assert fitted(1.0) == 1.0
    assert fitted(0.0) == 0.0


def test_deeper_levels_use_the_last_scale() -> None:
    two = Calibration(scales=(DepthScale(1.2, 0.9), DepthScale(1.0, 0.85)))
    assert [two.scale(depth).sigma for depth in (1, 2, 3, 8)] == [0.9, 0.85, 0.85, 0.85]
    with pytest.raises(BadRequest, match="depth"):
        two.scale(0)


@settings(deadline=None)
@given(pairs, st.lists(st.builds(DepthScale, st.floats(0.1, 3), st.floats(0.1, 3)), min_size=1))
def test_a_calibration_comes_back_from_json(some: Pairs, scales: list[DepthScale]) -> None:
    origin = Origin("test device", "abc1234", "2026-12-01", "fitted")
    made = Calibration(tuple(scales), fit_value_map(equal_bins(some)), origin)
    assert Calibration.from_dict(json.loads(json.dumps(made.to_dict()))) == made


SCALE = {"beta": 1.0, "sigma": 1.0, "floor": 0.5}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"scales": []}, r"calibration\.scales"),
        ({"scales": [{"beta": 1.0}]}, r"calibration\.scales\[0\]\.sigma"),
        ({"scales": [SCALE, 3]}, r"calibration\.scales\[1\]"),
        ({"scales": [{**SCALE, "sigma": 0.0}]}, r"calibration\.scales\[0\]\.sigma"),
        ({"scales": [{**SCALE, "beta": True}]}, r"calibration\.scales\[0\]\.beta"),
        ({"estimated": [0.5, 0.4]}, r"calibration\.estimated"),
        ({"estimated": [0.5, 0.5], "empirical": [0.1, 0.2]}, r"calibration\.estimated\[1\]"),
        ({"estimated": [0.5, 0.6], "empirical": [0.2, 0.1]}, r"calibration\.empirical\[1\]"),
        ({"estimated": [1.5]}, r"calibration\.estimated\[0\]"),
        ({"estimated": [], "empirical": []}, r"calibration\.estimated"),
        ({"origin": None}, r"calibration\.origin"),
    ],
)
def test_a_spoilt_calibration_is_refused_by_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(BadFile, match=field):
        Calibration.from_dict(Calibration().to_dict() | change)


def test_there_is_nothing_to_fit_to_nothing() -> None:
    with pytest.raises(BadRequest, match="bins"):
        fit_value_map(equal_bins([]))
    with pytest.raises(BadRequest, match="bins"):
        fit_value_map([Bin(0.0, 0.0, 5.0)])


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_only_probabilities_are_binned(value: float) -> None:
    with pytest.raises(BadRequest, match="pairs"):
        equal_bins([(0.5, True), (value, False)])


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_only_probabilities_are_mapped(value: float) -> None:
    with pytest.raises(BadRequest, match="value"):
        ValueMap()(value)

"""Scales are found again from choices that were made by them."""

from __future__ import annotations

import math

import pytest
import torch

from furcate.drafters.plausible import log_weights
from furcate.tree.calibration import DepthScale
from furcate.tune.fit_scales import Choices, fit_scale, mean_nll

ROWS, VOCAB = 3000, 48
TRUE = DepthScale(beta=1.4, sigma=0.8, floor=0.5)
FAR = DepthScale(beta=0.6, sigma=2.0, floor=1.5)
# At these sizes one standard error of each logarithm is below 2.5 %: a right fit fails once in
# about 60,000 seeds
NEAR = 0.1


def gumbel(rng: torch.Generator, rows: int = ROWS) -> torch.Tensor:
    return -(-torch.rand(rows, VOCAB, generator=rng, dtype=torch.float64).log()).log()


def chosen(scale: DepthScale, temperature: float, seed: int, rows: int = ROWS) -> Choices:
    """Choices of a target whose scores are beta * l + spread * Gumbel, which then adds T * g."""
    rng = torch.Generator().manual_seed(seed)
    logits_NV = 2 * torch.randn(rows, VOCAB, generator=rng, dtype=torch.float64)
    noise_NV, own_NV = gumbel(rng, rows), gumbel(rng, rows)
    spread = max(scale.sigma * temperature, scale.floor)
    score_NV = scale.beta * logits_NV + temperature * noise_NV + spread * own_NV
    noise = noise_NV if temperature > 0 else None
    return Choices(logits_NV, noise, score_NV.argmax(1), temperature)


def errors(found: DepthScale) -> list[float]:
    pairs = zip((found.beta, found.sigma, found.floor), (1.4, 0.8, 0.5), strict=True)
    return [abs(math.log(one / other)) for one, other in pairs]


def test_a_fit_finds_the_scale_that_made_the_choices() -> None:
    choices = [chosen(TRUE, t, seed) for seed, t in enumerate((0.0, 0.3, 0.7, 1.0))]
    fit = fit_scale(choices, FAR)
    assert max(errors(fit.scale)) < NEAR and fit.rows == 4 * ROWS
    assert fit.before == pytest.approx(mean_nll(choices, FAR))
    assert fit.after == pytest.approx(mean_nll(choices, fit.scale))
    assert fit.after <= mean_nll(choices, TRUE) + 1e-4 < fit.before - 0.1
    other = [chosen(FAR, t, seed) for seed, t in enumerate((0.0, 0.7, 1.0))]
    assert max(errors(fit_scale(other, TRUE).scale)) > NEAR  # the check can fail


def test_the_likelihood_is_that_of_the_weights_that_drafters_grow_trees_by() -> None:
    for temperature in (0.0, 0.4, 1.0):
        each = chosen(TRUE, temperature, 7, rows=20)
        noise = None if each.noise_NV is None else each.noise_NV.float()
        weight_NV = log_weights(
            each.logits_NV[:, None].float(), torch.full((20,), temperature), noise, TRUE
        )[:, 0]
        wanted = -weight_NV.gather(1, each.word_N[:, None]).mean()
        assert mean_nll([each], TRUE) == pytest.approx(float(wanted), abs=1e-5)


def test_what_no_row_speaks_of_stays_as_it_was() -> None:
    start = DepthScale(1.0, 0.9, 0.6)
    greedy = fit_scale([chosen(TRUE, 0.0, 3)], start).scale
    assert greedy.sigma == pytest.approx(0.9)
    assert greedy.beta / greedy.floor == pytest.approx(1.4 / 0.5, rel=NEAR)
    warm = fit_scale([chosen(TRUE, 1.0, 4)], start).scale
    assert warm.floor == pytest.approx(0.6) and warm.sigma == pytest.approx(0.8, rel=NEAR)
    none = fit_scale([], start)
    assert none.scale == start and none.rows == 0


def test_a_search_may_start_elsewhere_and_ends_at_the_same_place() -> None:
    choices = [chosen(TRUE, t, 9, rows=800) for t in (0.0, 1.0)]
    one, other = (fit_scale(choices, FAR, start) for start in (None, TRUE))
    assert one.before == other.before
    assert one.scale.beta == pytest.approx(other.scale.beta, rel=0.02)


def test_sigma_is_found_from_below_the_floor_where_it_has_no_slope() -> None:
    hot = DepthScale(beta=1.4, sigma=1.5, floor=0.5)
    choices = [chosen(hot, t, seed) for seed, t in enumerate((0.0, 1.0))]
    found = fit_scale(choices, DepthScale(beta=1.0, sigma=0.2, floor=1.0)).scale
    assert found.sigma == pytest.approx(1.5, rel=NEAR)
    assert found.floor == pytest.approx(0.5, rel=NEAR)

"""Fits the scale of one depth to what the target chose there, by maximum likelihood.

Legend: N rows, V draft vocabulary; 2: the factors of scores and noise; 3: log beta, log sigma, log
floor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from furcate.tree.calibration import DepthScale

__all__ = ["Choices", "ScaleFit", "fit_scale", "mean_nll"]

ROWS = 128  # of one step, in float64
MOST_STEPS = 20
CLOSE = 1e-5  # nats a row: a step that promises less is not taken
LONGEST = 1.0  # change of a logarithm in one step
ABOVE = 1.2
HELD = 1.0  # pull towards the start, about that of one row: what no row speaks of stays there


@dataclass(frozen=True, slots=True)
class Choices:
    """Rows at one temperature: what the drafter thought there, and what the target chose."""

    logits_NV: Tensor
    noise_NV: Tensor | None  # the target's; None at temperature 0
    word_N: Tensor  # int64, draft id of its choice
    temperature: float


@dataclass(frozen=True, slots=True)
class ScaleFit:
    """The likeliest scale, and the mean of -log P(choice) in nats: with the first one, with it."""

    scale: DepthScale
    before: float
    after: float
    rows: int


@dataclass(frozen=True, slots=True)
class _Moments:
    """-log P of all choices under softmax(a * logits + b * noise), and how it bends in (a, b)."""

    loss: float
    slope_2: Tensor
    bend_22: Tensor


@dataclass(frozen=True, slots=True)
class _Point:
    """The same in the logarithms of beta, sigma and floor."""

    at_3: Tensor
    loss: float
    slope_3: Tensor
    bend_33: Tensor


@torch.inference_mode()
def fit_scale(
    choices: Sequence[Choices], now: DepthScale, start: DepthScale | None = None
) -> ScaleFit:
    """The scale under which the choices are likeliest, by Fisher scoring in float64.

    With scores l and noise g a choice's law is softmax((beta * l + T * g) / s), s being the larger
    of sigma * T and floor (`drafters/plausible.py`). The likelihood is convex in (beta / s, T / s);
    the steps use its exact curvature there.

    Args:
        choices: of one depth, one entry or more for each temperature.
        now: the scale that the fit is set beside.
        start: where the search begins; None: there as well.
    """
    rows = sum(len(each.word_N) for each in choices)
    start = start or now
    if not rows:
        return ScaleFit(start, math.nan, math.nan, 0)
    point = _searched(choices, start)
    scale = _scale(point.at_3)
    hottest = max(each.temperature for each in choices)
    if 0 < hottest * scale.sigma <= scale.floor:
        # sigma had no say, whose slope is then 0: from above the floor it may find a better place
        other = _searched(choices, replace(scale, sigma=ABOVE * scale.floor / hottest))
        gained = other.loss < point.loss - CLOSE * rows
        scale = _scale(other.at_3) if gained else scale
    return ScaleFit(scale, mean_nll(choices, now), mean_nll(choices, scale), rows)


@torch.inference_mode()
def mean_nll(choices: Sequence[Choices], scale: DepthScale) -> float:
    """Mean of -log P(choice), in nats."""
    rows = sum(len(each.word_N) for each in choices)
    loss = sum(_moments(each, *_factors(each.temperature, scale)).loss for each in choices)
    return loss / rows if rows else math.nan


def _searched(choices: Sequence[Choices], start: DepthScale) -> _Point:
    rows = sum(len(each.word_N) for each in choices)
    home_3 = torch.tensor([start.beta, start.sigma, start.floor], dtype=torch.float64).log()
    point = _point(choices, home_3, home_3)
    for _ in range(MOST_STEPS):
        step_3 = -torch.linalg.solve(point.bend_33, point.slope_3)
        step_3 = step_3 * min(1.0, LONGEST / float(step_3.abs().max()))
        if float(-point.slope_3 @ step_3) < CLOSE * rows:
            break
        better = _downhill(choices, point, step_3, home_3)
        if better is None:
            break
        point = better
    return point


def _downhill(
    choices: Sequence[Choices], point: _Point, step_3: Tensor, home_3: Tensor
) -> _Point | None:
    """The first of ever smaller steps that leads down; None: none does."""
    for halvings in range(6):
        there = _point(choices, point.at_3 + step_3 * 0.5**halvings, home_3)
        if there.loss < point.loss:
            return there
    return None


def _point(choices: Sequence[Choices], at_3: Tensor, home_3: Tensor) -> _Point:
    away_3 = at_3 - home_3
    loss = 0.5 * HELD * float(away_3 @ away_3)
    slope_3, bend_33 = HELD * away_3, HELD * torch.eye(3, dtype=torch.float64)
    scale = _scale(at_3)
    for each in choices:
        a, b = _factors(each.temperature, scale)
        moments = _moments(each, a, b)
        wide = scale.sigma * each.temperature > scale.floor  # sigma sets the spread, else the floor
        turn_23 = torch.tensor(
            # b is 1 / sigma, or temperature / floor
            [[a, -a * wide, -a * (not wide)], [0.0, -b * wide, -b * (not wide)]],
            dtype=torch.float64,
        )
        loss += moments.loss
        slope_3 = slope_3 + turn_23.T @ moments.slope_2
        bend_33 = bend_33 + turn_23.T @ moments.bend_22 @ turn_23
    return _Point(at_3, loss, slope_3, bend_33)


def _scale(at_3: Tensor) -> DepthScale:
    return DepthScale(*at_3.exp().tolist())


def _factors(temperature: float, scale: DepthScale) -> tuple[float, float]:
    spread = max(scale.sigma * temperature, scale.floor)
    return scale.beta / spread, temperature / spread


def _moments(choices: Choices, a: float, b: float) -> _Moments:
    loss, slope_2, bend_22 = 0.0, torch.zeros(2).double(), torch.zeros(2, 2).double()
    for start in range(0, len(choices.word_N), ROWS):
        rows = slice(start, start + ROWS)
        x_2NV = torch.stack([choices.logits_NV[rows], _noise(choices, rows)]).double()
        word_N1 = choices.word_N[rows, None]
        score_NV = a * x_2NV[0] + b * x_2NV[1]
        log_p_NV = score_NV.log_softmax(1)
        mean_2N = (x_2NV * log_p_NV.exp()).sum(2)
        off_2NV = x_2NV - mean_2N[..., None]
        chosen_2N = x_2NV.gather(2, word_N1.expand(2, -1, -1))[..., 0]
        loss -= float(log_p_NV.gather(1, word_N1).sum())
        slope_2 += (mean_2N - chosen_2N).sum(1).cpu()
        bend_22 += torch.einsum("xnv,ynv->xy", off_2NV * log_p_NV.exp(), off_2NV).cpu()
    return _Moments(loss, slope_2, bend_22)


def _noise(choices: Choices, rows: slice) -> Tensor:
    if choices.noise_NV is None:
        return torch.zeros_like(choices.logits_NV[rows])
    return choices.noise_NV[rows]

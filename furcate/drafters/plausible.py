"""From a network's scores to how likely the target goes there: calibrated, corrected by rounds.

Legend: B requests, F frontier rows, C children of a row, V vocabulary, K knots of a map.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.drafters.base import View
from furcate.drafters.judge import judge
from furcate.drafters.trust import Trust
from furcate.kernels.draft import Draft, Verdict
from furcate.kernels.grow import Tally
from furcate.tree.calibration import Calibration, DepthScale, ValueMap

__all__ = ["PRIOR", "Plausible", "Worth", "log_weights"]

# Fitted on a first trained head, sigma was 0.85 to 1 for T from 0.7 to 1, and beta 1 to 1.2
PRIOR = Calibration(scales=(DepthScale(beta=1.1, sigma=0.9, floor=0.6),))
LEAST = -1e30  # a log that is still a number


@dataclass(frozen=True, slots=True)
class Worth:
    """What nodes are worth, logs of probabilities that their paths are accepted."""

    value_BFC: Tensor  # float32
    plain_BFC: Tensor  # float32, the product of the weights alone
    tag_BFC: Tensor  # int64, what `Trust` notes of a node


class Plausible:
    """A calibration that goes on learning.

    A path's value is the product of its nodes' weights, put through the calibration's monotone
    map, times what the rounds so far say of nodes of such weights (`Trust`).
    """

    def __init__(
        self, calibration: Calibration, device: torch.device, tally: Tally | None = None
    ) -> None:
        self.calibration = calibration
        self._tally = tally
        self.trust = Trust(device)
        self._map = None if calibration.values == ValueMap() else Curve(calibration.values, device)

    @property
    def knots(self) -> tuple[Tensor, Tensor] | None:
        """The map's, estimated and empirical, float32 [K] each; None where it changes nothing."""
        return None if self._map is None else self._map.knots

    def log_weights(
        self, logits_BFV: Tensor, temperature_B: Tensor, noise_BV: Tensor | None, depth: int
    ) -> Tensor:
        """log P(the target chooses x below this row), float32 [B, F, V]; see `log_weights`."""
        scale = self.calibration.scale(depth)
        return log_weights(logits_BFV, temperature_B, noise_BV, scale)

    def worth(self, above: tuple[Tensor, Tensor], weight_BFC: Tensor) -> Worth:
        """Worth of children of these log weights; `above` are (value, plain) of rows, [B, F]."""
        value_BF1, plain_BF1 = (x_BF[..., None] for x_BF in above)
        # a network fed with states that are not finite says so; nothing is proposed from there
        weight_BFC = weight_BFC.masked_fill(weight_BFC.isnan(), -torch.inf)
        plain_BFC = (plain_BF1 + weight_BFC).clamp_min(LEAST)
        step_BFC = weight_BFC
        if self._map is not None:
            step_BFC = self._map(plain_BFC) - self._map(plain_BF1)
        tag_BFC = self.trust.tags(step_BFC)
        value_BFC = value_BF1 + self.trust.corrected(step_BFC, tag_BFC)
        never_BFC = weight_BFC == -torch.inf
        return Worth(value_BFC.masked_fill(never_BFC, -torch.inf), plain_BFC, tag_BFC)

    def learn(self, view: View, draft: Draft, verdict: Verdict, dummy: int) -> None:
        """Take note of a round; slot `dummy` teaches nothing, nor does a round of one row."""
        if draft.tag_BR is None or draft.tag_BR.shape[1] == 1:
            return
        if self._tally is None:
            self.trust.update(draft.tag_BR, judge(draft, verdict, view.slot_B != dummy))
        else:
            counts = (self.trust.expected_K, self.trust.accepted_K)
            self._tally(draft, verdict, view.slot_B, dummy, counts)


class Curve:
    """A `ValueMap` on the device, from logs to logs."""

    def __init__(self, values: ValueMap, device: torch.device) -> None:
        pair = (values.estimated, values.empirical)
        x_K, y_K = (torch.tensor(p, device=device).clamp_min(1e-9) for p in pair)
        self.knots = (x_K, y_K)

    def __call__(self, log_value: Tensor) -> Tensor:
        """Between knots it interpolates; outside it keeps the ratio of the nearest one."""
        x_K, y_K = self.knots
        value = log_value.exp()
        above = torch.bucketize(value, x_K)
        high = above.clamp_max(len(x_K) - 1)
        low = (above - 1).clamp_min(0)
        share = (value - x_K[low]) / (x_K[high] - x_K[low]).clamp_min(1e-9)
        inside = (y_K[low] + share * (y_K[high] - y_K[low])).log()
        # below all knots, or above: a ratio, and never above certainty or below the last knot
        outside = log_value + (y_K[high] / x_K[high]).log()
        beyond = outside.clamp_max(0.0).maximum(y_K[-1].log())
        return torch.where(above == 0, outside, torch.where(above == len(x_K), beyond, inside))


def log_weights(
    logits_BFV: Tensor, temperature_B: Tensor, noise_BV: Tensor | None, scale: DepthScale
) -> Tensor:
    """log P(the target chooses x at this row), float32 [B, F, V].

    If the target's logits are beta * l + Gumbel(0, s), then given the noise that probability is
    softmax((beta * l + T * noise) / s) at x (the Gumbel-max trick), s being sigma * T, but at
    least the scale's floor. `noise_BV` is the target's noise at the position that the row's
    children would take; None if every request is greedy.
    """
    score_BFV = scale.beta * logits_BFV.float()
    if noise_BV is not None:
        score_BFV = score_BFV + temperature_B[:, None, None] * noise_BV[:, None, :]
    spread_B = (scale.sigma * temperature_B).clamp_min(scale.floor)
    return (score_BFV / spread_B[:, None, None]).log_softmax(2)

"""How a drafter's numbers become probabilities: a scale per depth and a monotone map of values."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from furcate.errors import BadRequest
from furcate.tree.origin import Origin
from furcate.tree.stored import fields_of, list_of, number, numbers, reading

__all__ = ["BINS", "Bin", "Calibration", "DepthScale", "ValueMap", "equal_bins", "fit_value_map"]

BINS = 16
_SCALE_FIELDS = ("beta", "sigma", "floor")
UNCALIBRATED = Origin("any", "default", "2026-12-01", "assumed")


@dataclass(frozen=True, slots=True)
class DepthScale:
    """Child weight at one depth: softmax over candidates of (beta * draft_logit / T + g) / sigma.

    T is divided out, so on the scale of processed logits plus T * g sigma is multiplied by T.
    Without coupling g is left out. At low temperatures what is uncertain is the drafter itself:
    on that scale the spread is never below `floor`, which at T = 0 is all of it.
    """

    beta: float = 1.0
    sigma: float = 1.0
    floor: float = 0.6

    def __post_init__(self) -> None:
        for name in _SCALE_FIELDS:
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise BadRequest("must be a positive number", field=name, value=value)


@dataclass(frozen=True, slots=True)
class Bin:
    """Nodes of similar estimated value."""

    estimate: float  # mean
    accepted: float  # share
    weight: float  # how many


@dataclass(frozen=True, slots=True)
class ValueMap:
    """A monotone, piecewise linear map from an estimated to an empirical probability.

    Between knots it interpolates; outside it keeps the ratio of the nearest knot, capped at 1. It
    never swaps two nodes, so a child stays at most as valuable as its parent.

    Args:
        estimated: knots, ascending strictly in (0, 1]; at most 16.
        empirical: the map's value at each knot, in 0..1, never descending.
    """

    estimated: tuple[float, ...] = (1.0,)
    empirical: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not 1 <= len(self.estimated) <= BINS or len(self.empirical) != len(self.estimated):
            raise BadRequest(
                f"needs 1 to {BINS} knots and one value for each",
                field="estimated",
                value=(len(self.estimated), len(self.empirical)),
            )
        _check_ascends("estimated", self.estimated, strictly=True)
        _check_ascends("empirical", self.empirical, strictly=False)

    def __call__(self, value: float) -> float:
        """The empirical probability for an estimated one in 0..1."""
        x, y = self.estimated, self.empirical
        if not 0 <= value <= 1:
            raise BadRequest("must be a probability", field="value", value=value)
        above = bisect.bisect_left(x, value)
        if above == 0:
            return value * (y[0] / x[0])
        if above == len(x):
            return max(y[-1], min(1.0, value * (y[-1] / x[-1])))
        share = (value - x[above - 1]) / (x[above] - x[above - 1])
        return min(y[above], y[above - 1] + share * (y[above] - y[above - 1]))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Everything that turns a drafter's scores into node values; the default changes nothing.

    Args:
        scales: one per depth, depth 1 first; deeper levels use the last.
        values: from the product along a path to the share that is accepted.
        origin: where the numbers were born.
    """

    scales: tuple[DepthScale, ...] = (DepthScale(),)
    values: ValueMap = field(default_factory=ValueMap)
    origin: Origin = UNCALIBRATED

    def __post_init__(self) -> None:
        if not self.scales:
            raise BadRequest("needs at least the scale of depth 1", field="scales")

    def scale(self, depth: int) -> DepthScale:
        """The scale of nodes at `depth`, 1 for the root's children."""
        if depth < 1:
            raise BadRequest("must be 1 or more", field="depth", value=depth)
        return self.scales[min(depth, len(self.scales)) - 1]

    def to_dict(self) -> dict[str, object]:
        """A JSON object."""
        return {
            "scales": [{name: getattr(s, name) for name in _SCALE_FIELDS} for s in self.scales],
            "estimated": list(self.values.estimated),
            "empirical": list(self.values.empirical),
            "origin": self.origin.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: object) -> Calibration:
        """The inverse of `to_dict`; raises BadFile, naming the field."""
        with reading("calibration"):
            found = fields_of(data, ("scales", "estimated", "empirical", "origin"))
            knots = numbers(found["estimated"], "estimated")
            return cls(
                tuple(map(_depth_scale, count(), list_of(found["scales"], "scales"))),
                ValueMap(knots, numbers(found["empirical"], "empirical")),
                Origin.from_dict(found["origin"]),
            )


def equal_bins(pairs: Iterable[tuple[float, bool]], most: int = BINS) -> tuple[Bin, ...]:
    """At most `most` bins of about equally many pairs; equal estimates share a bin.

    Each bin holds one more, imagined node on which the drafter was right: a value of exactly 0
    would never be drafted again, and so could never be found wrong.

    Args:
        pairs: for each node its estimated value and whether it was accepted.

    Raises:
        BadRequest: an estimate outside 0..1.
    """
    ranked = sorted((float(value), bool(accepted)) for value, accepted in pairs)
    for value, _ in ranked:
        if not 0 <= value <= 1:
            raise BadRequest("must be a probability", field="pairs", value=value)
    bins: list[Bin] = []
    start = 0
    for place in range(1, most + 1):
        stop = max(start, len(ranked) * place // most)
        while 0 < stop < len(ranked) and ranked[stop][0] == ranked[stop - 1][0]:
            stop += 1
        if stop > start:
            bins.append(_bin(ranked[start:stop]))
        start = stop
    return tuple(bins)


def fit_value_map(bins: Sequence[Bin]) -> ValueMap:
    """The weighted least-squares monotone fit to bins, by pooling adjacent violators.

    Ayer et al. 1955; bins whose estimate or weight is 0 have nothing to say and are left out.
    """
    kept = sorted((b for b in bins if b.weight > 0 and b.estimate > 0), key=lambda b: b.estimate)
    if not kept:
        raise BadRequest("needs at least one bin with nodes in it", field="bins", value=len(bins))
    blocks: list[tuple[float, float, int]] = []  # mean accepted, weight, bins in it
    for bin_ in kept:
        mean, weight, size = bin_.accepted, bin_.weight, 1
        while blocks and blocks[-1][0] >= mean:
            above, above_weight, above_size = blocks.pop()
            mean = (mean * weight + above * above_weight) / (weight + above_weight)
            weight, size = weight + above_weight, size + above_size
        blocks.append((mean, weight, size))
    fitted = [min(1.0, mean) for mean, _, size in blocks for _ in range(size)]
    return ValueMap(tuple(b.estimate for b in kept), tuple(fitted))


def _bin(pairs: Sequence[tuple[float, bool]]) -> Bin:
    estimate = math.fsum(value for value, _ in pairs) / len(pairs)
    accepted = sum(accepted for _, accepted in pairs)
    return Bin(estimate, (accepted + estimate) / (len(pairs) + 1), len(pairs) + 1.0)


def _depth_scale(at: int, data: object) -> DepthScale:
    with reading(f"scales[{at}]"):
        found = fields_of(data, _SCALE_FIELDS)
        return DepthScale(*(number(found[name], name) for name in _SCALE_FIELDS))


def _check_ascends(field: str, values: Sequence[float], *, strictly: bool) -> None:
    below = 0.0
    for at, value in enumerate(values):
        if not below <= value <= 1 or (strictly and value == below):
            raise BadRequest("must ascend within 0..1", field=f"{field}[{at}]", value=value)
        below = value

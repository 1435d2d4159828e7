"""What a round costs by rows, and how many rows pay best: the bucket with the best E(N)/T(N)."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from furcate.errors import BadRequest
from furcate.tree.origin import Origin
from furcate.tree.stored import fields_of, numbers, reading, whole_numbers

__all__ = ["CostTable", "Observation", "pooled_gains"]

_FIELDS = ("rows", "seconds", "origin")
_SLACK = 1e-6  # float32 probabilities may come out a rounding above 1


@dataclass(frozen=True, slots=True)
class Observation:
    """One round: its rows per request, root included, and its wall time in seconds."""

    rows: int
    seconds: float

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise BadRequest("must be 1 or more", field="rows", value=self.rows)
        _check_seconds("seconds", self.seconds)


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of a whole round (drafting, verifying, commit) by rows per request, in buckets.

    Nothing is interpolated: r rows cost what the smallest bucket that holds them costs. The
    bucket of 1 row is plain decoding, with no drafting at all, and must be there. A table speaks
    of one batch size and one range of contexts; whoever keeps several tables picks the right one.

    Args:
        rows: bucket sizes, root included, ascending from 1.
        seconds: wall time of a round in each bucket.
        origin: where the seconds were born.

    Raises:
        BadRequest: sizes not ascending from 1, or a time that is not a positive number.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    origin: Origin

    def __post_init__(self) -> None:
        if not self.rows or self.rows[0] != 1:
            raise BadRequest(
                "must begin with 1, the cost of not speculating", field="rows", value=self.rows
            )
        if any(b <= a for a, b in pairwise(self.rows)):
            raise BadRequest("must ascend", field="rows", value=self.rows)
        if len(self.seconds) != len(self.rows):
            raise BadRequest(
                f"needs one time for each of {len(self.rows)} buckets",
                field="seconds",
                value=self.seconds,
            )
        for at, seconds in enumerate(self.seconds):
            _check_seconds(f"seconds[{at}]", seconds)

    def bucket(self, rows: int) -> int:
        """Index of the smallest bucket that holds `rows`."""
        if not 1 <= rows <= self.rows[-1]:
            raise BadRequest(f"must be from 1 to {self.rows[-1]}", field="rows", value=rows)
        return bisect.bisect_left(self.rows, rows)

    def cost(self, rows: int) -> float:
        """Seconds of a round with `rows` rows per request."""
        return self.seconds[self.bucket(rows)]

    def best(self, gains: Sequence[float], *, requests: int = 1) -> int:
        """The bucket size with the most expected tokens per second; 1: do not speculate.

        E(N) = requests + the sum of the top N gains, N = rows - 1; argmax of E(N)/T(N) over the
        buckets, equal rates going to fewer rows. Within a bucket further nodes are free.

        Args:
            gains: probabilities that drafted nodes are accepted, descending; for a batch the
                sums over requests of their n-th best (`pooled_gains`).
            requests: requests decoded together.

        Raises:
            BadRequest: gains that do not descend or lie outside 0..requests.
        """
        _check_gains(gains, requests)
        earned = list(accumulate(gains, initial=float(requests)))
        best_rows, best_rate = 1, earned[0] / self.seconds[0]
        for rows, seconds in zip(self.rows[1:], self.seconds[1:], strict=True):
            rate = earned[min(rows - 1, len(gains))] / seconds
            if rate > best_rate:
                best_rows, best_rate = rows, rate
        return best_rows

    def merged(self, observation: Observation, *, weight: float = 0.05) -> CostTable:
        """A new table whose bucket has moved by `weight` towards what was observed.

        A table that was not measured becomes "fitted", since it is then neither.
        """
        if not 0 < weight <= 1:
            raise BadRequest("must be above 0 and at most 1", field="weight", value=weight)
        at = self.bucket(observation.rows)
        seconds = list(self.seconds)
        seconds[at] += weight * (observation.seconds - seconds[at])
        kind = self.origin.kind if self.origin.kind == "measured" else "fitted"
        return CostTable(self.rows, tuple(seconds), replace(self.origin, kind=kind))

    def to_dict(self) -> dict[str, object]:
        """A JSON object."""
        return {
            "rows": list(self.rows),
            "seconds": list(self.seconds),
            "origin": self.origin.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: object) -> CostTable:
        """The inverse of `to_dict`; raises BadFile, naming the field."""
        with reading("cost_table"):
            found = fields_of(data, _FIELDS)
            rows = whole_numbers(found["rows"], "rows")
            seconds = numbers(found["seconds"], "seconds")
            return cls(rows, seconds, Origin.from_dict(found["origin"]))


def pooled_gains(requests: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Gains of a batch whose requests all get the same rows: the sum of their n-th best nodes.

    Args:
        requests: for each request its nodes' probabilities, descending; lengths may differ.
    """
    longest = max((len(gains) for gains in requests), default=0)
    return tuple(sum(gains[n] for gains in requests if n < len(gains)) for n in range(longest))


def _check_seconds(field: str, seconds: float) -> None:
    if not math.isfinite(seconds) or seconds <= 0:
        raise BadRequest("must be a positive number of seconds", field=field, value=seconds)


def _check_gains(gains: Sequence[float], requests: int) -> None:
    if requests < 1:
        raise BadRequest("must be 1 or more", field="requests", value=requests)
    above = requests * (1 + _SLACK)
    for at, gain in enumerate(gains):
        if not 0 <= gain <= above:  # the first must fit, the later ones must not rise
            what = f"must lie in 0..{requests}" if at == 0 else "must not be below 0 or rise"
            raise BadRequest(what, field=f"gains[{at}]", value=gain, hint="sort them, best first")
        above = gain

"""What a round costs: scoring by rows and drafting by levels, each measured when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Costs", "Probe"]

DRIFT = 0.1  # weight of one round in the running ratio of measured to probed cost

Probe = Callable[[int, int, int], float]
"""(requests, rows of all of them, levels of the next draft) -> seconds of such a round."""


@dataclass(slots=True)
class Costs:
    """Seconds of a round by its total rows, its requests, and the levels of the next draft.

    Scoring b requests with r rows each costs what the smallest of 1, 2, 4, ... that holds b * r
    rows costs, or the widest round of so many requests if that is smaller. The next draft costs
    what its levels do for b requests, whatever is scored. Of the levels the fewest and the most are
    probed, beside the scoring of one row each; a number between them costs what lies on the line,
    each level being a pass of the same network.

    What all rounds share and no probe sees (longer contexts, a busier machine) is followed by one
    running ratio, so that sizes which are rarely played do not grow stale against the others.

    Args:
        probe: measures.
        depths: levels that a draft may have, ascending.
        widest: most rows of one request.
    """

    probe: Probe
    depths: tuple[int, ...]
    widest: int
    scored: dict[int, float] = field(default_factory=dict)  # by rows
    drafted: dict[int, dict[int, float]] = field(default_factory=dict)  # by requests, by levels
    drift: float = 1.0

    def of(self, rows: int, *, requests: int = 1, levels: int = 0) -> float:
        """Expected seconds of a round with `rows` rows in total."""
        return self._probed(rows, requests, levels) * self.drift

    def drafting(self, requests: int, levels: int) -> float:
        """What of it the next draft costs."""
        return self._drafting(_bucket(requests), levels) * self.drift

    def at_least(self, rows: int, *, requests: int = 1, levels: int = 0) -> float:
        """A lower bound of `of` that probes no more rows: cost grows with them."""
        known = [s for size, s in self.scored.items() if size <= self._size(rows, requests)]
        return max(known, default=0.0) * self.drift + self.drafting(requests, levels)

    def observe(self, rows: int, seconds: float, *, requests: int = 1, levels: int = 0) -> None:
        """Take note of a round that was played."""
        ratio = seconds / self._probed(rows, requests, levels)
        self.drift += DRIFT * (min(ratio, 2 * self.drift) - self.drift)

    def _probed(self, rows: int, requests: int, levels: int) -> float:
        scoring = self._scoring(self._size(rows, requests), levels)
        return scoring + self._drafting(_bucket(requests), levels)

    def _size(self, rows: int, requests: int) -> int:
        """No larger than the largest round of so many requests, which is played as it is."""
        return min(_bucket(rows), self.widest * _bucket(requests))

    def _scoring(self, size: int, levels: int) -> float:
        """Sizes that one request can have are probed as they are played: with this draft behind.

        A round that records its kind then finds it recorded when it is played.
        """
        if size not in self.scored:
            requests = -(-size // self.widest)
            behind = levels if requests == 1 < size else 0
            draft = self._measured(1, behind) if behind else 0.0
            least = self._scoring(1, 0) if size > 1 else 0.0  # whatever the clock says
            self.scored[size] = max(self.probe(requests, size, behind) - draft, least)
        return self.scored[size]

    def _drafting(self, requests: int, levels: int) -> float:
        if not levels:
            return 0.0
        for end in (self.depths[0], self.depths[-1]):
            self._measured(requests, end)
        known = self.drafted[requests]
        if levels in known:
            return known[levels]
        below, above = max(n for n in known if n < levels), min(n for n in known if n > levels)
        share = (levels - below) / (above - below)
        return known[below] + share * (known[above] - known[below])

    def _measured(self, requests: int, levels: int) -> float:
        known = self.drafted.setdefault(requests, {})
        if levels not in known:
            plain = self._scoring(requests, 0)
            known[levels] = max(self.probe(requests, requests, levels) - plain, 0.0)
        return known[levels]


def _bucket(count: int) -> int:
    """The smallest size of 1, 2, 4, 8, ... that holds `count`."""
    return 1 << (count - 1).bit_length()

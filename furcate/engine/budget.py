"""How many rows the next round gets: measured cost against expected gain; one row is plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from furcate.tree.cost import pooled_gains
from furcate.verify.law import Needs

__all__ = ["Budget", "Costs", "Patience", "Returns"]

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WORTH = 1.03  # a tree must promise this much more than plain decoding: both are estimates
DRIFT = 0.1  # weight of one round in the running ratio of measured to probed cost
RECENT = 1 / 16  # weight of one round in what a drafter has been bringing


@dataclass(slots=True)
class Costs:
    """Seconds of a round by its total rows and whether it drafts the next, probed when needed.

    A round of b requests with r rows each costs what the smallest probed size >= b * r costs.
    What all sizes share and no probe sees (longer contexts, a busier machine) is followed by one
    running ratio, so that sizes which are rarely played do not grow stale against the others.
    """

    probe: Callable[[int, bool], float]  # (rows, drafts)
    seconds: dict[tuple[int, bool], float] = field(default_factory=dict)
    drift: float = 1.0

    def of(self, rows: int, *, drafts: bool = True) -> float:
        """Expected seconds of a round with `rows` rows in total."""
        return self._probed(_bucket(rows), drafts) * self.drift

    def at_least(self, rows: int) -> float:
        """A lower bound of `of(rows)` that never probes: cost grows with rows."""
        known = [s for (size, _), s in self.seconds.items() if size <= _bucket(rows)]
        return max(known, default=0.0) * self.drift

    def observe(self, rows: int, seconds: float, *, drafts: bool = True) -> None:
        """Take note of a round that was played."""
        ratio = seconds / self._probed(_bucket(rows), drafts)
        self.drift += DRIFT * (min(ratio, 2 * self.drift) - self.drift)

    def _probed(self, size: int, drafts: bool) -> float:
        if (size, drafts) not in self.seconds:
            self.seconds[size, drafts] = self.probe(size, drafts)
        return self.seconds[size, drafts]


@dataclass(slots=True)
class Returns:
    """Whether rounds that draft have emitted more than plain ones would have in the same time.

    A running mean over rounds: of the first ones all alike, later with the weight RECENT. A single
    round tells little: its tree may be worth little where the next one is worth much, and what a
    drafter costs is paid before that is known.
    """

    lead: float = 0.0  # tokens a round
    rounds: int = 0

    @property
    def positive(self) -> bool:
        """So far, or nothing is known."""
        return self.lead >= 0

    def note(self, tokens: float, plain: float) -> None:
        """Hear of a round: its tokens, and those that plain decoding has in as much time."""
        self.rounds += 1
        self.lead += max(1 / self.rounds, RECENT) * (tokens - plain - self.lead)

    def forget(self) -> None:
        """Begin anew: the text may be another by the time the drafter is asked again."""
        self.lead, self.rounds = 0.0, 0


@dataclass(slots=True)
class Patience:
    """When a drafter is asked, and for how long it is left alone.

    Some disappointments in a row, and it rests; twice as long each time, until one pays again.
    While it rests a round is plain decoding and costs just that. A light drafter is given more
    tries and shorter rests than one that costs as much as the target.
    """

    tries: int = 6  # disappointments in a row before the first rest
    again: int = 3  # and after a rest
    first: int = 16  # rounds of the first rest
    longest: int = 128
    vain: int = 0  # disappointments in a row
    rest: int = 0  # rounds until it is asked again
    length: int = 0  # of the next rest; 0: the first

    @classmethod
    def of(cls, *, light: bool) -> Patience:
        """What suits a drafter by its cost."""
        return cls(tries=16, again=1, first=2, longest=4) if light else cls()

    def asks(self) -> bool:
        """Whether the drafter is to be asked after the round that begins now."""
        if self.rest:
            self.rest -= 1
        return not self.rest

    def note(self, paid: bool) -> bool:
        """Hear whether a draft was worth it; whether a rest begins."""
        if paid:
            self.vain, self.length = 0, 0
            return False
        self.vain += 1
        if self.vain < (self.again if self.length else self.tries):
            return False
        self.vain, self.rest = 0, self.length or self.first
        self.length = min(2 * self.rest, self.longest)
        return True


class Budget:
    """Chooses the rows of a round: the bucket with the best E(N)/T(N).

    `most_nodes` is the largest tree; with `adaptive` false every round gets it.
    """

    def __init__(
        self, probe: Callable[[Needs, int, bool], float], *, most_nodes: int, adaptive: bool
    ) -> None:
        self._probe = probe
        self._costs: dict[Needs, Costs] = {}
        self.most_nodes = most_nodes
        self.adaptive = adaptive
        self.buckets = _buckets_up_to(most_nodes + 1)

    def rows(self, needs: Needs, gains: Sequence[Sequence[float]]) -> int:
        """Rows per request, root included, for requests whose next drafts have these gains.

        E(N) counts the tokens of all requests, bonus included; buckets are tried in order and
        none is probed that could not pay even at the cost of the next smaller one.
        """
        if self.most_nodes == 0:
            return 1
        if not self.adaptive:
            return self.buckets[-1]
        pooled = pooled_gains(gains)
        if not pooled or pooled[0] <= 0:
            return 1
        earned = list(accumulate(pooled, initial=float(len(gains))))
        costs = self.costs(needs)
        best_rows, best_rate = 1, WORTH * earned[0] / costs.of(len(gains))
        for rows in self.buckets[1:]:
            tokens = earned[min(rows - 1, len(pooled))]
            if tokens <= best_rate * costs.at_least(rows * len(gains)):
                continue
            rate = tokens / costs.of(rows * len(gains))
            if rate > best_rate:
                best_rows, best_rate = rows, rate
        return best_rows

    def costs(self, needs: Needs) -> Costs:
        """The cost table of one kind of round."""
        if needs not in self._costs:
            self._costs[needs] = Costs(lambda rows, drafts: self._probe(needs, rows, drafts))
        return self._costs[needs]

    def observe(self, needs: Needs, rows: int, seconds: float, *, drafts: bool = True) -> None:
        """Take note of a round that was played with `rows` rows in total."""
        if self.adaptive and self.most_nodes:
            self.costs(needs).observe(rows, seconds, drafts=drafts)


def _bucket(rows: int) -> int:
    """The smallest size of 1, 2, 4, 8, ... that holds `rows`."""
    return 1 << (rows - 1).bit_length()


def _buckets_up_to(rows: int) -> tuple[int, ...]:
    return (*(r for r in ROWS if r < rows), rows)

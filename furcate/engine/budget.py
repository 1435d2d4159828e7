"""How much a round does, by what that costs and brings: rows it scores, levels it drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from furcate.engine.costs import Costs
from furcate.engine.levels import Levels
from furcate.tree.cost import pooled_gains
from furcate.verify.law import Needs

__all__ = ["Budget", "Patience", "Returns"]

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WORTH = 1.03  # a tree must promise this much more than plain decoding: both are estimates
RECENT = 1 / 16  # weight of one round in what a drafter has been bringing


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
    """Chooses the rows of a round, the bucket with the best E(N)/T(N), and the levels of a draft.

    Args:
        probe: seconds of a round: (needs, requests, rows of all, levels of the next draft).
        most_nodes: of the largest tree.
        adaptive: if not, every round gets that tree, and every draft all levels.
        depths: levels that a draft may have, ascending.
        deepest: most nodes that a round accepts.
    """

    def __init__(
        self,
        probe: Callable[[Needs, int, int, int], float],
        *,
        most_nodes: int,
        adaptive: bool,
        depths: tuple[int, ...] = (),
        deepest: int = 0,
    ) -> None:
        self._probe = probe
        self._costs: dict[Needs, Costs] = {}
        self.most_nodes = most_nodes
        self.adaptive = adaptive
        self.buckets = _buckets_up_to(most_nodes + 1)
        self.levels = Levels(depths, deepest)

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
        costs, requests = self.costs(needs), len(gains)
        levels = self.levels.first(costs, requests)
        plain = costs.of(requests, requests=requests, levels=levels)
        best_rows, best_rate = 1, WORTH * earned[0] / plain
        for rows in self.buckets[1:]:
            tokens, size = earned[min(rows - 1, len(pooled))], rows * requests
            if tokens <= best_rate * costs.at_least(size, requests=requests, levels=levels):
                continue
            rate = tokens / costs.of(size, requests=requests, levels=levels)
            if rate > best_rate:
                best_rows, best_rate = rows, rate
        return best_rows

    def levels_behind(self, needs: Needs, rows: int, requests: int) -> int:
        """Levels of the draft that a round of `rows` rows per request makes."""
        if not (self.adaptive and self.most_nodes):
            return self.levels.now
        return self.levels.choose(self.costs(needs), rows * requests, requests)

    def costs(self, needs: Needs) -> Costs:
        """The cost table of one kind of round."""
        if needs not in self._costs:
            self._costs[needs] = Costs(
                lambda requests, rows, levels: self._probe(needs, requests, rows, levels),
                self.levels.depths,
                self.buckets[-1],
            )
        return self._costs[needs]

    def observe(
        self, needs: Needs, rows: int, seconds: float, *, requests: int = 1, levels: int = 0
    ) -> None:
        """Take note of a round that was played with `rows` rows in total."""
        if self.adaptive and self.most_nodes:
            self.costs(needs).observe(rows, seconds, requests=requests, levels=levels)


def _buckets_up_to(rows: int) -> tuple[int, ...]:
    return (*(r for r in ROWS if r < rows), rows)

"""How many levels the next draft has: as many as bring the most tokens in a second."""

from __future__ import annotations

from collections.abc import Sequence

from furcate.engine.costs import Costs
from furcate.engine.reach import Reach

__all__ = ["Levels"]

# What another number must promise: both are estimates, and rounds of a new one are recorded anew
STAY = 1.03
RECENT = 1 / 8  # weight of one round in what scoring has been costing


class Levels:
    """Chooses among the numbers that a drafter can draft.

    No number is tried for the sake of trying: rounds of more levels tell of fewer ones, and what is
    known of a level stands for those below it, so that deeper drafts are made where they could pay
    and are given up once they are known not to. What rounds said of them fades, and so they are
    made again some time later.

    Args:
        depths: ascending; () where nothing is ever drafted.
        deepest: most nodes that a round accepts.
    """

    def __init__(self, depths: tuple[int, ...], deepest: int) -> None:
        self.depths = depths
        self.now = depths[-1] if depths else 0
        self.reach = Reach(deepest)
        self._requests = 0
        self._scoring = 0.0

    def heard(self, rounds: Sequence[tuple[int, int]]) -> None:
        """(levels of the draft, nodes accepted of it) of those requests of a round that had one."""
        if rounds and len(self.depths) > 1:
            self.reach.note(rounds)

    def first(self, costs: Costs, requests: int) -> int:
        """What was chosen last; before the first choice, what suits rounds of one row."""
        return self.now if self._requests else self.choose(costs, requests, requests)

    def choose(self, costs: Costs, rows: int, requests: int) -> int:
        """Levels of the draft behind a round of `rows` rows in total.

        The draft will be scored in another round, whose rows are not known yet: the mean of late
        stands for them.
        """
        if len(self.depths) < 2:
            return self.now
        scoring, margin = costs.of(rows, requests=requests), STAY if self._requests else 1.0
        if requests != self._requests:
            self._requests, self._scoring = requests, scoring
        self._scoring += RECENT * (scoring - self._scoring)

        def rate(levels: int) -> float:
            return self.reach.tokens(levels) / (self._scoring + costs.drafting(requests, levels))

        best = max(self.depths, key=rate)
        if rate(best) > margin * rate(self.now):
            self.now = best
        return self.now

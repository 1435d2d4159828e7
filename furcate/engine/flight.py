"""Rounds that are launched and not yet read.

The device plays them one behind the other, and what the host launches later comes later there. So a
slot is cleared behind the rounds that were in flight when its request ended; what they still say of
the request is nobody's, and its pages become another's when the last of them is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from furcate.engine.player import Outcome
from furcate.engine.request import Request
from furcate.engine.round import Batch
from furcate.kv.pages import PagePool

__all__ = ["Flight", "Flights"]


@dataclass(slots=True)
class Flight:
    """One round."""

    players: list[Request]
    batch: Batch
    began: float  # when it was launched, by `time.perf_counter`
    outcome: Outcome
    levels: list[int] = field(default_factory=list)  # of the drafts that it scores, by player
    timed: bool = True  # how long it takes tells of its kind
    held: list[int] = field(default_factory=list)  # pages of those who have ended meanwhile


class Flights:
    """All that are in flight, oldest first; `levels` is the most tokens that a round can emit."""

    def __init__(self, pool: PagePool, levels: int) -> None:
        self._pool = pool
        self._levels = levels
        self._queue: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def unread(self) -> int:
        """The most tokens they may add to a request."""
        return sum(min(flight.batch.rows, self._levels) for flight in self._queue)

    @property
    def asked(self) -> bool:
        """Whether the last of them asks the drafter, which then knows all that is committed."""
        return bool(self._queue) and self._queue[-1].batch.levels > 0

    def launched(self, flight: Flight) -> None:
        """One more."""
        self._queue.append(flight)

    def next(self) -> Flight:
        """The oldest one, to be read now and then given to `landed`."""
        return self._queue.popleft()

    def landed(self, flight: Flight) -> None:
        """It is over: pages that it may have written to are free for others."""
        self._pool.give(flight.held)

    def disturbed(self) -> None:
        """Something else has kept the device busy: how long they take tells nothing."""
        for flight in self._queue:
            flight.timed = False

    def hold(self, pages: Sequence[int]) -> None:
        """Keep the pages of a request that ends until no round in flight can write to them."""
        if self._queue:
            self._pool.hold(pages)
            self._queue[-1].held.extend(pages)

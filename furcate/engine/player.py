"""Who plays rounds for the loop: launch by launch, or from recordings.

Legend: B requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from furcate.engine.emitted import Emitted
from furcate.engine.round import Batch, Round

__all__ = ["Eager", "Outcome", "Played", "Player"]

Outcome = Callable[[], Emitted]
"""Waits for the end of a round and tells, once, what came of it; all of it is the host's.

To be read before another round is launched, which may have its outcome in the same place.
"""


@dataclass(slots=True)
class Played:
    """What a player has done so far."""

    recorded: list[str] = field(default_factory=list)  # kinds of rounds that are there, in order
    refused: dict[str, str] = field(default_factory=dict)  # kinds that could not be, and why
    replayed: int = 0
    eager: int = 0
    given_up: int = 0  # recordings that gave way to another kind's

    @property
    def recordings(self) -> int:
        """Recordings ever made."""
        return len(self.recorded) + self.given_up

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "recorded": list(self.recorded),
            "refused": dict(self.refused),
            "given_up": self.given_up,
            "rounds_replayed": self.replayed,
            "rounds_launched": self.eager,
        }


class Player(Protocol):
    """Plays rounds, one behind the other on the device."""

    records: bool  # the first round of a kind takes longer than the others
    ahead: int  # rounds worth launching before the outcome of the one ahead of them is read
    played: Played

    def launch(self, batch: Batch) -> Outcome:
        """Begin a round; `batch` is on the host."""
        ...


class Eager:
    """Every kernel is launched anew."""

    records = False
    ahead = 0  # the launching is the work: there is nothing to hide behind it

    def __init__(self, round_: Round) -> None:
        self.played = Played()
        self._round = round_

    def launch(self, batch: Batch) -> Outcome:
        """See `Player`; the round is over when this returns."""
        self.played.eager += 1
        emitted = self._round.play(batch.on(self._round.state.device)).on_host()
        return lambda: emitted

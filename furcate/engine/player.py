"""Who plays rounds for the loop: launch by launch, or from recordings.

Legend: B requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from furcate.engine.emitted import Emitted
from furcate.engine.round import Batch, Round

__all__ = ["Eager", "Played", "Player"]


@dataclass(slots=True)
class Played:
    """What a player has done so far."""

    recorded: list[str] = field(default_factory=list)  # kinds of rounds, in order
    refused: dict[str, str] = field(default_factory=dict)  # kinds that could not be, and why
    replayed: int = 0
    eager: int = 0

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "recorded": list(self.recorded),
            "refused": dict(self.refused),
            "rounds_replayed": self.replayed,
            "rounds_launched": self.eager,
        }


class Player(Protocol):
    """Plays a round and waits for its end."""

    records: bool  # the first round of a kind takes longer than the others
    played: Played

    def play(self, batch: Batch) -> Emitted:
        """`batch` and the outcome are on the host."""
        ...


class Eager:
    """Every kernel is launched anew."""

    records = False

    def __init__(self, round_: Round) -> None:
        self.played = Played()
        self._round = round_

    def play(self, batch: Batch) -> Emitted:
        """See `Player`."""
        self.played.eager += 1
        return self._round.play(batch.on(self._round.state.device)).on_host()

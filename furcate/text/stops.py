"""Finds stop strings in text that arrives in pieces, holding back what may become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from furcate.errors import BadRequest

__all__ = ["StopMatch", "StopMatcher", "StopStep"]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found; positions count characters of the whole text.

    `cut` is where the output ends: `start`, or `end` where the stop string itself is shown.
    """

    stop: str
    start: int
    end: int
    cut: int


@dataclass(frozen=True, slots=True)
class StopStep:
    """Text that may be shown now, and the match that ended the text, if one did."""

    text: str
    match: StopMatch | None = None


class StopMatcher:
    """The text ends at the first character with which any stop string is complete.

    That rule does not depend on how the text is cut into pieces and never waits for more text.
    Where several stop strings end with the same character, the longest counts (it starts first, so
    none of the others is shown either).

    Args:
        stops: the stop strings, none of them empty.
        include_in_output: show the stop string itself as the end of the output.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        if any(not stop for stop in stops):
            raise BadRequest("a stop string must not be empty", field="stop", value=tuple(stops))
        self._stops = tuple(stops)
        self._include = include_in_output
        self._longest = max(map(len, stops), default=0)
        self._held = ""  # the longest tail of the text so far that begins some stop string
        self._shown = 0  # characters given out
        self._match: StopMatch | None = None

    def push(self, piece: str, *, armed: bool = True) -> StopStep:
        """Take the next piece; return what may be shown and, at the end, the match.

        A stop string counts if it becomes complete while `armed`; false is for text that may not
        end yet (min_tokens). After a match, nothing more is ever shown.
        """
        if self._match is not None:
            return StopStep("", self._match)
        window = self._held + piece
        match = self._find(window) if armed else None
        if match is not None:
            return self._finish(window, match)
        self._held = self._possible_start(window)
        return self._show(window[: len(window) - len(self._held)])

    def flush(self) -> str:
        """The text still held back, once no more will come."""
        held, self._held = self._held, ""
        self._shown += len(held)
        return held

    def _find(self, window: str) -> StopMatch | None:
        best: StopMatch | None = None
        for stop in self._stops:
            # what ends inside the held text was seen, and not counted, before
            start = window.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or (end, start) < (best.end, best.start):
                best = StopMatch(stop, start, end, end if self._include else start)
        return best

    def _finish(self, window: str, match: StopMatch) -> StopStep:
        before = self._shown
        self._match = StopMatch(
            match.stop, before + match.start, before + match.end, before + match.cut
        )
        self._held = ""
        return self._show(window[: match.cut])

    def _show(self, text: str) -> StopStep:
        self._shown += len(text)
        return StopStep(text, self._match)

    def _possible_start(self, window: str) -> str:
        for length in range(min(self._longest - 1, len(window)), 0, -1):
            tail = window[len(window) - length :]
            if any(length < len(stop) and stop.startswith(tail) for stop in self._stops):
                return tail
        return ""

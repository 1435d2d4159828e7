"""From tokens to text and to an end: the rules that only the host can decide.

The device has already cut a round's tokens at stop ids, EOS and lengths. Stop strings are found
here, and nothing past them is emitted, counted or cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from furcate.engine.request import Ask
from furcate.text.detokenizer import Detokenizer
from furcate.text.stops import StopMatcher, StopStep
from furcate.text.tokenizer import Tokenizer
from furcate.verify.stops import Finish

__all__ = ["Answer", "Taken"]


@dataclass(frozen=True, slots=True)
class Taken:
    """What of a round's tokens counts, and what may be shown now."""

    tokens: int
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Answer:
    """The text of one answer as it grows."""

    def __init__(self, ask: Ask, tokenizer: Tokenizer) -> None:
        params = ask.params
        self._params = params
        self._eos = frozenset(tokenizer.eos_ids)
        self._words = Detokenizer(tokenizer, skip_special=params.skip_special_tokens)
        self._stops = StopMatcher(params.stop, include_in_output=params.include_stop_str_in_output)
        self._count = 0
        self.text = ""

    def take(self, tokens: Sequence[int], finish: Finish) -> Taken:
        """Add a round's tokens; the device's reason to finish holds for the last of them."""
        shown = ""
        for i, token in enumerate(tokens):
            self._count += 1
            hidden = finish is Finish.STOP and i == len(tokens) - 1
            if hidden and not self._params.include_stop_str_in_output:
                break
            step = self._read(self._words.push(token))
            shown += step.text
            if step.match is not None:
                return self._taken(i + 1, shown, "stop", step.match.stop)
        if finish is Finish.NOT:
            return self._taken(len(tokens), shown)
        step = self._read(self._words.flush())
        shown += step.text
        if step.match is not None:
            return self._taken(len(tokens), shown, "stop", step.match.stop)
        shown += self._stops.flush()
        if finish is Finish.LENGTH:
            return self._taken(len(tokens), shown, "length")
        last = tokens[-1]
        return self._taken(len(tokens), shown, "stop", None if last in self._eos else last)

    def end(self, reason: str, after: Taken | None = None) -> Taken:
        """End the answer where it stands, for a reason of the host's; `after` is not yet shown."""
        step = self._read(self._words.flush())
        last = self._taken(0, step.text + self._stops.flush(), reason)
        if after is None:
            return last
        return Taken(after.tokens, after.text + last.text, reason)

    def _read(self, text: str) -> StopStep:
        """The part of new text that may be shown; stop strings wait for min_tokens."""
        return self._stops.push(text, armed=self._count > self._params.min_tokens)

    def _taken(
        self, tokens: int, text: str, finish: str | None = None, stop: str | int | None = None
    ) -> Taken:
        self.text += text
        return Taken(tokens, text, finish, stop)

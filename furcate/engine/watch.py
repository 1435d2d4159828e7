"""Notices a draft network that is hardly ever right, and says once what to check."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

__all__ = ["Watch"]

ROUNDS = 200
LEAST = 1.05  # tokens per round, bonus included: a head of another target stays below


@dataclass(slots=True)
class Watch:
    """Counts the rounds of all requests, and among them those in which something was drafted.

    Rounds without a draft say nothing of the drafter: it may be right and not pay.
    """

    active: bool  # n-grams find nothing in a text that does not repeat, which is no fault
    rounds: int = 0
    tokens: int = 0
    drafted_rounds: int = 0
    drafted_tokens: int = 0

    def note(self, drafted: int, tokens: int) -> None:
        """One request's round: the nodes that were drafted and the tokens that came of it."""
        self.rounds += 1
        self.tokens += tokens
        if drafted:
            self.drafted_rounds += 1
            self.drafted_tokens += tokens

    def warn(self) -> None:
        """Warn if it is time to; every stretch of rounds is judged by itself, until one fails."""
        if not self.active or self.rounds < ROUNDS:
            return
        useless = self.drafted_rounds and self.drafted_tokens < LEAST * self.drafted_rounds
        if useless and self.tokens < LEAST * self.rounds:
            self.active = False
            warnings.warn(
                f"{self.tokens / self.rounds:.2f} tokens per round over {self.rounds} rounds: the "
                "drafts are hardly ever right. Check that the head was trained for this very "
                "target, that its layers are counted as transformers' hidden_states are (not off "
                "by one), and that its draft ids are mapped to the target's (d2t holds offsets)",
                stacklevel=2,
            )
        self.rounds = self.tokens = self.drafted_rounds = self.drafted_tokens = 0

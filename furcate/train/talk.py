"""Scripts by which the target writes conversations itself: both sides, from its own template.

As in Magpie (arXiv:2406.08464): behind the mark that begins a user's turn an instruct model writes
what users ask, and behind the mark that begins an answer, its answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from furcate.engine.bulk import Script, Stage
from furcate.text.tokenizer import Tokenizer
from furcate.train.corpus import Kind
from furcate.train.openers import FOLLOW_UPS, OPENERS, SYSTEMS
from furcate.train.wrap import Wrap

__all__ = ["TalkRecipe", "Scripts", "Talk"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TalkRecipe:
    """How conversations are made up; shares are chances, limits are tokens.

    `opened` is the share of users' turns that begin with words of ours, `passages` the share of
    those among first turns that ask for a passage to work on.
    """

    seed: int = 0
    context: int = 1280
    opened: float = 0.4
    passages: float = 0.5
    other_system: float = 0.2
    follow_up: float = 0.5
    user_temperatures: tuple[float, ...] = (0.8, 1.0)
    answer_temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    answer_shares: tuple[float, ...] = (0.4, 0.3, 0.3)
    most_user: int = 160
    most_passage: int = 500
    most_answer: int = 400

    def to_json(self) -> dict[str, Any]:
        """As a corpus records it."""
        listed = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return {"kind": "self", **listed}


@dataclass(frozen=True, slots=True)
class Talk:
    """One conversation to be written, and who writes each of its stages."""

    script: Script
    kinds: tuple[Kind, ...]


class Scripts:
    """All the conversations of a recipe; the i-th depends on the recipe and i alone.

    Attributes:
        recipe: how they are made up.
        tokenizer: the target's.
        stop_ids: what ends a turn; the first one is what the template ends turns with.
        wrap: what the chat template writes around turns.

    Raises:
        BadRequest, Unsupported: the tokenizer's chat template is missing or no plain wrap.
    """

    def __init__(self, tokenizer: Tokenizer, recipe: TalkRecipe) -> None:
        self.recipe = recipe
        self.wrap = Wrap.of(tokenizer)
        self.tokenizer = tokenizer
        ends = self.wrap.turn_end(tokenizer)
        self.stop_ids = (ends.id, *(i for i in tokenizer.eos_ids if i != ends.id))
        self._to_answer = self.wrap.to_answer.removeprefix(ends.text)
        self._to_user = self.wrap.to_user.removeprefix(ends.text)
        self._fed: dict[str, tuple[int, ...]] = {}  # few texts, fed again and again

    @property
    def likely_length(self) -> float:
        """Tokens of a conversation, roughly: a guess from its limits, before any is written."""
        return min(
            0.8 * self.recipe.context, 0.65 * (self.recipe.most_user + self.recipe.most_answer)
        )

    def __getitem__(self, i: int) -> Talk:
        rng = random.Random(f"{self.recipe.seed} {i}")
        seed = rng.getrandbits(63)
        stages = [self._first_turn(rng), self._answer(rng)]
        if rng.random() < self.recipe.follow_up:
            stages += [self._next_turn(rng), self._answer(rng)]
        kinds = tuple(kind for _, kind in stages)
        return Talk(Script(tuple(stage for stage, _ in stages), seed), kinds)

    def _first_turn(self, rng: random.Random) -> tuple[Stage, Kind]:
        recipe = self.recipe
        before = self.wrap.before(self._system(rng))
        temperature = _one_of(recipe.user_temperatures, rng)
        if rng.random() >= recipe.opened:
            return self._user(before, temperature, recipe.most_user)
        passage = rng.random() < recipe.passages
        opener = _one_of([o for o in OPENERS if o.passage is passage], rng)
        most = recipe.most_passage if passage else recipe.most_user
        return self._user(before + opener.text, temperature, most)

    def _next_turn(self, rng: random.Random) -> tuple[Stage, Kind]:
        recipe = self.recipe
        temperature = _one_of(recipe.user_temperatures, rng)
        opener = _one_of(FOLLOW_UPS, rng) if rng.random() < recipe.opened else ""
        return self._user(self._to_user + opener, temperature, recipe.most_user)

    def _user(self, text: str, temperature: float, most: int) -> tuple[Stage, Kind]:
        return self._stage(text, temperature, most), Kind.USER

    def _answer(self, rng: random.Random) -> tuple[Stage, Kind]:
        recipe = self.recipe
        temperature = rng.choices(recipe.answer_temperatures, recipe.answer_shares)[0]
        return self._stage(self._to_answer, temperature, recipe.most_answer), Kind.ANSWER

    def _stage(self, text: str, temperature: float, most: int) -> Stage:
        if text not in self._fed:
            self._fed[text] = tuple(self.tokenizer.encode(text, special=False))
        return Stage(self._fed[text], temperature, most)

    def _system(self, rng: random.Random) -> str | None:
        """The system message; None leaves it to the template."""
        other = rng.random() < self.recipe.other_system
        return _one_of(SYSTEMS, rng) if other and self.wrap.takes_system else None


def _one_of(choices: Sequence[T], rng: random.Random) -> T:
    return choices[int(rng.random() * len(choices))]

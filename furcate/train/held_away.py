"""Keeps evaluation prompts out of what is trained on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from furcate.engine.prompts import read_prompts

__all__ = ["HeldAway"]

_NGRAM = 8  # words in a row that two texts hardly share by chance
_WORD = re.compile(r"\w+")


class HeldAway:
    """Evaluation prompts, and whether a text contains one.

    A text does if any eight words in a row are those of a prompt, case and punctuation aside, or
    if, word for word, it is a prompt of fewer words.

    Args:
        prompts: all users' turns that are asked in evaluations.
        names: what they are called, for the record.
    """

    def __init__(self, prompts: Iterable[str], names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self._grams: set[str] = set()
        self._short: set[str] = set()
        for prompt in prompts:
            words = _words(prompt)
            if len(words) < _NGRAM:
                self._short.add(" ".join(words))
            self._grams.update(_grams(words))

    @classmethod
    def read(cls, paths: Sequence[Path]) -> HeldAway:
        """The users' turns of files of prompts, all turns.

        Raises:
            BadFile: a file is missing or holds no prompts; the line is named.
        """
        prompts = [turn for path in paths for turn in _turns(path)]
        return cls(prompts, [path.name for path in paths])

    def within(self, text: str) -> str | None:
        """The words by which a user's turn is known as an evaluation prompt; None if it is not."""
        words = _words(text)
        if len(words) < _NGRAM:
            whole = " ".join(words)
            return whole if whole in self._short and whole else None
        return next((gram for gram in _grams(words) if gram in self._grams), None)


def _turns(path: Path) -> Iterator[str]:
    for prompt in read_prompts(path, all_turns=True):
        yield from (turn["content"] for turn in prompt.opening if turn["role"] == "user")
        yield from prompt.later


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _grams(words: Sequence[str]) -> Iterator[str]:
    return (" ".join(words[i : i + _NGRAM]) for i in range(len(words) - _NGRAM + 1))

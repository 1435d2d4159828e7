"""Text to train on, as token ids on disk: one flat file, an index of it, and what it is.

A corpus is a folder. `tokens.bin` holds the ids of all conversations one after the other, two
bytes each up to 65,536 ids and four beyond; `index.safetensors` says where each one lies and what
in it was sampled; `corpus.json` says of which vocabulary it is and how it was made. No features
are stored. The index is written last and renamed into place, so it never speaks of tokens that are
not there; what `tokens.bin` holds beyond it was interrupted, and is cut off on resuming.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from furcate.errors import BadFile

__all__ = ["About", "Conversation", "Corpus", "Index", "Kind", "Part", "id_dtype", "read_about"]

FORMAT = "furcate corpus"
VERSION = 1
TOKENS, INDEX, ABOUT = "tokens.bin", "index.safetensors", "corpus.json"
_NARROW = 1 << 16  # ids that two bytes tell apart


class Kind(IntEnum):
    """Who wrote a part of a conversation, as the index stores it."""

    USER = 0  # a user's turn that the target sampled
    ANSWER = 1


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens `start` to `end` (excluded) of one conversation, and who wrote them."""

    start: int
    end: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation: the ids [T], and the parts of it that somebody wrote.

    What lies outside of all parts was given: the template's marks, system prompts, openers, and
    the user's turns of a conversation that was read from a file.
    """

    tokens: NDArray[Any]
    parts: tuple[Part, ...]

    @property
    def spans(self) -> tuple[Part, ...]:
        """The answers, their end tokens included: where a loss is taken."""
        return tuple(part for part in self.parts if part.kind is Kind.ANSWER)


@dataclass(frozen=True, slots=True)
class About:
    """What a corpus is: of which target, and how it was made.

    `recipe` is whatever its maker needs in order to write the same corpus again. `complete` turns
    true when all that was wanted has been written.
    """

    target: str
    fingerprint: str  # of the tokenizer; equal ids mean equal tokens
    vocab_size: int  # rows of the target's vocabulary matrix
    recipe: Mapping[str, Any]
    complete: bool = False

    def to_json(self) -> dict[str, Any]:
        """As `corpus.json` holds it."""
        size = id_dtype(self.vocab_size).itemsize
        return {"format": FORMAT, "version": VERSION, "bytes_per_token": size, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Index:
    """Where each of N conversations lies in `tokens.bin`, and what M parts they have.

    Attributes:
        offset: int64 [N + 1]: conversation i is tokens `offset[i]` to `offset[i + 1]`.
        number: int64 [N]: which script or line of a file it came from.
        part_offset: int64 [N + 1]: its parts are `part_offset[i]` to `part_offset[i + 1]`.
        part: int32 [M, 3]: start and end, counted from the conversation's first token, and kind.
    """

    offset: NDArray[np.int64]
    number: NDArray[np.int64]
    part_offset: NDArray[np.int64]
    part: NDArray[np.int32]

    def bounds(self, kind: Kind) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First and past-the-last token of every part of a kind, counted in `tokens.bin`."""
        owner = np.repeat(np.arange(len(self.number)), np.diff(self.part_offset))
        start = self.offset[owner] + self.part[:, 0]
        end = self.offset[owner] + self.part[:, 1]
        chosen = self.part[:, 2] == kind
        return start[chosen], end[chosen]


class Corpus:
    """Conversations on disk, read as they are needed; `corpus[i]` is the i-th one written.

    Attributes:
        about: what the corpus is.
        tokens: all ids, memory-mapped.
        answer_tokens: how many of them are answers.
    """

    def __init__(self, about: About, index: Index, tokens: NDArray[Any]) -> None:
        self.about = about
        self.index = index
        self.tokens = tokens
        starts, ends = index.bounds(Kind.ANSWER)
        self.answer_tokens = int((ends - starts).sum())

    @classmethod
    def open(cls, path: Path, *, fingerprint: str | None = None) -> Corpus:
        """Open a corpus, finished or interrupted.

        Args:
            fingerprint: the vocabulary it must be of; None takes any.

        Raises:
            BadFile: there is no corpus, it is damaged, it is of another vocabulary, or it holds no
                answer.
        """
        about = read_about(path)
        if fingerprint not in (None, about.fingerprint):
            hint = "write a new one, or name the target that wrote it"
            what = f"the text in it is of the vocabulary of {about.target}, which is not this one"
            raise BadFile(what, field=str(path), hint=hint)
        index = read_index(path)
        corpus = cls(about, index, _mapped(path, about, index))
        if corpus.answer_tokens == 0:
            raise BadFile("holds no answer to train on", field=str(path), hint="write more text")
        return corpus

    def __len__(self) -> int:
        return len(self.index.number)

    def __getitem__(self, i: int) -> Conversation:
        n = len(self)
        if not -n <= i < n:
            raise IndexError(i)
        i %= n
        start, end = self.index.offset[i : i + 2]
        first, last = self.index.part_offset[i : i + 2]
        parts = tuple(Part(int(a), int(b), Kind(k)) for a, b, k in self.index.part[first:last])
        return Conversation(self.tokens[start:end], parts)

    def __iter__(self) -> Iterator[Conversation]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each conversation [N]."""
        return np.diff(self.index.offset)


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """How an id is stored: in two bytes where they are enough, else in four; little-endian."""
    return np.dtype("<u2" if vocab_size <= _NARROW else "<u4")


def read_about(path: Path) -> About:
    """What the corpus in a folder is.

    Raises:
        BadFile: there is none, or it is damaged or of another version.
    """
    where = path / ABOUT
    try:
        record = json.loads(where.read_text(encoding="utf-8"))
    except OSError as err:
        what = f"no corpus is here: {err.strerror or 'cannot be read'}"
        raise BadFile(what, field=str(where), hint="write one with --data self") from None
    except ValueError:
        raise BadFile("damaged: not JSON", field=str(where), hint="write it anew") from None
    return _about(record, where)


def read_index(path: Path) -> Index:
    """The index of the corpus in a folder; empty where nothing has been written yet.

    Raises:
        BadFile: it is damaged.
    """
    where = path / INDEX
    if not where.is_file():
        zero = np.zeros(1, np.int64)
        return Index(zero, np.zeros(0, np.int64), zero, np.zeros((0, 3), np.int32))
    try:
        arrays = load_file(where)
        index = Index(**{field.name: arrays[field.name] for field in fields(Index)})
    except (SafetensorError, KeyError, OSError) as err:
        raise BadFile(f"damaged: {err}", field=str(where), hint="write it anew") from None
    if not _sound(index):
        raise BadFile("damaged: it contradicts itself", field=str(where), hint="write it anew")
    return index


def _about(record: object, where: Path) -> About:
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise BadFile("does not describe a corpus of furcate", field=str(where))
    if record.get("version") != VERSION:
        what = f"written by another version of furcate, which this one (format {VERSION}) cannot"
        raise BadFile(f"{what} read", field=str(where), value=record.get("version"))
    kinds = {"target": str, "fingerprint": str, "vocab_size": int, "recipe": dict, "complete": bool}
    for key, kind in kinds.items():
        if type(record.get(key)) is not kind:
            what = f"damaged: {key} must be {kind.__name__}"
            raise BadFile(what, field=str(where), value=record.get(key), hint="write it anew")
    return About(**{key: record[key] for key in kinds})


def _sound(index: Index) -> bool:
    n, m = len(index.number), len(index.part)
    if index.offset.shape != (n + 1,) or index.part_offset.shape != (n + 1,):
        return False
    if index.part.shape != (m, 3) or index.part_offset[-1] != m:
        return False
    if index.offset[0] != 0 or index.part_offset[0] != 0:
        return False
    if (np.diff(index.offset) <= 0).any() or (np.diff(index.part_offset) < 0).any():
        return False
    room = np.repeat(np.diff(index.offset), np.diff(index.part_offset))
    start, end, kind = index.part.T
    inside = (start >= 0) & (start < end) & (end <= room)
    return bool(inside.all() and np.isin(kind, list(Kind)).all())


def _mapped(path: Path, about: About, index: Index) -> NDArray[Any]:
    where, dtype, count = path / TOKENS, id_dtype(about.vocab_size), int(index.offset[-1])
    there = where.stat().st_size if where.is_file() else 0
    if there < count * dtype.itemsize:
        what = f"damaged: the index speaks of {count * dtype.itemsize} bytes, {there} are there"
        raise BadFile(what, field=str(where), hint="write it anew")
    if count == 0:
        return np.zeros(0, dtype)
    return np.memmap(where, dtype, mode="r", shape=(count,))

"""Writes a corpus so that an interruption loses only what came after the last flush."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from furcate.errors import BadFile, BadRequest, StorageFailed
from furcate.files import write_json
from furcate.train.corpus import (
    ABOUT,
    INDEX,
    TOKENS,
    About,
    Index,
    Kind,
    Part,
    id_dtype,
    read_about,
    read_index,
)

__all__ = ["CorpusWriter", "check_same"]

FLUSH_TOKENS = 1 << 22
FLUSH_SECONDS = 30.0


class CorpusWriter:
    """Appends conversations to a corpus; leaving its `with` block flushes, whatever happened.

    Attributes:
        done: numbers of the scripts or lines that the corpus holds.
        tokens: tokens written, those that were there before included.
        answer_tokens: how many of them are answers.

    Args:
        path: the corpus's folder.
        about: what it is to be.
        flush_tokens: after how many new tokens all is written to disk; after half a minute too.
        clock: tells seconds.

    Raises:
        BadRequest: the folder holds a corpus made in another way.
        BadFile: what is there is damaged.
        StorageFailed: the folder cannot be written.
    """

    def __init__(
        self,
        path: Path,
        about: About,
        *,
        flush_tokens: int = FLUSH_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.about = replace(about, complete=False)
        self._flush_tokens = flush_tokens
        self._clock = clock
        self._flushed_at = clock()
        self._dtype = id_dtype(about.vocab_size)
        if (path / ABOUT).exists():
            check_same(read_about(path), about, path)
        self._index = read_index(path)  # of what is on disk
        self._waiting: list[_Entry] = []
        self.done = set(self._index.number.tolist())
        self.tokens = self._flushed
        starts, ends = self._index.bounds(Kind.ANSWER)
        self.answer_tokens = int((ends - starts).sum())
        self._refuse_lost_tokens()
        write_json(path / ABOUT, self.about.to_json())

    def add(self, number: int, tokens: Sequence[int], parts: Sequence[Part]) -> None:
        """Append one conversation; it is on disk after the next flush.

        Raises:
            StorageFailed: a flush failed; what was flushed before stays.
        """
        if not tokens or number in self.done:
            raise ValueError(f"conversation {number} is empty or was written before")
        # one step, so that an interruption leaves it whole or not at all
        self._waiting.append(_Entry(number, np.asarray(tokens, self._dtype), tuple(parts)))
        self.done.add(number)
        self.tokens += len(tokens)
        self.answer_tokens += sum(p.end - p.start for p in parts if p.kind is Kind.ANSWER)
        late = self._clock() - self._flushed_at >= FLUSH_SECONDS
        if late or self.tokens - self._flushed >= self._flush_tokens:
            self.flush()

    def flush(self) -> None:
        """Put all on disk: first the tokens, then the index that speaks of them.

        Raises:
            StorageFailed: the disk is full or the like.
        """
        if not self._waiting:
            return
        index = _extended(self._index, self._waiting)
        ids = np.concatenate([entry.tokens for entry in self._waiting])
        try:
            with (self.path / TOKENS).open("ab") as file:
                file.truncate(self._flushed * self._dtype.itemsize)  # less an interrupted flush
                file.write(ids.tobytes())
                file.flush()
                os.fsync(file.fileno())
            _replace(self.path / INDEX, save(_arrays(index)))
        except OSError as fault:
            raise _storage_failed(fault, self.path) from fault
        self._index, self._waiting = index, []
        self._flushed_at = self._clock()

    def finish(self) -> None:
        """Flush, and say that the corpus is complete.

        Raises:
            StorageFailed: as `flush`.
        """
        self.flush()
        self.about = replace(self.about, complete=True)
        write_json(self.path / ABOUT, self.about.to_json())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, StorageFailed):  # which a second try would only repeat
            self.flush()

    @property
    def _flushed(self) -> int:
        """Tokens on disk."""
        return int(self._index.offset[-1])

    def _refuse_lost_tokens(self) -> None:
        where, wanted = self.path / TOKENS, self._flushed * self._dtype.itemsize
        there = where.stat().st_size if where.exists() else 0
        if there < wanted:
            what = f"damaged: the index speaks of {wanted} bytes, {there} are there"
            raise BadFile(what, field=str(where), hint="write it anew, in another folder")


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    tokens: NDArray[Any]
    parts: tuple[Part, ...]


def _extended(index: Index, entries: Sequence[_Entry]) -> Index:
    lengths = [len(entry.tokens) for entry in entries]
    counts = [len(entry.parts) for entry in entries]
    parts = [(part.start, part.end, part.kind) for entry in entries for part in entry.parts]
    return Index(
        offset=_go_on(index.offset, lengths),
        number=np.append(index.number, [entry.number for entry in entries]).astype(np.int64),
        part_offset=_go_on(index.part_offset, counts),
        part=np.concatenate([index.part, np.array(parts, np.int32).reshape(-1, 3)]),
    )


def _go_on(offset: NDArray[np.int64], sizes: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([offset, offset[-1] + np.cumsum(sizes, dtype=np.int64)])


def _arrays(index: Index) -> dict[str, NDArray[Any]]:
    return {field.name: getattr(index, field.name) for field in fields(index)}


def check_same(there: About, wanted: About, path: Path) -> None:
    """A corpus goes on as it began: from the same target, by the same recipe.

    Raises:
        BadRequest: it would not; what differs is named with the value it has on disk.
    """
    hint = "give the same options as before, or name another folder"
    old, new = there.to_json(), wanted.to_json()
    for key in ("fingerprint", "vocab_size", "recipe"):
        if old[key] != new[key]:
            what = f"{path} holds text whose {key} is another"
            parts = _differing(old[key], new[key])
            raise BadRequest(what, field=key, value=parts, hint=hint)


def _differing(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return old
    return {key: old.get(key) for key in sorted({*old, *new}) if old.get(key) != new.get(key)}


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _storage_failed(fault: OSError, path: Path) -> StorageFailed:
    full = fault.errno in (errno.ENOSPC, errno.EDQUOT)
    what = "no space left for the text" if full else f"cannot write: {fault.strerror}"
    hint = "free some space and go on with --resume; all up to the last flush is kept"
    return StorageFailed(what, field=str(path), hint=hint)

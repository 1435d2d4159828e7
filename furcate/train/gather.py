"""Fills a corpus: with conversations that the target writes, or with those of a file."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch

from furcate.engine.bulk import Progress, Script, Written, write
from furcate.errors import BadFile, BadRequest, UserError
from furcate.models.decoder import Decoder
from furcate.text.tokenizer import Tokenizer
from furcate.train.conversations import Encoded, Given, encoded, read_conversations
from furcate.train.corpus import Kind, Part
from furcate.train.held_away import HeldAway
from furcate.train.talk import Scripts
from furcate.train.writer import CorpusWriter

__all__ = ["Gathered", "GivenText", "OwnText", "Source"]


@dataclass(slots=True)
class Gathered:
    """Conversations gathered in one call, and those left out.

    `held_away` counts those that hold an evaluation prompt, `too_long` those in which no answer
    begins within the context; `made_tokens` are the tokens of all.
    """

    made_tokens: int = 0
    written: int = 0
    held_away: int = 0
    too_long: int = 0


_VAIN = 64  # conversations left out before the first that is kept

OnTokens = Callable[[int], None]  # told how many tokens this call has made


class Source(Protocol):
    """Where conversations come from."""

    @property
    def wanted(self) -> int | None:
        """How many tokens make the corpus complete; None: all that there are."""

    def recipe(self) -> dict[str, Any]:
        """What must be the same for a corpus to go on as it began."""

    def fill(self, writer: CorpusWriter, on_tokens: OnTokens) -> Gathered:
        """Write what the corpus lacks.

        Raises:
            StorageFailed: the disk is full or the like; all up to the last flush stays.
        """


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the bulk decoder, and the scripts of it that are not finished, in order."""

    writer: CorpusWriter
    done: Gathered
    numbers: Iterator[int]
    on_tokens: OnTokens
    before: int  # tokens of earlier runs of the same call
    started: deque[int] = field(default_factory=deque)

    def told(self, progress: Progress) -> None:
        """Pass on how many tokens the call has made."""
        self.done.made_tokens = self.before + progress.tokens
        self.on_tokens(self.done.made_tokens)


class OwnText:
    """What the target writes by itself, until the corpus holds `tokens` tokens at least.

    What has been begun is always finished: a corpus of those conversations that finish first would
    be one of short ones.

    Args:
        decoder: the target.
        scripts: what it is to write.
        held: what must not be in it.
        tokens: how many tokens are wanted.
        batch: how many conversations are written at once.
    """

    def __init__(
        self, decoder: Decoder, scripts: Scripts, held: HeldAway, tokens: int, batch: int
    ) -> None:
        self._decoder = decoder
        self._scripts = scripts
        self._held = held
        self._tokens = tokens
        self._batch = batch
        rows, tokenizer = decoder.spec.vocab_size, scripts.tokenizer
        self._bytes = [tokenizer.token_bytes(i) for i in range(rows)]

    @property
    def wanted(self) -> int:
        return self._tokens

    def recipe(self) -> dict[str, Any]:
        return {**self._scripts.recipe.to_json(), "held_away": list(self._held.names)}

    def fill(self, writer: CorpusWriter, on_tokens: OnTokens) -> Gathered:
        """As `Source.fill`.

        Raises:
            BadRequest: the device has no room for so large a batch, or the context is too short.
            StorageFailed: as `Source.fill`.
        """
        done = Gathered()
        numbers = (number for number in count() if number not in writer.done)
        try:
            while writer.tokens < self._tokens:
                self._play(_Run(writer, done, numbers, on_tokens, done.made_tokens))
        except torch.OutOfMemoryError as err:
            raise self._too_large("the device has no memory for so many at once") from err
        except BadRequest as err:
            if err.field != "batch":
                raise
            raise self._too_large(err.what) from None
        return done

    def _play(self, run: _Run) -> None:
        """Start as many scripts as should be enough, and finish them all."""
        written = write(
            self._decoder,
            self._lacking(run),
            stop_ids=self._scripts.stop_ids,
            batch=self._batch,
            context=self._scripts.recipe.context,
            on_progress=run.told,
        )
        for text in written:
            self._keep(run.started.popleft(), text, run.writer, run.done)
            self._refuse_vain(run.done)

    def _lacking(self, run: _Run) -> Iterator[Script]:
        """The next scripts, until those begun should fill the corpus."""
        while True:
            known = len(run.writer.done)
            length = run.writer.tokens / known if known else self._scripts.likely_length
            if run.writer.tokens + len(run.started) * length >= self._tokens:
                return
            number = next(run.numbers)
            run.started.append(number)
            yield self._scripts[number].script

    def _refuse_vain(self, done: Gathered) -> None:
        if done.written == 0 and done.held_away + done.too_long >= _VAIN:
            context = self._scripts.recipe.context
            what = f"nothing that the target wrote within {context} tokens can be trained on"
            hint = f"too long: {done.too_long}, evaluation prompts: {done.held_away}"
            raise BadRequest(what, field="--data-context", hint=hint)

    def _too_large(self, what: str) -> BadRequest:
        hint = "lower it and go on with --resume"
        return BadRequest(what, field="--write-batch", value=self._batch, hint=hint)

    def _keep(self, number: int, written: Written, writer: CorpusWriter, done: Gathered) -> None:
        kinds = self._scripts[number].kinds
        parts = [Part(span.start, span.end, kinds[span.stage]) for span in written.spans]
        if not any(part.kind is Kind.ANSWER for part in parts):
            done.too_long += 1
            return
        if any(self._held.within(turn) for turn in self._asked(written.tokens, parts)):
            done.held_away += 1
            return
        writer.add(number, written.tokens, parts)
        done.written += 1

    def _asked(self, tokens: Sequence[int], parts: Sequence[Part]) -> Iterator[str]:
        """The users' turns, with the words that were fed to begin them."""
        told = 0
        for part in parts:
            if part.kind is Kind.ANSWER:
                text = b"".join(self._bytes[i] for i in tokens[told : part.start])
                yield self._scripts.wrap.turn_before(text.decode("utf-8", "replace"))
                told = part.end


class GivenText:
    """The conversations of a file, all or until the corpus holds `tokens` tokens at least.

    Args:
        path: a JSON object a line, see `conversations`.
        tokenizer: the target's.
        held: what must not be in it.
        context: the most tokens that are kept of a conversation.
        tokens: how many tokens are wanted; None: the whole file.

    Raises:
        BadFile: the file cannot be read.
    """

    def __init__(
        self, path: Path, tokenizer: Tokenizer, held: HeldAway, context: int, tokens: int | None
    ) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._held = held
        self._context = context
        self._tokens = tokens
        self._digest = _digest(path)

    @property
    def wanted(self) -> int | None:
        return self._tokens

    def recipe(self) -> dict[str, Any]:
        return {
            "kind": "file",
            "file": self._path.name,
            "sha256": self._digest,
            "context": self._context,
            "tokens": self._tokens,  # a file that was read to its end holds no more
            "held_away": list(self._held.names),
        }

    def fill(self, writer: CorpusWriter, on_tokens: OnTokens) -> Gathered:
        """As `Source.fill`.

        Raises:
            BadFile: a line is not a conversation, or not one for this target; the line is named.
            StorageFailed: as `Source.fill`.
        """
        done = Gathered()
        for given in read_conversations(self._path):
            if self._tokens is not None and writer.tokens >= self._tokens:
                break
            if given.line not in writer.done:
                self._keep(given, writer, done)
                on_tokens(done.made_tokens)
        return done

    def _keep(self, given: Given, writer: CorpusWriter, done: Gathered) -> None:
        if any(self._held.within(turn) for turn in given.asked):
            done.held_away += 1
            return
        text = self._encoded(given)
        done.made_tokens += len(text.tokens)
        if not text.parts:
            done.too_long += 1
            return
        writer.add(given.line, text.tokens, text.parts)
        done.written += 1

    def _encoded(self, given: Given) -> Encoded:
        try:
            return encoded(self._tokenizer, given.messages, self._context)
        except UserError as err:
            where = f"{self._path.name} line {given.line}"
            raise BadFile(str(err), field=where, hint="mend the line or leave it out") from None


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as err:
        raise BadFile(err.strerror or "cannot be read", field="--data", value=str(path)) from None

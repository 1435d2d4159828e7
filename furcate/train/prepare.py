"""Gets the text to train on: has the target write it, reads it from a file, or finds it there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import furcate
from furcate.engine.build import device_of, dtype_of
from furcate.errors import BadRequest
from furcate.models.decoder import Decoder
from furcate.models.load import load_decoder
from furcate.models.zoo import resolve
from furcate.text.tokenizer import Tokenizer, load_tokenizer
from furcate.train.corpus import ABOUT, About, Corpus, read_about, read_index
from furcate.train.gather import Gathered, GivenText, OwnText, Source
from furcate.train.held_away import HeldAway
from furcate.train.interrupt import heeding_signals
from furcate.train.talk import Scripts, TalkRecipe
from furcate.train.writer import CorpusWriter, check_same

__all__ = [
    "CONTEXT",
    "SELF",
    "Progress",
    "Target",
    "Text",
    "TextAsked",
    "default_held_away",
    "prepare",
]

SELF = "self"
CONTEXT = 1280
GPU_TOKENS, CPU_TOKENS = 64_000_000, 200_000  # minutes of writing
GPU_BATCH, CPU_BATCH = 1024, 16


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the text is: tokens there at first and now, and wanted where that is known."""

    before: int
    tokens: int
    wanted: int | None


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Target:
    """The model that heads are trained for."""

    name: str
    path: Path
    tokenizer: Tokenizer
    decoder: Decoder

    @classmethod
    def load(cls, name: str, dtype: str, device: str) -> Target:
        """A target by name or path.

        Raises:
            BadRequest, BadFile, Unsupported: there is none, or furcate cannot run it.
        """
        path, where = resolve(name), device_of(device)
        tokenizer = load_tokenizer(path)
        decoder = load_decoder(path, dtype_of(dtype, where), where)
        return cls(name, path, tokenizer, decoder)


@dataclass(frozen=True, slots=True)
class TextAsked:
    """Which text is wanted.

    Attributes:
        data: `self`, a file of conversations, or the folder of a corpus.
        path: the folder of the corpus, where one is to be written.
        tokens: how many tokens at least; None: all of a file, or what suits the device.
        batch: conversations written at once; None: what suits the device.
        seed: of all that is drawn.
        context: longest conversation in tokens.
        held_away: files of prompts that must not be in it.
        resume: go on with a corpus that is not complete.
    """

    data: str
    path: Path
    tokens: int | None
    batch: int | None
    seed: int
    context: int
    held_away: tuple[Path, ...]
    resume: bool


@dataclass(frozen=True, slots=True)
class Text:
    """A corpus, and what was done to get it; `seconds` is 0 where it was there."""

    corpus: Corpus
    path: Path
    gathered: Gathered
    new_tokens: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The figures."""
        rate = self.gathered.made_tokens / self.seconds if self.seconds > 0 else None
        return {
            "path": str(self.path),
            "complete": self.corpus.about.complete,
            "conversations": len(self.corpus),
            "tokens": len(self.corpus.tokens),
            "answer_tokens": self.corpus.answer_tokens,
            "bytes_per_token": self.corpus.tokens.itemsize,
            "new_tokens": self.new_tokens,
            "seconds": self.seconds,
            "tokens_per_second": rate,
            **asdict(self.gathered),
        }


def default_held_away() -> tuple[Path, ...]:
    """The evaluation prompts of the source tree, where there is one."""
    path = Path(furcate.__file__).parents[1] / "benchmarks" / "data" / "spec_bench_dev.jsonl"
    return (path,) if path.is_file() else ()


def prepare(target: Target, asked: TextAsked, on_progress: OnProgress) -> Text:
    """The corpus that is asked for, written as far as it is not there yet.

    Raises:
        BadRequest: what is there was made in another way, or is unfinished and not to be resumed;
            there is no chat template; the batch is too large for the device.
        BadFile: the file or the corpus is damaged, is of another vocabulary, or teaches nothing.
        Unsupported: the template leaves no turn to be written.
        StorageFailed: the disk is full or the like; what was flushed stays.
        KeyboardInterrupt: Ctrl-C or SIGTERM; all that is finished is flushed.
    """
    fingerprint = target.tokenizer.fingerprint()
    if asked.data != SELF and Path(asked.data).is_dir():
        path = Path(asked.data)
        return Text(Corpus.open(path, fingerprint=fingerprint), path, Gathered(), 0, 0.0)
    source = _source(target, asked)
    about = About(target.name, fingerprint, target.decoder.spec.vocab_size, source.recipe())
    if _there(asked, about, source.wanted):
        return Text(Corpus.open(asked.path), asked.path, Gathered(), 0, 0.0)
    began = time.perf_counter()
    with CorpusWriter(asked.path, about) as writer, heeding_signals() as stop:
        before = writer.tokens

        def told(new: int) -> None:
            on_progress(Progress(before, before + new, source.wanted))
            if stop.asked:
                raise KeyboardInterrupt

        gathered = source.fill(writer, told)
        writer.finish()
        if stop.asked:  # just before the end
            raise KeyboardInterrupt
    seconds = time.perf_counter() - began
    return Text(Corpus.open(asked.path), asked.path, gathered, writer.tokens - before, seconds)


def _there(asked: TextAsked, about: About, wanted: int | None) -> bool:
    """Whether the corpus is there already; one that is not whole is touched only on request."""
    if not (asked.path / ABOUT).exists():
        return False
    there = read_about(asked.path)
    check_same(there, about, asked.path)
    tokens = int(read_index(asked.path).offset[-1])
    if there.complete and (about.recipe["kind"] == "file" or tokens >= (wanted or 0)):
        return True
    if not asked.resume:
        hint = "go on with --resume, or name another folder"
        what = f"{tokens} tokens of text are here, which is not all that is wanted"
        raise BadRequest(what, field=str(asked.path), hint=hint)
    return False


def _source(target: Target, asked: TextAsked) -> Source:
    held = HeldAway.read(asked.held_away)
    if asked.data != SELF:
        path = Path(asked.data)
        return GivenText(path, target.tokenizer, held, asked.context, asked.tokens)
    on_gpu = target.decoder.device.type == "cuda"
    tokens = asked.tokens or (GPU_TOKENS if on_gpu else CPU_TOKENS)
    batch = asked.batch or (GPU_BATCH if on_gpu else CPU_BATCH)
    context = min(asked.context, target.decoder.spec.max_position)
    scripts = Scripts(target.tokenizer, TalkRecipe(asked.seed, context))
    return OwnText(target.decoder, scripts, held, tokens, batch)

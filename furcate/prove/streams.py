"""Runs the cells of one sampling law: plain streams, and every drafter's held against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.drafters.adversary import Adversary
from furcate.drafters.base import Drafter
from furcate.drafters.ngram import NgramDrafter
from furcate.drafters.off import OffDrafter
from furcate.engine.build import build
from furcate.engine.compare import Parting, explain, first_difference
from furcate.engine.engine import Engine
from furcate.engine.naive import Judge
from furcate.engine.outputs import Output, Stats
from furcate.models.decoder import Decoder
from furcate.prove.grid import BATCHES, params_of
from furcate.text.tokenizer import Tokenizer

__all__ = ["GUESSERS", "CellReport", "Subject", "run_setting"]

NGRAM = "ngram"
GUESSERS = (NGRAM, "hidden", "bushy", "twins", "any")
NODES = 15  # a fixed tree: what is compared must not depend on a clock


@dataclass(frozen=True, slots=True)
class Subject:
    """What is put to the proof, and how much of it."""

    decoder: Decoder
    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]  # token ids
    max_tokens: int
    guessers: Sequence[str] = GUESSERS
    seed: int = 0


@dataclass(slots=True)
class CellReport:
    """What one cell showed. `off_likeliest_path` counts accepted paths of depth 3 and more."""

    cell: str
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    rejected: int = 0
    off_likeliest_path: int = 0
    partings: list[Parting] = field(default_factory=list)

    def add(self, stats: Stats) -> None:
        """Count one speculative stream in."""
        self.tokens += stats.tokens
        self.rounds += stats.rounds
        self.accepted += stats.accepted
        self.rejected += stats.drafted - stats.accepted
        self.off_likeliest_path += stats.off_likeliest_path

    def compare(
        self, decoder: Decoder, drafted: Output, plain: Output, law: SamplingParams
    ) -> None:
        """Hold one stream against plain decoding; where they part, measure how close it was."""
        index = first_difference(drafted.token_ids, plain.token_ids)
        if index is not None:
            judge = Judge(decoder, plain.prompt_token_ids, law)
            self.partings.append(explain(judge, drafted.token_ids, plain.token_ids, index))

    @property
    def ties(self) -> int:
        """Differences that rounding alone explains."""
        return sum(part.tie for part in self.partings)

    @property
    def wrong(self) -> int:
        """Differences that it does not."""
        return len(self.partings) - self.ties


def run_setting(subject: Subject, setting: str) -> list[CellReport]:
    """Compare every drafter's streams with plain decoding under one law, a cell per batch size.

    Plain decoding runs at batch 1 throughout, so that the batch is put to the proof as well.
    """
    laws = [
        params_of(setting, subject.seed + i, subject.max_tokens)
        for i in range(len(subject.prompts))
    ]
    plain = _streams(subject, laws, OffDrafter(), batch=1)
    known = [[*one.prompt_token_ids, *one.token_ids] for one in plain]
    reports = []
    for batch in BATCHES:
        report = CellReport(f"{setting}, batch {batch}")
        for guesser in subject.guessers:
            drafter = _drafter(subject, guesser, known)
            drafted = _streams(subject, laws, drafter, batch)
            for one, other, law in zip(drafted, plain, laws, strict=True):
                report.add(one.stats)
                report.compare(subject.decoder, one, other, law)
        reports.append(report)
    return reports


def _streams(
    subject: Subject, laws: Sequence[SamplingParams], drafter: Drafter, batch: int
) -> list[Output]:
    """All prompts' answers, `batch` of them decoded together."""
    options = EngineOptions(max_batch=batch, reuse_prefix=False)
    draft = DraftOptions(num_draft_tokens=NODES, adaptive=False)
    with Engine(build(subject.decoder, subject.tokenizer, drafter, options, draft)) as engine:
        asked = zip(subject.prompts, laws, strict=True)
        ids = [engine.submit(prompt, law) for prompt, law in asked]
        return [engine.collect(request_id) for request_id in ids]


def _drafter(subject: Subject, guesser: str, known: Sequence[Sequence[int]]) -> Drafter:
    if guesser == NGRAM:
        capacity = max(BATCHES)
        return NgramDrafter(DraftOptions(), capacity=capacity, device=subject.decoder.device)
    vocab = subject.decoder.spec.vocab_size
    return Adversary(known, guesser, vocab=vocab, seed=subject.seed)

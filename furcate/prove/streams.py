"""Runs the cells of one sampling law: plain streams, and every drafter's held against them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from furcate.kernels.backend import kernels_of
from furcate.models.decoder import Decoder
from furcate.prove.grid import BATCHES, params_of
from furcate.text.tokenizer import Tokenizer

__all__ = [
    "ALL",
    "CHAINS",
    "GUESSERS",
    "NODES",
    "CellReport",
    "Subject",
    "plain_streams",
    "pooled",
    "run_setting",
]

ALL = "all"  # the drafter's name in a pooled report
NGRAM = "ngram"
GUESSERS = (NGRAM, "chain", "star", "single", "bushy", "hidden", "twins", "wrong", "any")
CHAINS = ("chain", "single")  # those that never branch
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
    stop_ids: Sequence[int] = ()  # frequent tokens, for the laws with min_tokens to bar
    batch_invariant: bool = False

    def laws(self, setting: str) -> list[SamplingParams]:
        """The sampling options of each prompt's stream."""
        seeds = range(self.seed, self.seed + len(self.prompts))
        return [params_of(setting, seed, self.max_tokens, self.stop_ids) for seed in seeds]


@dataclass(slots=True)
class CellReport:
    """What one cell showed. `off_likeliest_path` counts accepted paths of depth 3 and more.

    `compared` are tokens up to the first difference of each stream: behind it there is nothing to
    compare.
    """

    law: str
    drafter: str
    batch: int
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    rejected: int = 0
    off_likeliest_path: int = 0
    partings: list[Parting] = field(default_factory=list)
    compared: int = 0

    def add(self, stats: Stats) -> None:
        """Count one speculative stream in."""
        self.tokens += stats.tokens
        self.rounds += stats.rounds
        self.accepted += stats.accepted
        self.rejected += stats.drafted - stats.accepted
        self.off_likeliest_path += stats.off_likeliest_path

    def merge(self, other: CellReport) -> None:
        """Count another cell in."""
        self.tokens += other.tokens
        self.rounds += other.rounds
        self.accepted += other.accepted
        self.rejected += other.rejected
        self.off_likeliest_path += other.off_likeliest_path
        self.partings += other.partings
        self.compared += other.compared

    def compare(
        self, decoder: Decoder, drafted: Output, plain: Output, law: SamplingParams
    ) -> None:
        """Hold one stream against plain decoding; where they part, measure how close it was."""
        index = first_difference(drafted.token_ids, plain.token_ids)
        self.compared += len(plain.token_ids) if index is None else index + 1
        if index is not None:
            judge = Judge(decoder, plain.prompt_token_ids, law, law.stop_token_ids)
            self.partings.append(explain(judge, drafted.token_ids, plain.token_ids, index))

    @property
    def cell(self) -> str:
        """The cell's name."""
        return f"{self.law}, {self.drafter}, batch {self.batch}"

    @property
    def ties(self) -> int:
        """Differences that rounding alone explains."""
        return sum(part.tie for part in self.partings)

    @property
    def wrong(self) -> int:
        """Differences that it does not."""
        return len(self.partings) - self.ties

    @property
    def idle(self) -> list[str]:
        """What the cell never did and so did not put to the proof."""
        did = {
            "accepted nothing": self.accepted,
            "rejected nothing": self.rejected,
            "never left the likeliest path": self.off_likeliest_path,
        }
        return [what for what, count in did.items() if not count]


def plain_streams(subject: Subject, setting: str) -> list[Output]:
    """Plain decoding's answers under one law.

    It runs at batch 1 throughout, so that the batch is put to the proof as well.
    """
    return _streams(subject, subject.laws(setting), OffDrafter(), batch=1)


def run_setting(
    subject: Subject, setting: str, plain: Sequence[Output] | None = None
) -> list[CellReport]:
    """Compare drafters' streams with plain decoding under one law, a cell per drafter and batch.

    Args:
        plain: the `plain_streams`, where they are known already.
    """
    plain = plain_streams(subject, setting) if plain is None else plain
    return [
        _run_cell(subject, CellReport(setting, guesser, batch), plain)
        for batch in BATCHES
        for guesser in subject.guessers
    ]


def pooled(reports: Iterable[CellReport]) -> list[CellReport]:
    """The cells of all drafters together, one per law and batch, in the order they came in."""
    pools: dict[tuple[str, int], CellReport] = {}
    for report in reports:
        key = (report.law, report.batch)
        pools.setdefault(key, CellReport(report.law, ALL, report.batch)).merge(report)
    return list(pools.values())


def _run_cell(subject: Subject, report: CellReport, plain: Sequence[Output]) -> CellReport:
    laws = subject.laws(report.law)
    drafter = _drafter(subject, report.drafter, plain)
    drafted = _streams(subject, laws, drafter, report.batch)
    for one, other, law in zip(drafted, plain, laws, strict=True):
        report.add(one.stats)
        report.compare(subject.decoder, one, other, law)
    return report


def _streams(
    subject: Subject, laws: Sequence[SamplingParams], drafter: Drafter, batch: int
) -> list[Output]:
    """All prompts' answers, `batch` of them decoded together."""
    options = EngineOptions(
        max_batch=batch,
        reuse_prefix=False,
        graphs=not isinstance(drafter, Adversary),  # who thinks on the host
        batch_invariant=subject.batch_invariant,
    )
    draft = DraftOptions(num_draft_tokens=NODES, adaptive=False)
    with Engine(build(subject.decoder, subject.tokenizer, drafter, options, draft)) as engine:
        asked = zip(subject.prompts, laws, strict=True)
        ids = [engine.submit(prompt, law) for prompt, law in asked]
        return [engine.collect(request_id) for request_id in ids]


def _drafter(subject: Subject, guesser: str, plain: Sequence[Output]) -> Drafter:
    if guesser == NGRAM:
        capacity = max(BATCHES)
        device = subject.decoder.device
        kernels = kernels_of(device, batch_invariant=subject.batch_invariant)
        return NgramDrafter(DraftOptions(), capacity=capacity, device=device, kernels=kernels)
    known = [[*one.prompt_token_ids, *one.token_ids] for one in plain]
    vocab = subject.decoder.spec.vocab_size
    return Adversary(known, guesser, vocab=vocab, seed=subject.seed)

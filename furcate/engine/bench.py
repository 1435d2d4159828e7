"""Measures an engine on prompts, beside plain decoding of the same target in the same run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from furcate.config import SamplingParams
from furcate.engine.birth import birth
from furcate.engine.compare import Parting, parting
from furcate.engine.engine import Engine
from furcate.engine.outputs import Output, Stats
from furcate.engine.prompts import Message, PromptLine

__all__ = ["Answered", "Bench", "Side", "parting_json", "report", "summary"]

WARM_TOKENS = 32


@dataclass(slots=True)
class Side:
    """What one way of decoding did: all rounds together, and how long the decoding took.

    `seconds` is the wall clock of the calls less the time in which prompts were scored.
    """

    stats: Stats = field(default_factory=Stats)
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests per second of decoding."""
        return self.stats.tokens / self.seconds if self.seconds > 0 else 0.0

    def add(self, other: Side) -> None:
        """Count another stretch of the same way in."""
        self.stats = self.stats + other.stats
        self.seconds += other.seconds


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt's answers: under test, and plainly where a baseline ran."""

    prompt: PromptLine
    turn: int
    drafted: Output
    plain: Output | None
    parting: Parting | None  # None: the two are equal, or no baseline ran
    seconds: float  # this prompt's share of its group's decoding under test
    plain_seconds: float


class Bench:
    """Runs groups of prompts through an engine and its plain twin, one after the other.

    Both meet each group in turn, and take turns in going first, so that a machine that slows down
    or warms up does it to both.
    """

    def __init__(self, engine: Engine, plain: Engine | None, params: SamplingParams) -> None:
        self.engine = engine
        self.plain = plain
        self.params = params
        self._plain_first = False

    def warm_up(self, prompt: PromptLine) -> None:
        """Decode a few tokens that are not counted: first calls pay for allocation and probing."""
        few = self.params.model_copy(update={"max_tokens": WARM_TOKENS, "min_tokens": 0})
        for engine in self._engines():
            engine.warm_up(self.params)
            _run(engine, [prompt.opening], few)

    def run(self, prompts: Sequence[PromptLine], batch: int) -> Iterator[Answered]:
        """Answers in order, `batch` prompts decoded together; later turns follow the answers."""
        for start in range(0, len(prompts), batch):
            yield from self._group(prompts[start : start + batch])

    def _group(self, prompts: Sequence[PromptLine]) -> Iterator[Answered]:
        talks = [list(prompt.opening) for prompt in prompts]
        for turn in range(max(len(prompt.later) for prompt in prompts) + 1):
            at = [i for i, prompt in enumerate(prompts) if len(prompt.later) >= turn]
            asked = [talks[i] for i in at]
            if self._plain_first:  # who goes second finds a warmer machine
                plain, plain_seconds = self._baseline(asked)
                drafted, seconds = _run(self.engine, asked, self.params)
            else:
                drafted, seconds = _run(self.engine, asked, self.params)
                plain, plain_seconds = self._baseline(asked)
            self._plain_first = not self._plain_first
            for k, i in enumerate(at):
                part = self._parting(drafted[k], plain[k])
                share = (seconds / len(at), plain_seconds / len(at))
                yield Answered(prompts[i], turn, drafted[k], plain[k], part, *share)
                if turn < len(prompts[i].later):
                    talks[i] += _followed(drafted[k].text, prompts[i].later[turn])

    def _baseline(
        self, asked: Sequence[Sequence[Message]]
    ) -> tuple[Sequence[Output | None], float]:
        if self.plain is None:
            return [None] * len(asked), 0.0
        return _run(self.plain, asked, self.params)

    def _parting(self, drafted: Output, plain: Output | None) -> Parting | None:
        return None if plain is None else parting(self.engine, drafted, plain, self.params)

    def _engines(self) -> list[Engine]:
        return [self.engine] if self.plain is None else [self.engine, self.plain]


def report(engine: Engine, answers: Sequence[Answered], asked: Mapping[str, Any]) -> dict[str, Any]:
    """All of a run's figures with where they were born, as a JSON object.

    `by_category` repeats them for each category that the prompt file names.
    """
    groups: dict[str, list[Answered]] = {}
    for one in answers:
        if one.prompt.category is not None:
            groups.setdefault(one.prompt.category, []).append(one)
    by_category = {name: summary(group) for name, group in groups.items()}
    born = birth(engine.built.round.target.decoder.device)
    backend = engine.backend()
    return {**summary(answers), "by_category": by_category, **asked, **backend, **born}


def summary(answers: Sequence[Answered]) -> dict[str, Any]:
    """The figures of `furcate bench`, as a JSON object.

    `tokens_per_round` counts the bonus token, `mean_levels` the levels of a round's draft (0 where
    there was none). `conditional_acceptance_by_depth[d]` is the share accepted of the rounds in
    which the accepted path of length d had a child to try, `marginal_acceptance_by_depth[d]` the
    share of all rounds whose path was longer than d.
    """
    drafted, plain = Side(), Side()
    for one in answers:
        drafted.add(Side(one.drafted.stats, one.seconds))
        if one.plain is not None:
            plain.add(Side(one.plain.stats, one.plain_seconds))
    return {
        "prompts": len(answers),
        "tokens": drafted.stats.tokens,
        "rounds": drafted.stats.rounds,
        "mean_levels": drafted.stats.mean_levels,
        "drafted": drafted.stats.drafted,
        "accepted": drafted.stats.accepted,
        "tokens_per_round": drafted.stats.tokens_per_round,
        "conditional_acceptance_by_depth": drafted.stats.conditional_acceptance_by_depth,
        "marginal_acceptance_by_depth": drafted.stats.marginal_acceptance_by_depth,
        "tokens_per_second": drafted.tokens_per_second,
    } | _against(drafted, plain, answers)


def parting_json(part: Parting) -> dict[str, Any]:
    """A parting as a JSON object; a gap without bound is null."""
    return asdict(part) | {"gap": part.gap if isfinite(part.gap) else None}


def _against(drafted: Side, plain: Side, answers: Sequence[Answered]) -> dict[str, Any]:
    """The comparison with plain decoding; all None where it did not run."""
    if not any(one.plain is not None for one in answers):
        keys = ("baseline_tokens_per_second", "speedup", "identical", "differences")
        return dict.fromkeys(keys)
    speed, baseline = drafted.tokens_per_second, plain.tokens_per_second
    parted = [(one, one.parting) for one in answers if one.parting is not None]
    return {
        "baseline_tokens_per_second": baseline,
        "speedup": speed / baseline if baseline > 0 else None,
        "identical": not parted,
        "differences": [
            {"line": one.prompt.line, "turn": one.turn, **parting_json(part)}
            for one, part in parted
        ],
    }


def _run(
    engine: Engine, asked: Sequence[Sequence[Message]], params: SamplingParams
) -> tuple[list[Output], float]:
    """Answers of a group decoded together, and the seconds of decoding."""
    prompts = [_encoded(engine, talk) for talk in asked]
    began = time.perf_counter()
    ids = [engine.submit(prompt, params) for prompt in prompts]
    outputs = [engine.collect(request_id) for request_id in ids]
    taken = time.perf_counter() - began
    scored = sum(choice.stats.prefill_seconds for output in outputs for choice in output.choices)
    return outputs, taken - scored


def _encoded(engine: Engine, talk: Sequence[Message]) -> list[int]:
    """A lone user's turn goes as text, which a model without a chat template takes too."""
    if len(talk) == 1 and talk[0]["role"] == "user":
        return engine.encode(talk[0]["content"])
    return engine.encode(list(talk))


def _followed(answer: str, question: str) -> list[Message]:
    return [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]

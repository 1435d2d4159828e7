"""Speculation and plain decoding emit the same tokens: a grid of laws, drafters and batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny_engine import VOCAB, decoder, prompt_of, tokenizer

from furcate.config import SamplingParams
from furcate.drafters import adversary
from furcate.engine.compare import explain, first_difference
from furcate.engine.naive import Judge, naive
from furcate.engine.outputs import Output
from furcate.models.load import load_decoder
from furcate.prove.evidence import FREQUENT
from furcate.prove.grid import BATCHES, PROMPTS, SETTINGS, params_of
from furcate.prove.streams import (
    GUESSERS,
    CellReport,
    Subject,
    plain_streams,
    pooled,
    run_setting,
)
from furcate.text.tokenizer import load_tokenizer

TINY_TOKENS = 100_000
EMBEDDED_TOKENS = 3_000
PER_STREAM = 54
TINY_CELL = PER_STREAM * len(PROMPTS)  # tokens of a drafter at a batch, unless stop ids end them
SHORTEST = 12  # what min_tokens of the grid asks for
BARRED = "everything"  # the law with min_tokens


@cache
def tiny_subject() -> Subject:
    prompts = [prompt_of(12 + 3 * i, seed=i) for i in range(len(PROMPTS))]
    return Subject(decoder(), tokenizer(), prompts, PER_STREAM, stop_ids=tiny_stop_ids(prompts))


def tiny_stop_ids(prompts: list[list[int]]) -> list[int]:
    """What plain decoding says most often where the law with min_tokens would bar it."""
    said = Counter[int]()
    for seed, prompt in enumerate(prompts):
        said.update(naive(decoder(), prompt, params_of(BARRED, seed, SHORTEST)))
    return [token for token, _ in said.most_common(8)]


@cache
def tiny_plain(setting: str) -> list[Output]:
    return plain_streams(tiny_subject(), setting)


@cache
def tiny_reports(setting: str) -> list[CellReport]:
    return run_setting(tiny_subject(), setting, tiny_plain(setting))


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_token_of_a_small_model_changes_in_float64(setting: str) -> None:
    for report in tiny_reports(setting):
        assert report.partings == [], report.cell
        assert report.tokens == TINY_CELL or setting == BARRED, "what stop ids end is shorter"
    for report in pooled(tiny_reports(setting)):
        assert report.idle == [], report.cell


@pytest.mark.parametrize("setting", SETTINGS)
def test_plain_decoding_itself_is_the_slow_loops(setting: str) -> None:
    subject = tiny_subject()
    asked = zip(subject.prompts, subject.laws(setting), strict=True)
    judged = [tuple(naive(decoder(), p, law, law.stop_token_ids)) for p, law in asked]
    assert [one.token_ids for one in tiny_plain(setting)] == judged


def test_that_grid_compares_a_hundred_thousand_tokens() -> None:
    """Told by the size of its cells: no process has to have walked all of them."""
    cells = len(GUESSERS) * len(BATCHES) * len(SETTINGS.keys() - {BARRED})
    assert cells * TINY_CELL >= TINY_TOKENS


def test_every_drafter_has_a_row_of_its_own() -> None:
    rows = [(report.drafter, report.batch) for report in tiny_reports("greedy")]
    assert rows == [(guesser, batch) for batch in BATCHES for guesser in GUESSERS]
    assert sum(report.tokens for report in pooled(tiny_reports("greedy"))) == sum(
        report.tokens for report in tiny_reports("greedy")
    )


def test_min_tokens_of_the_grid_bars_stop_ids_that_would_have_come() -> None:
    subject = tiny_subject()
    laws = subject.laws(BARRED)
    streams = tiny_plain(BARRED)
    assert all(len(one.token_ids) > SHORTEST for one in streams)
    assert any(one.finish_reason == "stop" for one in streams)
    free = [law.model_copy(update={"min_tokens": 0}) for law in laws]
    asked = zip(subject.prompts, free, strict=True)
    lengths = [len(naive(decoder(), p, law, law.stop_token_ids)) for p, law in asked]
    assert min(lengths) <= SHORTEST


@pytest.mark.usefixtures("all_cores")
@pytest.mark.timeout(900)  # thousands of tokens of a real model
def test_streams_of_the_embedded_model_part_at_rounding_ties_alone(embedded_model: Path) -> None:
    target = load_decoder(embedded_model, torch.float32, torch.device("cpu"))
    target.pack()
    words = load_tokenizer(embedded_model)
    prompts = [words.chat_ids([{"role": "user", "content": text}]) for text in PROMPTS[:5]]
    ends = [words.encode(text, special=False)[-1] for text in FREQUENT]
    # 35 tokens: 3,000 even if every stream of the law with min_tokens ends as soon as it may
    subject = Subject(target, words, prompts, 35, guessers=("bushy", "twins"), stop_ids=ends)
    settings = ("greedy", "T 0.7", "all filters", "everything", "greedy, penalties")
    plain = {setting: plain_streams(subject, setting) for setting in settings}
    reports = [
        report for law, streams in plain.items() for report in run_setting(subject, law, streams)
    ]
    # elsewhere n-grams find next to nothing, and their rounds are plain ones
    ngram = replace(subject, guessers=("ngram",))
    reports += run_setting(ngram, "greedy", plain["greedy"])
    assert sum(report.tokens for report in reports) >= EMBEDDED_TOKENS
    assert [part for report in reports for part in report.partings if not part.tie] == []
    # at most 1 in 20,000 is allowed over the long run; two of 3,000 would be far outside of it
    assert sum(report.ties for report in reports) <= 1
    # bushy trees leave the likeliest path some ten times a cell, whatever the model
    assert [(report.cell, report.idle) for report in pooled(reports) if report.idle] == []


def test_a_stream_with_one_wrong_token_is_found_and_is_no_tie() -> None:
    law = params_of("T 1", seed=3, max_tokens=20)
    right = naive(decoder(), prompt_of(9), law)
    wrong = [*right[:7], (right[7] + 1) % VOCAB, *right[8:]]
    index = first_difference(wrong, right)
    assert index == 7
    part = explain(Judge(decoder(), prompt_of(9), law), wrong, right, index)
    assert not part.tie
    assert part.gap > 1e-3


def test_a_token_that_a_filter_bars_is_no_tie_and_one_at_its_threshold_is() -> None:
    prompt = prompt_of(9)
    bare = SamplingParams(temperature=1, seed=5, max_tokens=1)
    logits_V = Judge(decoder(), prompt, bare).next_logits()[0, 0]
    order = logits_V.argsort(descending=True)
    second, third = int(order[1]), int(order[2])
    mass = float(logits_V.softmax(-1)[order[:2]].sum())

    def bars_third(top_p: float) -> bool:
        law = bare.model_copy(update={"top_p": top_p})
        part = explain(Judge(decoder(), prompt, law), [third], [second], 0)
        return part.gap == torch.inf

    assert bars_third(mass - 1e-3)
    assert not bars_third(mass - 1e-5)


def test_the_grid_reaches_every_shape_of_tree() -> None:
    # "nothing" drafts no node, so it is met within "any" alone
    assert set(GUESSERS) - {"ngram"} == set(adversary.SHAPES) - {"nothing"}

"""Speculation and plain decoding emit the same tokens: a grid of laws, drafters and batches."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from tiny_engine import VOCAB, decoder, prompt_of, tokenizer

from furcate.config import SamplingParams
from furcate.drafters import adversary
from furcate.engine.compare import explain, first_difference
from furcate.engine.naive import Judge, naive
from furcate.models.load import load_decoder
from furcate.prove.grid import PROMPTS, SETTINGS, params_of
from furcate.prove.streams import GUESSERS, CellReport, Subject, run_setting
from furcate.text.tokenizer import load_tokenizer

TINY_TOKENS = 100_000
EMBEDDED_TOKENS = 3_000
PER_STREAM = -(-TINY_TOKENS // (2 * len(SETTINGS) * len(GUESSERS) * len(PROMPTS)))


@cache
def tiny_reports(setting: str) -> list[CellReport]:
    prompts = [prompt_of(12 + 3 * i, seed=i) for i in range(len(PROMPTS))]
    return run_setting(Subject(decoder(), tokenizer(), prompts, PER_STREAM), setting)


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_token_of_a_small_model_changes_in_float64(setting: str) -> None:
    for report in tiny_reports(setting):
        assert report.partings == [], report.cell
        assert report.accepted > 0, report.cell
        assert report.rejected > 0, report.cell
        assert report.off_likeliest_path > 0, report.cell


def test_that_grid_compares_a_hundred_thousand_tokens() -> None:
    compared = sum(report.tokens for setting in SETTINGS for report in tiny_reports(setting))
    assert compared >= TINY_TOKENS


@pytest.mark.usefixtures("all_cores")
def test_streams_of_the_embedded_model_part_at_rounding_ties_alone(embedded_model: Path) -> None:
    target = load_decoder(embedded_model, torch.float32, torch.device("cpu"))
    target.pack()
    words = load_tokenizer(embedded_model)
    prompts = [words.chat_ids([{"role": "user", "content": text}]) for text in PROMPTS[:5]]
    subject = Subject(target, words, prompts, max_tokens=30, guessers=("ngram", "bushy"))
    settings = ("greedy", "T 0.7", "all filters", "everything", "greedy, penalties")
    reports = [report for setting in settings for report in run_setting(subject, setting)]
    assert sum(report.tokens for report in reports) >= EMBEDDED_TOKENS
    assert [part for report in reports for part in report.partings if not part.tie] == []
    # at most 1 in 20,000 is allowed over the long run; two of 3,000 would be far outside of it
    assert sum(report.ties for report in reports) <= 1
    assert all(report.accepted and report.rejected for report in reports)


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
    assert set(GUESSERS) - {"ngram"} <= set(adversary.SHAPES)

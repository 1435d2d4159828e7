"""Evaluation prompts stay out of what is trained on, and the openers are none of theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from furcate.engine.prompts import read_prompts
from furcate.train.held_away import HeldAway
from furcate.train.openers import FOLLOW_UPS, OPENERS, SYSTEMS

DEV = Path(__file__).parent.parent / "benchmarks" / "data" / "spec_bench_dev.jsonl"
LONG = "In a survey of nine villages, seven people out of ten said that they like rain."


@pytest.fixture(scope="module")
def held() -> HeldAway:
    return HeldAway.read([DEV])


def test_every_evaluation_prompt_is_known_whole(held: HeldAway) -> None:
    for prompt in read_prompts(DEV, all_turns=True):
        for turn in (prompt.opening[0]["content"], *prompt.later):
            assert held.within(turn) is not None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (LONG, True),
        ("Tell me: " + LONG.upper().replace(",", " -"), True),
        ("A survey of nine villages, seven people in", False),
        ("Of nine villages, seven people out of ten, I hear, said that", True),
        ("seven people out of ten like rain", False),
        ("Who wrote  it?", True),
        ("Tell me who wrote it?", False),
        ("", False),
    ],
)
def test_eight_words_in_a_row_or_a_whole_short_prompt_tell(text: str, found: bool) -> None:
    held = HeldAway([LONG, "who wrote it", "!"])
    assert (held.within(text) is not None) is found


def test_no_opener_is_taken_from_an_evaluation_prompt(held: HeldAway) -> None:
    ours = [opener.text for opener in OPENERS]
    for text in (*ours, *FOLLOW_UPS, *SYSTEMS):
        assert held.within(text) is None
    prompts = [_words(p.opening[0]["content"]) for p in read_prompts(DEV)]
    for text in (text for text in ours if len(_words(text)) >= 4):
        assert not any(prompt[: len(_words(text))] == _words(text) for prompt in prompts), text


def test_the_check_on_openers_can_fail(held: HeldAway) -> None:
    borrowed = read_prompts(DEV)[0].opening[0]["content"]
    assert held.within("Please do this. " + borrowed[:80]) is not None


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())

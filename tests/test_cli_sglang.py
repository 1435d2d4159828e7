"""SGLang's flags on the command line become furcate's own."""

from __future__ import annotations

import pytest

from furcate.cli.sglang import own_words
from furcate.errors import BadRequest, Unsupported


def test_a_line_without_such_flags_stays_as_it_is() -> None:
    words = ["generate", "hi", "--nodes", "3", "--speculative-config", "{}"]
    assert own_words(words) == words


def test_flags_are_translated_and_the_root_is_taken_off() -> None:
    words = ["generate", "--speculative-algorithm", "NGRAM", "hi"]
    words += ["--speculative-num-draft-tokens=8", "--speculative-num-steps", "3", "-q"]
    want = ["generate", "hi", "-q", "--drafter", "ngram", "--nodes", "7", "--depth", "3"]
    assert own_words(words) == want


def test_a_switch_takes_no_word_from_its_neighbour() -> None:
    assert own_words(["generate", "--speculative-adaptive", "hi"]) == [
        "generate",
        "hi",
        "--adaptive",
    ]


def test_what_follows_two_dashes_is_text() -> None:
    words = ["generate", "--speculative-num-steps", "3", "--", "--speculative-num-steps"]
    want = ["generate", "--depth", "3", "--", "--speculative-num-steps"]
    assert own_words(words) == want


def test_a_head_goes_with_the_kind_that_its_algorithm_names() -> None:
    words = ["generate", "--speculative-algorithm", "EAGLE3", "hi"]
    words += ["--speculative-draft-model-path", "dir", "--speculative-num-draft-tokens", "16"]
    who = '{"method": "eagle3", "model": "dir"}'
    assert own_words(words) == ["generate", "hi", "--speculative-config", who, "--nodes", "15"]
    kept = ["generate", "hi", "--speculative-config", '{"method": "mtp"}']
    assert own_words(["generate", "--speculative-algorithm", "NEXTN", "hi"]) == kept


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
@pytest.mark.parametrize("own", [["--drafter", "off"], ["-doff"], ["--speculative-config={}"]])
def test_who_drafts_is_said_once(own: list[str], algorithm: str) -> None:
    with pytest.raises(BadRequest, match="given under SGLang's name too"):
        own_words(["generate", "hi", "--speculative-algorithm", algorithm, *own])
    sizes = ["generate", "hi", "--speculative-num-steps", "3", *own]
    assert own_words(sizes) == ["generate", "hi", *own, "--depth", "3"]


def test_a_lossy_threshold_is_refused() -> None:
    with pytest.raises(Unsupported, match="--speculative-accept-threshold-single"):
        own_words(["generate", "hi", "--speculative-accept-threshold-single", "0.9"])
    with pytest.raises(BadRequest, match="needs a value"):
        own_words(["generate", "--speculative-num-steps="])

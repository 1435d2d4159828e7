"""Streaming text: whole characters only, and joined it is the decoded whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vocab import id_of, tokens, write_fallback_folder, write_folder

from furcate.text.detokenizer import Detokenizer
from furcate.text.tokenizer import Tokenizer, load_tokenizer

BYTES = st.sampled_from([b"\xf0\x9f\x91\xa9", b"\xe2\x80\x8d", b"\xc3\xa9", b"a", b" ", b"\xff"])


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    write = {"byte_level": write_folder, "byte_fallback": write_fallback_folder}[request.param]
    return load_tokenizer(write(tmp_path_factory.mktemp("model")))


def stream(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, len(tokens()) + 2), max_size=40), st.booleans())
@settings(max_examples=500, deadline=None)
def test_pieces_joined_are_the_decoded_whole(
    tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special=skip)


@given(st.lists(BYTES, max_size=12))
@settings(max_examples=300, deadline=None)
def test_bytes_that_come_one_by_one_join_to_the_decoded_whole(
    tokenizer: Tokenizer, parts: list[bytes]
) -> None:
    spelled = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [spelled[bytes([b])] for b in b"".join(parts)]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
@settings(max_examples=300, deadline=None)
def test_no_piece_is_ever_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "").replace("▁", "")
    ids = tokenizer.encode(text, special=False)
    pieces = stream(tokenizer, ids)
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text


def test_a_character_in_four_tokens_appears_with_the_last(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path))
    assert stream(tokenizer, tokenizer.encode("👩!")) == ["", "", "", "👩", "!", ""]


def test_an_unfinished_character_shows_at_the_end_only(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path))
    assert stream(tokenizer, tokenizer.encode("👩")[:-1]) == ["", "", "", "\ufffd"]


def test_a_mark_inside_a_character_does_not_join_what_it_parts(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path))
    first, second = (tokens().index(char) for char in "Ã©")
    assert stream(tokenizer, [first, 2, second], skip_special=False)[1] == "\ufffd<|im_end|>"
    assert "".join(stream(tokenizer, [first, 2, second])) == "é"


def test_only_the_first_space_of_the_text_is_dropped(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_fallback_folder(tmp_path))
    space = id_of(tokenizer, "▁")
    assert "".join(stream(tokenizer, [0, space, space, space])) == "  "

"""Stop strings in a stream: the same cut wherever the text is split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furcate.errors import BadRequest
from furcate.text.stops import StopMatch, StopMatcher

ALPHABET = "ab\n"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)
PIECES = st.lists(st.text(ALPHABET, max_size=4), max_size=12)


def plain(text: str, stops: list[str], include: bool) -> tuple[str, StopMatch | None]:
    """The rule in one line: the stop string that is complete first; of equals, the longest."""
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not ends:
        return text, None
    end, start, stop = min(ends)
    cut = end if include else start
    return text[:cut], StopMatch(stop, start, end, cut)


def stream(pieces: list[str], matcher: StopMatcher) -> tuple[str, StopMatch | None]:
    shown, match = "", None
    for piece in pieces:
        step = matcher.push(piece)
        shown, match = shown + step.text, step.match
    return shown + matcher.flush(), match


@given(PIECES, STOPS, st.booleans())
@settings(max_examples=1000, deadline=None)
def test_a_stream_is_cut_where_the_whole_text_would_be(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    matcher = StopMatcher(stops, include_in_output=include)
    assert stream(pieces, matcher) == plain("".join(pieces), stops, include)


@given(st.text(ALPHABET, max_size=9), STOPS)
@settings(max_examples=200, deadline=None)
def test_every_split_of_a_text_gives_the_same_cut(text: str, stops: list[str]) -> None:
    for split in range(2 ** max(len(text) - 1, 0)):
        pieces, begin = [], 0
        for i in range(1, len(text) + 1):
            if i == len(text) or split >> (i - 1) & 1:
                pieces.append(text[begin:i])
                begin = i
        assert stream(pieces, StopMatcher(stops)) == plain(text, stops, False)


@given(PIECES, STOPS)
@settings(max_examples=300, deadline=None)
def test_only_what_may_become_a_stop_string_is_held_back(
    pieces: list[str], stops: list[str]
) -> None:
    matcher, text, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        text += piece
        step = matcher.push(piece)
        shown += step.text
        if step.match:
            return
        held = text[len(shown) :]
        assert held == "" or any(s.startswith(held) and s != held for s in stops)


def test_looking_at_each_piece_alone_would_be_seen() -> None:
    alone = "".join(plain(piece, ["ab"], False)[0] for piece in ("xa", "b"))
    assert alone != plain("xab", ["ab"], False)[0] == stream(["xa", "b"], StopMatcher(["ab"]))[0]


def test_the_stop_string_that_ends_first_counts() -> None:
    assert stream(["abcd"], StopMatcher(["abcd", "bc"]))[1] == StopMatch("bc", 1, 3, 1)


def test_of_two_that_end_together_the_longest_counts() -> None:
    assert stream(["xab"], StopMatcher(["b", "ab"])) == ("x", StopMatch("ab", 1, 3, 1))


def test_positions_count_characters_of_the_whole_text() -> None:
    shown, match = stream(["é👩", "日S", "TOP!"], StopMatcher(["STOP"], include_in_output=True))
    assert (shown, match) == ("é👩日STOP", StopMatch("STOP", 3, 7, 7))


def test_nothing_is_shown_after_the_match() -> None:
    matcher = StopMatcher(["."])
    first = matcher.push("a.b")
    assert first.text == "a"
    assert matcher.push("more").text == ""
    assert matcher.push("more").match == first.match
    assert matcher.flush() == ""


def test_an_unarmed_matcher_lets_stop_strings_pass() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("xaby", armed=False).match is None
    assert matcher.push("ab").match == StopMatch("ab", 4, 6, 4)


def test_a_stop_string_that_begins_unarmed_and_ends_armed_counts() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.push("xab", armed=False).text == "x"
    assert matcher.push("c").match == StopMatch("abc", 1, 4, 1)


def test_a_stop_string_passed_unarmed_is_not_found_again() -> None:
    matcher = StopMatcher(["ab", "abc"])
    matcher.push("ab", armed=False)
    assert matcher.push("x").match is None
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadRequest) as err:
        StopMatcher(["a", ""])
    assert err.value.field == "stop"

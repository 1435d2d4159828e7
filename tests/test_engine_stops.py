"""Where an answer ends, and that tokens, text, logprobs, counts and pages all end there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Any

import pytest
from tiny_engine import EOS, FILL, Script, ids, prompt_of, tiny_engine, tokenizer, twins

from furcate.config import SamplingParams
from furcate.engine.engine import Engine
from furcate.engine.outputs import Choice
from furcate.kv.prefix import PrefixIndex

LETTERS = "abcdefgijkmnpqrstuvy"
STOP_ID = ids("Z")[0]
EVERY = {"off": 7, "ngram": 5, "twins": 3}  # how much of the matrix each drafter sees


class Stage:
    """One engine whose target says whatever the test wants to hear."""

    def __init__(self, drafter: str, **options: Any) -> None:
        self.script = Script([0])
        self.every = EVERY[drafter]
        self.drafter = twins([]) if drafter == "twins" else drafter
        self.engine: Engine = tiny_engine(self.drafter, target=self.script, **options)

    def play(self, words: Sequence[int], prompt: Sequence[int] = (), **params: Any) -> Choice:
        """What comes of `words`; by default they stand in the prompt too, for n-grams to find."""
        prompt = list(prompt) or [FILL, *words]
        self.script.say([*prompt, *words])
        if not isinstance(self.drafter, str):
            self.drafter.streams = [[*prompt, *words]]
        request_id = self.engine.submit(prompt, SamplingParams(temperature=0, **params))
        return self.engine.collect(request_id).choices[0]


@pytest.fixture(params=EVERY)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    made = Stage(request.param, max_context=256)
    yield made
    made.engine.close()


def one_by_one(words: Sequence[int], p: SamplingParams, room: int) -> tuple[list[int], str, str]:
    """The same rules told as plain decoding has them: (tokens, text, reason)."""
    stops = {*p.stop_token_ids, *(() if p.ignore_eos else (EOS,))}
    said: list[int] = []
    text = ""
    for word in [*words, *[FILL] * 300]:
        token = FILL if word in stops and len(said) < p.min_tokens else word
        said.append(token)
        if token in stops and not p.include_stop_str_in_output:
            return said, text, "stop"
        old, text = text, tokenizer().decode(said)
        found = [(text.find(s, max(0, len(old) - len(s) + 1)), s) for s in p.stop]
        ends = sorted((at + len(s), at) for at, s in found if at >= 0)
        if ends and len(said) > p.min_tokens:
            return said, text[: ends[0][0 if p.include_stop_str_in_output else 1]], "stop"
        if token in stops:
            return said, text, "stop"
        if len(said) == min(room, p.max_tokens or room):
            return said, text, "length"
    raise AssertionError("the room is finite")


def matrix() -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Streams of 14 tokens with a stop id, EOS and a stop string at any place or nowhere."""
    places = product((None, 2, 5), (None, 3, 6), (None, 1, 5), (3, 6, 7, None))
    options = product((0, 4), (False, True), (False, True))
    for (stop_at, eos_at, string_at, most), flags in product(places, options):
        least, ignore, include = flags
        if least > (most or least):
            continue
        words = ids(LETTERS[:14])
        if string_at is not None:
            words[string_at : string_at + 2] = ids("HI")
        if eos_at is not None:
            words[eos_at] = EOS
        if stop_at is not None:
            words[stop_at] = STOP_ID
        yield (
            words,
            {
                "stop": "HI",
                "stop_token_ids": (STOP_ID,),
                "max_tokens": most or 12,
                "min_tokens": least,
                "ignore_eos": ignore,
                "include_stop_str_in_output": include,
            },
        )


def test_every_rule_ends_the_answer_where_plain_decoding_would(stage: Stage) -> None:
    for words, asked in islice(matrix(), 0, None, stage.every):
        choice = stage.play(words, logprobs=True, **asked)
        want = one_by_one(words, SamplingParams(**asked), 256)
        assert (list(choice.token_ids), choice.text, choice.finish_reason) == want, (words, asked)
        assert choice.logprobs is not None
        assert tuple(entry.token_id for entry in choice.logprobs) == choice.token_ids
        assert choice.stats.tokens == len(choice.token_ids)


def test_the_matrix_meets_blocks_that_are_cut_in_the_middle() -> None:
    stage = Stage("twins")
    choice = stage.play(ids("abcHIdefg"), stop="HI", max_tokens=9)
    assert choice.text == "abc"
    assert choice.stats.rounds == 1, "five tokens of one round, all of them wanted"
    choice = stage.play(ids("abHIcdefg"), stop="HI", max_tokens=9)
    assert (choice.text, len(choice.token_ids), choice.stats.rounds) == ("ab", 4, 1)
    assert choice.stats.accepted == 4, "the round itself went further than the answer"


def test_a_stop_beyond_the_cap_is_never_seen(stage: Stage) -> None:
    words = [*ids("abcdef"), STOP_ID, *ids("gi")]
    choice = stage.play(words, stop_token_ids=(STOP_ID,), max_tokens=5)
    assert (choice.finish_reason, choice.stop_reason, choice.text) == ("length", None, "abcde")
    choice = stage.play(words, stop_token_ids=(STOP_ID,), max_tokens=7)
    assert (choice.finish_reason, choice.stop_reason, choice.text) == ("stop", STOP_ID, "abcdef")
    choice = stage.play(words, stop="fZ", stop_token_ids=(STOP_ID,), max_tokens=6)
    assert (choice.finish_reason, choice.text) == ("length", "abcdef"), "half a stop string is text"


def test_the_reason_names_what_ended_the_answer(stage: Stage) -> None:
    words = [*ids("ab"), EOS, *ids("cd")]
    assert stage.play(words).stop_reason is None
    assert stage.play(words).finish_reason == "stop"
    assert stage.play(words, stop=("x", "b")).stop_reason == "b"
    assert stage.play(words, stop_token_ids=ids("b")).stop_reason == ids("b")[0]
    first = stage.play(words, stop="ab", stop_token_ids=ids("a"))
    assert first.stop_reason == ids("a")[0], "what comes first counts"


@pytest.mark.parametrize("least", range(9))
def test_eos_is_barred_before_min_tokens_and_allowed_there(least: int) -> None:
    stage = Stage("twins")
    early = stage.play([EOS] * 12, prompt=ids("abc"), min_tokens=least, max_tokens=12)
    assert early.token_ids == (FILL,) * least + (EOS,)
    assert early.finish_reason == "stop"
    on_time = stage.play([*ids(LETTERS[:least]), EOS, *ids("no")], ids("abc"), min_tokens=least)
    assert on_time.token_ids == (*ids(LETTERS[:least]), EOS)


def test_min_tokens_counts_tokens_and_not_rounds() -> None:
    stage = Stage("twins")
    words = [*ids("abcdefg"), EOS]
    choice = stage.play(words, prompt=ids("k"), min_tokens=7, max_tokens=9)
    assert choice.token_ids == tuple(words)
    assert choice.stats.rounds <= 2, "five tokens a round, so rounds counted for tokens would show"


def test_stop_strings_wait_for_min_tokens(stage: Stage) -> None:
    words = ids("abXcXdXe")
    assert stage.play(words, stop="X", max_tokens=8).text == "ab"
    assert stage.play(words, stop="X", max_tokens=8, min_tokens=3).text == "abXc"
    assert stage.play(words, stop="X", max_tokens=8, min_tokens=5).text == "abXcXd"
    assert stage.play(words, stop="X", max_tokens=8, min_tokens=8).text == "abXcXdXe"


@pytest.mark.parametrize("stop", ["hello w", " w", "éh", "lo", "ow", "\ufffd"])
def test_a_stop_string_is_found_at_every_split_into_tokens(stage: Stage, stop: str) -> None:
    whole = "so hello wé hello"
    splits = [ids(whole), [i for c in whole for i in ids(c)]]
    splits += [[*ids(whole[:k]), *ids(whole[k:])] for k in (4, 5, 6, 7, 11)]
    for words, include in product(splits, (False, True)):
        asked = {"stop": stop, "max_tokens": len(words), "include_stop_str_in_output": include}
        choice = stage.play(words, **asked)
        at = whole.find(stop)
        want = whole if at < 0 else whole[: at + (len(stop) if include else 0)]
        assert choice.text == want
        assert choice.finish_reason == ("length" if at < 0 else "stop")
        end = next((k for k in range(len(words)) if stop in tokenizer().decode(words[:k])), None)
        assert at < 0 or list(choice.token_ids) == words[:end]


def test_text_that_may_become_a_stop_string_is_held_back_and_then_shown() -> None:
    stage = Stage("off")
    words = ids("abHHcH")
    stage.script.say([FILL, *words])
    params = SamplingParams(temperature=0, stop="HI", max_tokens=6)
    asked = stage.engine.submit([FILL], params)
    pieces = []
    while (piece := stage.engine.next_piece(asked)) is not None:
        pieces.append(piece)
    assert [piece.text for piece in pieces] == ["a", "b", "", "H", "Hc", "H"]
    assert [piece.finish_reason for piece in pieces] == [None] * 5 + ["length"]
    assert all(len(piece.token_ids) == 1 for piece in pieces), "tokens are not held back"


def published(index: PrefixIndex) -> list[tuple[int, ...]]:
    """Every token sequence that some path of the index spells."""
    found: list[tuple[int, ...]] = []
    open_ = [(root, ()) for root in index._roots.values()]
    while open_:
        entry, before = open_.pop()
        found.append(before)
        open_ += [(below, before + part) for part, below in entry.below.items()]
    return found


def test_nothing_past_the_stop_is_cached(stage: Stage) -> None:
    words = ids("abHI" + LETTERS)
    for stop in ({"stop": "HI"}, {"stop_token_ids": ids("I")}, {"max_tokens": 4}):
        book = stage.engine.built.scheduler.book
        book.prefixes.clear()
        prompt = prompt_of(17)
        choice = stage.play(words, prompt=prompt, **stop)
        assert list(choice.token_ids) == words[:4]
        longest = max(published(book.prefixes), key=len)
        assert list(longest) == [*prompt, *words[:3]], "the last token's keys are not there yet"
        assert book.prefixes.held == book.pages_for(20) == book.pool.count - book.pool.free


@pytest.mark.parametrize("left", range(1, 8))
def test_the_end_of_the_context_ends_the_answer(stage: Stage, left: int) -> None:
    prompt = prompt_of(256 - left)
    book = stage.engine.built.scheduler.book
    free = book.pool.free
    choice = stage.play(ids(LETTERS), prompt=prompt)
    assert choice.token_ids == tuple(ids(LETTERS)[:left])
    assert choice.finish_reason == "length"
    book.prefixes.clear()
    assert book.pool.free == free


def test_a_stop_id_at_the_very_end_of_the_context_is_a_stop(stage: Stage) -> None:
    choice = stage.play([*ids("ab"), EOS, *ids("cd")], prompt=prompt_of(253))
    assert (choice.finish_reason, choice.token_ids[-1], choice.text) == ("stop", EOS, "ab")


def test_special_tokens_are_text_only_where_asked(stage: Stage) -> None:
    words = [*ids("a"), 0, *ids("b"), EOS]
    assert stage.play(words).text == "ab"
    shown = stage.play(words, skip_special_tokens=False, include_stop_str_in_output=True)
    assert shown.text == "a<|endoftext|>b<|im_end|>"

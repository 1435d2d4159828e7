"""Filling a corpus: from the target itself, resumed, and from files; prompts kept away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_engine import decoder, tokenizer

from furcate.errors import BadFile, BadRequest
from furcate.train import gather
from furcate.train.corpus import About, Corpus, Kind
from furcate.train.gather import Gathered, GivenText, OwnText, Source
from furcate.train.held_away import HeldAway
from furcate.train.talk import Scripts, TalkRecipe
from furcate.train.writer import CorpusWriter

NOTHING = HeldAway([])
RECIPE = TalkRecipe(context=96, most_user=12, most_passage=20, most_answer=24, opened=0.2)
TALK = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello world"},
]


def _own(held: HeldAway = NOTHING, tokens: int = 900, batch: int = 8) -> OwnText:
    return OwnText(decoder(), Scripts(tokenizer(), RECIPE), held, tokens, batch)


def _about(source: Source) -> About:
    spec = decoder().spec
    return About("tiny", tokenizer().fingerprint(), spec.vocab_size, source.recipe())


def _filled(source: Source, path: Path) -> Gathered:
    with CorpusWriter(path, _about(source)) as writer:
        done = source.fill(writer, lambda _: None)
        writer.finish()
    return done


def _texts(path: Path) -> dict[int, list[int]]:
    corpus = Corpus.open(path)
    numbered = zip(corpus.index.number, corpus, strict=True)
    return {int(number): talk.tokens.tolist() for number, talk in numbered}


def test_the_target_writes_as_much_as_is_wanted(tmp_path: Path) -> None:
    told: list[int] = []
    source = _own()
    with CorpusWriter(tmp_path, _about(source)) as writer:
        done = source.fill(writer, told.append)
    corpus = Corpus.open(tmp_path)
    assert 900 <= len(corpus.tokens) == writer.tokens <= 900 + 8 * 96
    assert (done.written, done.held_away) == (len(corpus), 0)
    assert told == sorted(told)
    assert told[-1] == done.made_tokens >= writer.tokens


def test_parts_are_what_was_sampled(tmp_path: Path) -> None:
    _filled(_own(), tmp_path)
    scripts, corpus = Scripts(tokenizer(), RECIPE), Corpus.open(tmp_path)
    for number, talk in zip(corpus.index.number, corpus, strict=True):
        planned = scripts[int(number)]
        assert [part.kind for part in talk.parts] == list(planned.kinds[: len(talk.parts)])
        feed = planned.script.stages[0].feed
        assert talk.tokens[: talk.parts[0].start].tolist() == list(feed)
        for part, stage in zip(talk.parts, planned.script.stages, strict=False):
            assert part.end - part.start <= stage.most
        assert all(part.kind is Kind.ANSWER for part in talk.spans)


def test_an_interrupted_writing_goes_on_with_the_same_conversations(tmp_path: Path) -> None:
    _filled(_own(tokens=1500), tmp_path / "whole")

    def stop(tokens: int) -> None:
        if tokens > 1200:
            raise KeyboardInterrupt

    source = _own(tokens=1500)
    with pytest.raises(KeyboardInterrupt), CorpusWriter(tmp_path / "a", _about(source)) as writer:
        source.fill(writer, stop)
    before = _texts(tmp_path / "a")
    _filled(_own(tokens=1500, batch=3), tmp_path / "a")  # another batch changes no text
    whole, again = _texts(tmp_path / "whole"), _texts(tmp_path / "a")
    assert 0 < len(before) < len(again)
    assert before.items() <= again.items()
    common = whole.keys() & again.keys()
    assert len(common) > 10
    assert all(whole[number] == again[number] for number in common)
    assert sum(map(len, again.values())) >= 1500


def test_what_the_target_asks_may_not_be_an_evaluation_prompt(tmp_path: Path) -> None:
    _filled(_own(), tmp_path / "all")
    corpus, wrap = Corpus.open(tmp_path / "all"), Scripts(tokenizer(), RECIPE).wrap
    talk = corpus[2]
    before = tokenizer().decode(talk.tokens[: talk.spans[0].start].tolist(), skip_special=False)
    turn = wrap.turn_before(before)
    held = HeldAway([turn + " and seven words more than it already had"])
    assert held.within(turn + " and seven words more than it already had") is not None
    held = HeldAway([turn])
    done = _filled(_own(held), tmp_path / "less")
    assert done.held_away >= 1
    assert int(corpus.index.number[2]) not in _texts(tmp_path / "less")
    assert len(Corpus.open(tmp_path / "less").tokens) >= 900


def test_a_context_without_room_for_an_answer_is_refused(tmp_path: Path) -> None:
    scripts = Scripts(tokenizer(), TalkRecipe(context=8))
    with pytest.raises(BadRequest, match=r"--data-context: .* 8 tokens"):
        _filled(OwnText(decoder(), scripts, NOTHING, 100, 4), tmp_path)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no"), BadRequest("no room", field="batch", value=8)],
)
def test_a_device_that_is_too_small_says_what_to_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(gather, "write", full)
    with pytest.raises(BadRequest, match=r"--write-batch: .*lower it"):
        _filled(_own(), tmp_path)


def _given(path: Path, *lines: object, held: HeldAway = NOTHING, **limits: Any) -> GivenText:
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    sizes = {"context": 64, "tokens": None} | limits
    return GivenText(path, tokenizer(), held, sizes["context"], sizes["tokens"])


def test_a_file_becomes_tokens(tmp_path: Path) -> None:
    lines = [{"messages": TALK}, {"conversations": TALK}]
    source = _given(tmp_path / "a.jsonl", *lines)
    assert _filled(source, tmp_path / "text") == Gathered(made_tokens=56, written=2)
    corpus = Corpus.open(tmp_path / "text")
    assert corpus.index.number.tolist() == [1, 2]
    assert [part.kind for part in corpus[0].parts] == [Kind.ANSWER]
    again = _given(tmp_path / "a.jsonl", *lines)
    assert _filled(again, tmp_path / "text") == Gathered()
    assert len(Corpus.open(tmp_path / "text")) == 2


def test_reading_stops_at_the_tokens_wanted(tmp_path: Path) -> None:
    source = _given(tmp_path / "a.jsonl", *[{"messages": TALK}] * 9, tokens=50)
    assert 1 <= _filled(source, tmp_path / "text").written < 9


def test_long_and_evaluated_conversations_are_left_out_and_counted(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "a b c d " * 30}, TALK[1]]
    held = HeldAway(["Hello!"])
    source = _given(
        tmp_path / "a.jsonl", {"messages": TALK}, {"messages": long}, held=held, context=64
    )
    done = _filled(source, tmp_path / "text")
    assert (done.written, done.held_away, done.too_long) == (0, 1, 1)
    with pytest.raises(BadFile, match="no answer"):
        Corpus.open(tmp_path / "text")


def test_a_conversation_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    bad = [*TALK, {"role": "user", "content": "\ud800"}, TALK[1]]
    source = _given(tmp_path / "a.jsonl", {"messages": TALK}, {"messages": bad})
    with pytest.raises(BadFile, match=r"a.jsonl line 2: .*surrogate"):
        _filled(source, tmp_path / "text")
    assert len(Corpus.open(tmp_path / "text")) == 1


def test_another_file_of_the_same_name_is_another_recipe(tmp_path: Path) -> None:
    _filled(_given(tmp_path / "a.jsonl", {"messages": TALK}), tmp_path / "text")
    other = _given(tmp_path / "a.jsonl", {"messages": [*TALK, *TALK]})
    with pytest.raises(BadRequest, match="sha256"):
        _filled(other, tmp_path / "text")

"""The corpus on disk: what is written comes back, and interruptions lose only the last stretch."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from furcate.errors import BadFile, BadRequest, StorageFailed
from furcate.train import writer as writing
from furcate.train.corpus import ABOUT, INDEX, TOKENS, About, Corpus, Kind, Part, id_dtype
from furcate.train.counts import answer_counts, frequent
from furcate.train.writer import CorpusWriter

ABOUT_IT = About("tiny", "f" * 64, 300, {"kind": "self", "seed": 0})
ANSWER = [Part(1, 3, Kind.ANSWER)]


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    parts = [Part(1, 3, Kind.USER), Part(4, 6, Kind.ANSWER), Part(7, 8, Kind.ANSWER)]
    with CorpusWriter(tmp_path, ABOUT_IT) as writer:
        writer.add(7, [5, 6, 7, 8, 9, 10, 11, 299], parts)
        writer.add(3, [1, 2, 3], ANSWER)
        writer.finish()
    corpus = Corpus.open(tmp_path, fingerprint="f" * 64)
    assert len(corpus) == 2
    assert corpus.about == replace(ABOUT_IT, complete=True)
    first, second = corpus
    assert first.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11, 299]
    assert first.parts == tuple(parts)
    assert first.spans == tuple(parts[1:])
    assert second.tokens.tolist() == corpus[-1].tokens.tolist() == [1, 2, 3]
    assert corpus.lengths.tolist() == [8, 3]
    assert corpus.index.number.tolist() == [7, 3]
    assert (corpus.answer_tokens, writer.answer_tokens, writer.tokens) == (5, 5, 11)
    with pytest.raises(IndexError):
        corpus[2]


@pytest.mark.parametrize(("vocab", "size"), [(300, 2), (65536, 2), (65537, 4)])
def test_a_token_takes_two_bytes_while_they_are_enough(
    tmp_path: Path, vocab: int, size: int
) -> None:
    with CorpusWriter(tmp_path, replace(ABOUT_IT, vocab_size=vocab)) as writer:
        writer.add(0, [1, vocab - 1, 2], ANSWER)
    assert (tmp_path / TOKENS).stat().st_size == 3 * size
    assert id_dtype(vocab).itemsize == size
    assert Corpus.open(tmp_path)[0].tokens.tolist() == [1, vocab - 1, 2]


def test_leaving_in_the_middle_keeps_all_that_was_added(tmp_path: Path) -> None:
    writer = CorpusWriter(tmp_path, ABOUT_IT)
    with pytest.raises(KeyboardInterrupt), writer:
        _add_and_stop(writer)
    assert not Corpus.open(tmp_path).about.complete
    again = CorpusWriter(tmp_path, ABOUT_IT)
    assert (again.done, again.tokens, again.answer_tokens) == ({0}, 3, 2)


def _add_and_stop(writer: CorpusWriter) -> None:
    writer.add(0, [1, 2, 3], ANSWER)
    raise KeyboardInterrupt


def test_a_half_written_tail_is_cut_off(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path, ABOUT_IT) as writer:
        writer.add(0, [1, 2, 3], ANSWER)
    with (tmp_path / TOKENS).open("ab") as file:
        file.write(b"\x07" * 5)
    assert Corpus.open(tmp_path).tokens.tolist() == [1, 2, 3]
    with CorpusWriter(tmp_path, ABOUT_IT) as writer:
        writer.add(1, [4, 5, 6], ANSWER)
    assert Corpus.open(tmp_path).tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / TOKENS).stat().st_size == 12


def test_it_flushes_by_itself(tmp_path: Path) -> None:
    writer = CorpusWriter(tmp_path, ABOUT_IT, flush_tokens=5)
    writer.add(0, [1, 2, 3], ANSWER)
    assert not (tmp_path / INDEX).exists()
    writer.add(1, [4, 5, 6], ANSWER)
    assert len(Corpus.open(tmp_path)) == 2


def test_it_flushes_after_a_while(tmp_path: Path) -> None:
    seconds = iter([0.0, 10.0, 40.0, 41.0])
    writer = CorpusWriter(tmp_path, ABOUT_IT, clock=lambda: next(seconds))
    writer.add(0, [1, 2, 3], ANSWER)
    assert not (tmp_path / INDEX).exists()
    writer.add(1, [4, 5, 6], ANSWER)
    assert len(Corpus.open(tmp_path)) == 2


def test_a_full_disk_keeps_the_last_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CorpusWriter(tmp_path, ABOUT_IT) as writer:
        writer.add(0, [1, 2, 3], ANSWER)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing.os, "fsync", full)
    with (
        pytest.raises(StorageFailed, match="no space left"),
        CorpusWriter(tmp_path, ABOUT_IT, flush_tokens=1) as writer,
    ):
        writer.add(1, [4, 5, 6], ANSWER)
    monkeypatch.undo()
    assert len(Corpus.open(tmp_path)) == 1
    assert sorted(os.listdir(tmp_path)) == [ABOUT, INDEX, TOKENS]
    with CorpusWriter(tmp_path, ABOUT_IT) as writer:
        writer.add(1, [4, 5, 6], ANSWER)
    assert Corpus.open(tmp_path).tokens.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_flush_that_failed_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CorpusWriter(tmp_path, ABOUT_IT)
    writer.add(0, [1, 2, 3], ANSWER)
    monkeypatch.setattr(writing, "_replace", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O")))
    with pytest.raises(StorageFailed, match="I/O"):
        writer.flush()
    monkeypatch.undo()
    writer.flush()
    assert Corpus.open(tmp_path).tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fingerprint": "0" * 64}, "fingerprint"),
        ({"vocab_size": 301}, "vocab_size"),
        ({"recipe": {"kind": "self", "seed": 1}}, "'seed': 0"),
    ],
)
def test_another_recipe_does_not_go_on_in_the_same_folder(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    with CorpusWriter(tmp_path, ABOUT_IT) as writer:
        writer.add(0, [1, 2, 3], ANSWER)
    with pytest.raises(BadRequest, match=said):
        CorpusWriter(tmp_path, replace(ABOUT_IT, **change))
    assert len(Corpus.open(tmp_path)) == 1


def test_the_text_of_another_target_is_refused(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path, ABOUT_IT) as writer:
        writer.add(0, [1, 2, 3], ANSWER)
    with pytest.raises(BadFile, match="vocabulary of tiny"):
        Corpus.open(tmp_path, fingerprint="0" * 64)


def _no_answer(path: Path) -> None:
    with CorpusWriter(path, ABOUT_IT) as writer:
        writer.add(5, [1, 2], [Part(0, 1, Kind.USER)])


def _overwrite(name: str, content: bytes) -> object:
    def damage(path: Path) -> None:
        with CorpusWriter(path, ABOUT_IT) as writer:
            writer.add(0, [1, 2, 3], ANSWER)
        (path / name).write_bytes(content)

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: None, "no corpus is here"),
        (lambda path: CorpusWriter(path, ABOUT_IT), "no answer"),
        (_no_answer, "no answer"),
        (_overwrite(ABOUT, b"{"), "not JSON"),
        (_overwrite(ABOUT, b"\xff"), "not JSON"),
        (_overwrite(ABOUT, b"[]"), "does not describe a corpus"),
        (_overwrite(ABOUT, b'{"format": "furcate corpus", "version": 2}'), "another version"),
        (_overwrite(ABOUT, b'{"format": "furcate corpus", "version": 1}'), "target must be str"),
        (_overwrite(INDEX, b"abc"), "damaged"),
        (_overwrite(TOKENS, b"abc"), "6 bytes, 3 are there"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: object, said: str) -> None:
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(BadFile, match=said):
        Corpus.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("offset", [0, 0]),
        ("offset", [0]),
        ("part", [[1, 4, 1]]),
        ("part", [[2, 2, 1]]),
        ("part", [[1, 2, 9]]),
        ("part_offset", [0, 2]),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(
    tmp_path: Path, name: str, value: object
) -> None:
    with CorpusWriter(tmp_path, ABOUT_IT) as writer:
        writer.add(0, [1, 2, 3], ANSWER)
    arrays = load_file(tmp_path / INDEX)
    arrays[name] = np.array(value, arrays[name].dtype)
    (tmp_path / INDEX).write_bytes(save(arrays))
    with pytest.raises(BadFile, match="contradicts"):
        Corpus.open(tmp_path)


Talks = st.lists(
    st.tuples(
        st.lists(st.integers(0, 299), min_size=4, max_size=12),
        st.integers(0, 1),
        st.integers(2, 4),
        st.sampled_from(Kind),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=40)
@given(talks=Talks, flush=st.integers(1, 30), chunk=st.integers(1, 9))
def test_counts_are_those_of_a_slow_count(
    tmp_path_factory: pytest.TempPathFactory,
    talks: list[tuple[list[int], int, int, Kind]],
    flush: int,
    chunk: int,
) -> None:
    path = tmp_path_factory.mktemp("corpus")
    slow = [0] * 300
    with CorpusWriter(path, ABOUT_IT, flush_tokens=flush) as writer:
        writer.add(99, [0, 1], [Part(0, 1, Kind.ANSWER)])
        slow[0] += 1
        for number, (tokens, start, end, kind) in enumerate(talks):
            writer.add(number, tokens, [Part(start, end, kind)])
            for token in tokens[start:end] if kind is Kind.ANSWER else []:
                slow[token] += 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("furcate.train.counts._CHUNK", chunk)
        counts = answer_counts(Corpus.open(path))
    assert counts.tolist() == slow


def test_frequent_ids_come_first_and_ties_go_by_id() -> None:
    assert frequent(np.array([2, 5, 0, 5, 2])).tolist() == [1, 3, 0, 4, 2]

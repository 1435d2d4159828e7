"""Streams: pieces that join to the whole answer, read in any order, closed at any time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from typing import Any

import pytest
from tiny_engine import (
    FILL,
    Script,
    finished,
    free_pages,
    ids,
    judged,
    prompt_of,
    tiny_engine,
    tokenizer,
    twins,
)

from furcate.config import SamplingParams
from furcate.drafters.adversary import Adversary
from furcate.engine.engine import Engine
from furcate.engine.outputs import Piece
from furcate.errors import BadRequest

MESSAGES = [{"role": "user", "content": "hello w"}]


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "seed": 3, "ignore_eos": True, **more})


def read(engine: Engine, request_id: str) -> list[Piece]:
    pieces = []
    while (piece := engine.next_piece(request_id)) is not None:
        pieces.append(piece)
    return pieces


def assert_whole(pieces: list[Piece], text: str, token_ids: tuple[int, ...]) -> None:
    assert "".join(piece.text for piece in pieces) == text
    assert tuple(t for piece in pieces for t in piece.token_ids) == token_ids
    assert [piece.finish_reason is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    last = pieces[-1].choice
    assert last is not None
    assert (last.text, last.token_ids) == (text, token_ids)


@pytest.mark.parametrize("drafter", ["off", "ngram"])
@pytest.mark.parametrize("more", [{}, {"stop": "\ufffd"}, {"skip_special_tokens": False}], ids=str)
def test_the_pieces_of_a_stream_join_to_the_answer(drafter: str, more: dict[str, Any]) -> None:
    asked = params(temperature=1.5, max_tokens=60, **more)
    with tiny_engine(drafter) as engine:
        whole = engine.generate(MESSAGES, asked)
        pieces = list(engine.stream(MESSAGES, asked))
    assert_whole(pieces, whole.text, whole.token_ids)


@pytest.mark.parametrize("drafter", ["off", "twins"])
def test_half_a_character_is_never_shown(drafter: str) -> None:
    text = "aé🌳bñ🌲🌲c"
    words = [i for raw in text.encode() for i in [byte_token(raw)]]
    stream = [FILL, *words]
    guess = twins([stream]) if drafter == "twins" else drafter
    with tiny_engine(guess, target=Script(stream)) as engine:
        asked = SamplingParams(temperature=0, max_tokens=len(words))
        pieces = read(engine, engine.submit([FILL], asked))
        cut = read(engine, engine.submit([FILL], params(temperature=0, max_tokens=5)))
    assert_whole(pieces, text, tuple(words))
    assert all("\ufffd" not in piece.text for piece in pieces)
    assert "".join(piece.text for piece in cut) == "aé\ufffd", "only where the answer ends inside"
    assert "\ufffd" in cut[-1].text


def byte_token(raw: int) -> int:
    """The token that stands for one byte."""
    return next(i for i in range(3, 259) if tokenizer().token_bytes(i) == bytes([raw]))


def test_a_stream_of_n_answers_names_each_of_them() -> None:
    prompt = prompt_of(20)
    with tiny_engine("ngram", max_batch=2) as engine:
        output = engine.collect(engine.submit(prompt, params(n=3)))
        pieces = read(engine, engine.submit(prompt, params(n=3)))
    for choice in output.choices:
        mine = [piece for piece in pieces if piece.index == choice.index]
        assert_whole(mine, choice.text, choice.token_ids)


def test_streams_may_be_read_in_turns() -> None:
    with tiny_engine("ngram") as engine:
        want = [engine.generate(MESSAGES, params(seed=seed)) for seed in (1, 2)]
        open_ = [engine.stream(MESSAGES, params(seed=seed)) for seed in (1, 2)]
        got: list[list[Piece]] = [[], []]
        for _ in range(200):
            for stream, pieces in zip(open_, got, strict=True):
                piece = next(stream, None)
                if piece is not None:
                    pieces.append(piece)
    for output, pieces in zip(want, got, strict=True):
        assert_whole(pieces, output.text, output.token_ids)


def test_one_stream_may_be_read_to_its_end_while_another_waits() -> None:
    with tiny_engine("off") as engine:
        first, second = (engine.stream(MESSAGES, params(seed=seed)) for seed in (1, 2))
        opening = next(first)
        whole = list(second)
        rest = [opening, *first]
        want = [engine.generate(MESSAGES, params(seed=seed)) for seed in (1, 2)]
    assert_whole(rest, want[0].text, want[0].token_ids)
    assert_whole(whole, want[1].text, want[1].token_ids)


@pytest.mark.parametrize("after", [1, 2, 5])
def test_closing_a_stream_early_gives_its_pages_back(after: int) -> None:
    prompt = prompt_of(30)
    with tiny_engine("ngram") as engine:
        other = engine.submit(prompt, params())
        stream = engine.stream(MESSAGES, params(max_tokens=200))
        for _ in range(after):
            next(stream)
        assert isinstance(stream, Generator)
        stream.close()
        (output,) = finished(engine, [other])
        assert list(output.token_ids) == judged(prompt, params())
        assert free_pages(engine) == engine.built.scheduler.book.pool.count


def test_an_abort_between_pieces_ends_the_stream() -> None:
    with tiny_engine("off") as engine:
        name = engine.submit(prompt_of(10), params())
        assert engine.next_piece(name) is not None
        engine.abort(name)
        assert engine.next_piece(name) is None
        assert free_pages(engine) == engine.built.scheduler.book.pool.count


def test_async_streams_run_side_by_side() -> None:
    async def read_all(engine: Engine, seed: int) -> list[Piece]:
        return [piece async for piece in engine.astream(MESSAGES, params(seed=seed))]

    async def both(engine: Engine) -> list[list[Piece]]:
        return list(await asyncio.gather(read_all(engine, 1), read_all(engine, 2)))

    with tiny_engine("ngram") as engine:
        got = asyncio.run(both(engine))
        want = [engine.generate(MESSAGES, params(seed=seed)) for seed in (1, 2)]
    for output, pieces in zip(want, got, strict=True):
        assert_whole(pieces, output.text, output.token_ids)


def test_an_async_stream_that_is_left_early_gives_its_pages_back() -> None:
    async def first_piece(engine: Engine) -> Piece:
        stream = engine.astream(MESSAGES, params(max_tokens=200))
        piece = await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        return piece

    with tiny_engine("ngram") as engine:
        assert asyncio.run(first_piece(engine)).finish_reason is None
        assert free_pages(engine) == engine.built.scheduler.book.pool.count


def test_threads_may_share_an_engine() -> None:
    with tiny_engine("ngram", max_batch=3) as engine:
        want = [engine.generate(MESSAGES, params(seed=seed)).token_ids for seed in range(4)]
        got: dict[int, tuple[int, ...]] = {}

        def work(seed: int) -> None:
            got[seed] = engine.generate(MESSAGES, params(seed=seed)).token_ids

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [got[seed] for seed in range(4)] == want


def test_a_list_of_prompts_is_answered_in_its_order() -> None:
    texts = ["hello", "a", "hello w hello", "b" * 30]
    with tiny_engine("ngram", max_batch=2) as engine:
        together = engine.generate(texts, params())
        apart = [engine.generate(text, params()) for text in texts]
    assert [output.token_ids for output in together] == [output.token_ids for output in apart]
    assert together[0].prompt_token_ids == tuple(
        tokenizer().chat_ids([{"role": "user", "content": "hello"}])
    )


def test_a_closed_engine_ends_its_streams_and_takes_nothing_more() -> None:
    engine = tiny_engine("ngram")
    stream = engine.stream(MESSAGES, params(max_tokens=100))
    next(stream)
    waiting = engine.submit(ids("hello"), params())
    book = engine.built.scheduler.book
    engine.close()
    assert list(stream) == []
    assert engine.next_piece(waiting) is None
    book.prefixes.clear()
    assert book.pool.free == book.pool.count
    with pytest.raises(BadRequest, match="closed"):
        engine.submit(ids("hello"))
    engine.close()


def test_a_stream_of_a_hostile_draft_is_the_same_stream() -> None:
    prompt = prompt_of(20)
    said = judged(prompt, params())
    with tiny_engine(Adversary([[*prompt, *said]], "any", vocab=267)) as engine:
        pieces = read(engine, engine.submit(prompt, params()))
    assert_whole(pieces, tokenizer().decode(said), tuple(said))

"""Requests that come and go: who else is there changes no token of an answer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tiny_engine import VOCAB, finished, free_pages, judged, prompt_of, tiny_engine

from furcate.config import SamplingParams
from furcate.drafters.adversary import Adversary
from furcate.engine.engine import Engine

LAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
    {"temperature": 1.2, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 0.6, "frequency_penalty": 1.0, "presence_penalty": -1.0},
    {"temperature": 1.0, "logit_bias": {7: 4.0, 2: 3.0}, "min_tokens": 6},
    {"temperature": 1.0, "allowed_token_ids": (2, 9, 30, 31, 32, 50)},
)
Ask = tuple[list[int], SamplingParams]


def asks(count: int, seed: int, most: int = 24) -> list[Ask]:
    """Requests of ragged lengths, each under another law."""
    rng = random.Random(seed)
    found: list[Ask] = []
    for number in range(count):
        law = LAWS[number % len(LAWS)]
        tokens = max(law.get("min_tokens", 0), rng.randint(1, most))
        params = SamplingParams(max_tokens=tokens, seed=rng.getrandbits(64), **law)
        found.append((prompt_of(rng.randint(1, 70), rng.randrange(5)), params))
    return found


def arriving_at_random(engine: Engine, asked: list[Ask], seed: int) -> list[list[int]]:
    """Submit in random order while others are at work; answers in the order of `asked`."""
    rng = random.Random(seed)
    names: dict[int, str] = {}
    for number in rng.sample(range(len(asked)), len(asked)):
        names[number] = engine.submit(*asked[number])
        for _ in range(rng.choice((0, 0, 1, 3))):
            engine.step()
    outputs = finished(engine, [names[number] for number in range(len(asked))])
    return [list(output.token_ids) for output in outputs]


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize(("drafter", "batch"), [("off", 3), ("ngram", 8), ("any", 3), ("model", 3)])
def test_whoever_comes_and_goes_every_answer_is_that_of_the_slow_loop(
    drafter: str, batch: int, chunk: int
) -> None:
    asked = asks(14, seed=chunk)
    want = [judged(prompt, params) for prompt, params in asked]
    streams = [[*prompt, *tokens] for (prompt, _), tokens in zip(asked, want, strict=True)]
    guess = Adversary(streams, "any", vocab=VOCAB) if drafter == "any" else drafter
    with tiny_engine(guess, max_batch=batch, prefill_chunk=chunk) as engine:
        before = engine.built.scheduler.book.pool.free
        assert arriving_at_random(engine, asked, seed=chunk) == want
        assert free_pages(engine) == before
    assert not isinstance(guess, Adversary) or guess.accepted > 20


@pytest.mark.parametrize("order", range(3))
def test_another_order_of_arrival_gives_the_same_tokens(order: int) -> None:
    asked = asks(9, seed=99)
    with tiny_engine("ngram", max_batch=4) as engine:
        first = arriving_at_random(engine, asked, seed=1000)
    with tiny_engine("ngram", max_batch=1 + order * 4) as engine:
        assert arriving_at_random(engine, asked, seed=order) == first


def test_a_request_alone_says_what_it_says_in_a_crowd() -> None:
    asked = asks(8, seed=5)
    with tiny_engine("ngram", max_batch=8) as engine:
        crowd = finished(engine, [engine.submit(*ask) for ask in asked])
    for ask, together in zip(asked, crowd, strict=True):
        with tiny_engine("ngram") as engine:
            alone = engine.collect(engine.submit(*ask))
        assert alone.token_ids == together.token_ids


def test_the_same_request_twice_in_a_batch_says_the_same_twice() -> None:
    ask = asks(3, seed=8)[1]
    with tiny_engine("ngram", max_batch=4) as engine:
        outputs = finished(engine, [engine.submit(*ask) for _ in range(4)])
    assert len({output.token_ids for output in outputs}) == 1
    assert list(outputs[0].token_ids) == judged(*ask)


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("batch", [1, 8])
def test_page_size_and_room_change_nothing(page_size: int, batch: int) -> None:
    asked = asks(10, seed=21)
    with tiny_engine("ngram", max_batch=batch, page_size=page_size, prefill_chunk=20) as engine:
        got = arriving_at_random(engine, asked, seed=4)
        assert free_pages(engine) == engine.built.scheduler.book.pool.count
    assert got == [judged(prompt, params) for prompt, params in asked]


def test_more_requests_than_room_wait_their_turn() -> None:
    with tiny_engine("off", max_batch=2) as engine:
        names = [engine.submit(prompt, params) for prompt, params in asks(6, seed=2)]
        scheduler = engine.built.scheduler
        seen = 0
        while engine.step():
            assert len(scheduler.running) <= 2
            seen = max(seen, len(scheduler.waiting))
        assert seen == 4
        assert all(output.finish_reason for output in finished(engine, names))


def test_the_check_can_fail() -> None:
    prompt, params = asks(2, seed=1)[1]
    other = params.model_copy(update={"seed": (params.seed or 0) ^ 1, "max_tokens": 20})
    assert judged(prompt, other) != judged(prompt, params.model_copy(update={"max_tokens": 20}))

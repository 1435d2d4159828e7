"""Several answers to one prompt: the first is the only one's, the pages are shared."""

from __future__ import annotations

import pytest
from tiny_engine import VOCAB, free_pages, judged, prompt_of, tiny_engine

from furcate.config import SamplingParams
from furcate.drafters.adversary import Adversary
from furcate.engine.outputs import Choice
from furcate.kv.cache import PagedCache


def params(n: int, **more: object) -> SamplingParams:
    asked = {"max_tokens": 20, "seed": 5, "ignore_eos": True, "temperature": 1.0, **more}
    return SamplingParams(n=n, **asked)


def choices(n: int, prompt: list[int], drafter: str = "off", **options: int) -> tuple[Choice, ...]:
    with tiny_engine(drafter, **options) as engine:
        before = engine.built.scheduler.book.pool.free
        found = engine.collect(engine.submit(prompt, params(n))).choices
        assert free_pages(engine) == before
        return found


@pytest.mark.parametrize("drafter", ["off", "ngram"])
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_the_first_of_n_answers_is_the_only_one(drafter: str, batch: int) -> None:
    prompt = prompt_of(37)
    many = choices(5, prompt, drafter, max_batch=batch)
    assert [choice.index for choice in many] == [0, 1, 2, 3, 4]
    assert list(many[0].token_ids) == judged(prompt, params(1))
    assert len({choice.token_ids for choice in many}) == 5


def test_answers_do_not_depend_on_the_room_of_the_batch_or_on_the_drafter() -> None:
    prompt = prompt_of(37)
    plain = [choice.token_ids for choice in choices(8, prompt, max_batch=8)]
    for batch in (1, 2, 3):
        again = choices(8, prompt, "ngram", max_batch=batch)
        assert [choice.token_ids for choice in again] == plain
    streams = [[*prompt, *tokens] for tokens in plain]
    drafter = Adversary(streams, "any", vocab=VOCAB)
    with tiny_engine(drafter, max_batch=2) as engine:
        found = engine.collect(engine.submit(prompt, params(8))).choices
    assert [choice.token_ids for choice in found] == plain
    assert drafter.accepted > 0


@pytest.mark.parametrize("length", [33, 40, 48, 49])
def test_the_prompt_is_scored_once(length: int) -> None:
    many = choices(3, prompt_of(length), max_batch=3)
    assert [choice.stats.reused_tokens for choice in many] == [0, length - 1, length - 1]


def test_a_shared_last_page_is_copied_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, int]] = []
    copy_page = PagedCache.copy_page

    def noted(cache: PagedCache, source: int, target: int) -> None:
        copied.append((source, target))
        copy_page(cache, source, target)

    monkeypatch.setattr(PagedCache, "copy_page", noted)
    choices(3, prompt_of(40), max_batch=3)
    assert len(copied) == 3, "each answer writes behind the 39 shared tokens"
    assert len({source for source, _ in copied}) == 1
    assert len({target for _, target in copied}) == 3
    copied.clear()
    choices(3, prompt_of(33), max_batch=3)
    assert copied == [], "32 tokens fill their pages, nobody writes there again"


def test_whole_pages_of_the_prompt_exist_once() -> None:
    with tiny_engine("off", max_batch=4) as engine:
        pool = engine.built.scheduler.book.pool
        before = pool.free
        engine.submit(prompt_of(16 * 20 + 1), params(4))
        for _ in range(8):
            engine.step()
        assert len(engine.built.scheduler.decoding()) == 4
        assert before - pool.free < 20 + 4 * 3


def test_a_seed_that_nobody_gave_is_drawn_told_and_reproduces() -> None:
    prompt = prompt_of(12)
    with tiny_engine("ngram") as engine:
        free = params(2).model_copy(update={"seed": None})
        first, second = (engine.collect(engine.submit(prompt, free)) for _ in range(2))
        assert first.seed != second.seed
        again = engine.collect(
            engine.submit(prompt, params(2).model_copy(update={"seed": first.seed}))
        )
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in first.choices]
    assert first.token_ids != second.token_ids


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_seeds_use_all_their_64_bits(seed: int) -> None:
    prompt, asked = prompt_of(12), params(1, seed=seed)
    with tiny_engine("ngram") as engine:
        output = engine.collect(engine.submit(prompt, asked))
        other = engine.collect(engine.submit(prompt, params(1, seed=seed ^ (1 << 63))))
    assert output.seed == seed
    assert list(output.token_ids) == judged(prompt, asked)
    assert other.token_ids != output.token_ids

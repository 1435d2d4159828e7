"""Pages of a finished turn are used again by whoever goes on from it, and by nobody else."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_engine import (
    EOS,
    VOCAB,
    finished,
    free_pages,
    judged,
    prompt_of,
    tiny_engine,
    tokenizer,
)

from furcate.config import SamplingParams
from furcate.drafters.adversary import Adversary
from furcate.engine.engine import Engine
from furcate.engine.outputs import Output
from furcate.engine.round import Round


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 21, "seed": 3, "ignore_eos": True, **more})


def ask(engine: Engine, prompt: list[int], salt: str = "", **more: Any) -> Output:
    return engine.collect(engine.submit(prompt, params(**more), salt=salt))


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompt tokens each prefill pass scored."""
    rows: list[int] = []
    prefill = Round.prefill

    def noted(self: Round, view: Any, draft: Any, span: Any) -> None:
        rows.append(draft.tokens_BR.shape[1])
        prefill(self, view, draft, span)

    monkeypatch.setattr(Round, "prefill", noted)
    return rows


@pytest.mark.parametrize("drafter", ["off", "ngram", "any"])
@pytest.mark.parametrize("length", [3, 27, 28, 43, 44])
def test_a_second_turn_scores_only_what_is_new(
    drafter: str, length: int, scored: list[int]
) -> None:
    first = prompt_of(length)
    said = judged(first, params())
    second = [*first, *said, *prompt_of(19, seed=4)]
    streams = [[*first, *said], [*second, *judged(second, params())]]
    guess = Adversary(streams, "any", vocab=VOCAB) if drafter == "any" else drafter
    with tiny_engine(guess) as engine:
        assert list(ask(engine, first).token_ids) == said
        scored.clear()
        output = ask(engine, second)
        before = engine.built.scheduler.book.pool.count
        assert free_pages(engine) == before
    cached = length + len(said) - 1  # the last token's keys are not there yet
    assert output.stats.reused_tokens == cached
    assert sum(scored) == len(second) - 1 - cached
    assert list(output.token_ids) == streams[1][len(second) :]


@pytest.mark.parametrize("common", [0, 1, 15, 16, 17, 31, 47])
def test_what_two_prompts_share_is_scored_once_whole_pages_and_a_tail(
    common: int, scored: list[int]
) -> None:
    first, other = prompt_of(48), [9, *prompt_of(30, seed=7)]
    second = [*first[:common], *[(first[common] + 1) % VOCAB], *other]
    with tiny_engine("off") as engine:
        ask(engine, first)
        scored.clear()
        output = ask(engine, second)
    assert output.stats.reused_tokens == common
    assert sum(scored) == len(second) - 1 - common
    assert list(output.token_ids) == judged(second, params())


def test_a_chat_goes_on_from_its_history(scored: list[int]) -> None:
    asked = params(max_tokens=12, temperature=0, stop_token_ids=(EOS,), ignore_eos=False)
    messages = [{"role": "user", "content": "hello"}]
    with tiny_engine("ngram", max_context=1024) as engine:
        first = engine.generate(messages, asked)
        answer = {"role": "assistant", "content": "hell"}
        scored.clear()
        second = engine.generate([*messages, answer, {"role": "user", "content": "hell"}], asked)
    history = list(first.prompt_token_ids)
    assert list(second.prompt_token_ids[: len(history)]) == history
    assert second.stats.reused_tokens >= len(history)
    assert sum(scored) <= len(second.prompt_token_ids) - len(history)
    assert tokenizer().has_template


def test_the_same_prompt_again_scores_nothing(scored: list[int]) -> None:
    prompt = prompt_of(50)
    with tiny_engine("ngram") as engine:
        first = ask(engine, prompt)
        scored.clear()
        second = ask(engine, prompt)
    assert scored == []
    assert second.stats.reused_tokens == 49
    assert second.token_ids == first.token_ids


def test_the_hit_rate_does_not_depend_on_the_drafter() -> None:
    reused = []
    for drafter in ("off", "ngram"):
        with tiny_engine(drafter) as engine:
            outputs = [ask(engine, prompt_of(40)[:k]) for k in (20, 30, 40, 35)]
        reused.append([output.stats.reused_tokens for output in outputs])
    assert reused[0] == reused[1] == [0, 20, 30, 34]


def test_prompts_with_different_salts_never_share() -> None:
    prompt = prompt_of(50)
    with tiny_engine("ngram") as engine:
        said = ask(engine, prompt, "alice").token_ids
        assert ask(engine, prompt, "bob").stats.reused_tokens == 0
        assert ask(engine, prompt).stats.reused_tokens == 0
        again = ask(engine, prompt, "alice")
        assert again.stats.reused_tokens == 49
        assert again.token_ids == said
        assert free_pages(engine) == engine.built.scheduler.book.pool.count


def test_without_reuse_nothing_outlives_a_request(scored: list[int]) -> None:
    prompt = prompt_of(50)
    with tiny_engine("ngram", reuse_prefix=False, max_batch=2) as engine:
        book = engine.built.scheduler.book
        for _ in range(2):
            scored.clear()
            output = ask(engine, prompt)
            assert output.stats.reused_tokens == 0
            assert sum(scored) == 49
            assert list(output.token_ids) == judged(prompt, params())
            assert (book.prefixes.held, book.pool.free) == (0, book.pool.count)
        scored.clear()
        many = engine.collect(engine.submit(prompt, params(n=3)))
        assert sum(scored) == 49, "answers to one prompt still share it"
        assert [choice.stats.reused_tokens for choice in many.choices] == [0, 49, 49]
        assert (book.prefixes.held, book.pool.free) == (0, book.pool.count)
        name = engine.submit(prompt, params(n=3))
        for _ in range(5):
            engine.step()
        engine.abort(name)
        assert (book.prefixes.held, book.pool.free) == (0, book.pool.count)


def test_without_reuse_not_even_requests_at_the_same_time_share() -> None:
    prompt = prompt_of(50)
    with tiny_engine("off", reuse_prefix=False) as engine:
        first = engine.submit(prompt, params(n=2), salt="a")
        for _ in range(4):
            engine.step()
        assert engine.built.scheduler.book.prefixes.held > 0, "the first one's answers share"
        second = engine.submit(prompt, params(), salt="a")
        outputs = finished(engine, [first, second])
    assert outputs[1].stats.reused_tokens == 0


@pytest.mark.parametrize("steps", range(12))
def test_a_cancelled_request_changes_nobody_who_shares_its_prompt(steps: int) -> None:
    prompt = prompt_of(45)
    others = [prompt, [*prompt[:40], 5, 6, 7], [*prompt, *prompt_of(9, seed=3)]]
    want = [judged(one, params(temperature=0)) for one in others]
    with tiny_engine("ngram", max_batch=3, prefill_chunk=10) as engine:
        victim = engine.submit([*prompt, 8, 8], params(temperature=0))
        names = [engine.submit(one, params(temperature=0)) for one in others]
        for _ in range(steps):
            engine.step()
        engine.abort(victim)
        outputs = finished(engine, names)
        again = ask(engine, [*prompt, 8, 8], temperature=0)
        assert free_pages(engine) == engine.built.scheduler.book.pool.count
    assert [list(output.token_ids) for output in outputs] == want
    assert list(again.token_ids) == judged([*prompt, 8, 8], params(temperature=0))


def test_an_unfinished_prompt_is_nobodys_to_share() -> None:
    prompt = prompt_of(60)
    with tiny_engine("off", prefill_chunk=8) as engine:
        engine.submit(prompt, params())
        for _ in range(3):
            engine.step()
        assert engine.built.scheduler.book.prefixes.held == 0


def rounds_of(engine: Engine, prompt: list[int]) -> list[int]:
    """Rounds of two greedy answers to one prompt, drafted by the target itself."""
    asked = params(temperature=0, max_tokens=25, n=2)
    return [c.stats.rounds for c in engine.collect(engine.submit(prompt, asked)).choices]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_drafters_own_keys_come_back_with_the_pages(chunk: int) -> None:
    first = prompt_of(37)
    second = [*first, *judged(first, params(temperature=0, max_tokens=25)), *prompt_of(9, seed=2)]
    with tiny_engine("model", draft={"topk": 1}, prefill_chunk=chunk) as engine:
        assert rounds_of(engine, first) == [5, 5], "five tokens a round: it is always right"
        assert rounds_of(engine, second) == [5, 5]
        assert rounds_of(engine, first) == [5, 5]

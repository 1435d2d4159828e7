"""A pass that fails ends the requests it was for, openly; nobody gets a wrong stream."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from clocks import Uneven
from tiny_engine import free_pages, judged, prompt_of, tiny_engine

from furcate.config import SamplingParams
from furcate.drafters.base import View
from furcate.engine.budget import Patience
from furcate.engine.engine import Engine
from furcate.kernels.draft import Proposal


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 30, "ignore_eos": True, **changes})


def drain(engine: Engine) -> None:
    while engine.step():
        pass


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, after: int) -> None:
    """Let a call fail once, after it has worked `after` times."""
    real, calls = getattr(owner, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == after + 1:
            raise MemoryError("planted")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("where", ["propose", "learn", "score", "commit", "take", "prefill"])
def test_a_fault_in_any_phase_ends_its_requests_and_spares_the_next(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with tiny_engine("ngram", max_batch=2) as engine:
        loop = engine._loop
        owner, name = {
            "propose": (loop.round.drafter, "propose"),
            "learn": (loop.round.drafter, "learn"),
            "score": (loop.round.target, "score"),
            "commit": (loop.state, "commit"),
            "take": (loop, "_take"),
            "prefill": (loop.round.target, "prefill"),
        }[where]
        names = [engine.submit(prompt_of(20, seed), params()) for seed in (1, 2, 3)]
        fail_once(monkeypatch, owner, name, after=0 if where == "prefill" else 3)
        requests = [engine._open[name][0] for name in names]
        with pytest.raises(MemoryError, match="planted"):
            drain(engine)
        hit = [r for r in requests if r.choice is not None and r.choice.finish_reason == "error"]
        assert hit
        assert all(r.choice is not None and "planted" in str(r.choice.error) for r in hit)
        drain(engine)
        for seed, request in zip((1, 2, 3), requests, strict=True):
            assert request.choice is not None
            want = judged(prompt_of(20, seed), params(seed=request.ask.seed))
            got = list(request.choice.token_ids)
            assert got == want[: len(got)], "what was emitted is plain decoding's"
            assert request in hit or got == want
        assert free_pages(engine) == engine.built.scheduler.book.pool.count


def test_a_reader_hears_that_his_request_failed_in_anothers_hands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tiny_engine("off", max_batch=2) as engine:
        mine, other = (engine.submit(prompt_of(9, seed), params()) for seed in (1, 2))
        fail_once(monkeypatch, engine._loop.round.target, "score", after=4)
        with pytest.raises(MemoryError):
            engine.collect(other)
        pieces = []
        while (piece := engine.next_piece(mine)) is not None:
            pieces.append(piece)
        assert pieces[-1].finish_reason == "error"
        assert pieces[-1].choice is not None
        assert "planted" in str(pieces[-1].choice.error)


def test_a_request_can_be_aborted_while_another_thread_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From some token on it goes no further, however long the abort is in coming."""
    with tiny_engine("off", max_batch=1) as engine:
        running = engine.submit(prompt_of(9), params(max_tokens=2000))
        queued = engine.submit(prompt_of(9, seed=2), params(max_tokens=5))
        reader = threading.Thread(target=engine.collect, args=(queued,), daemon=True)
        (request,), real, reading = engine._open[running], engine._loop.step, threading.Event()

        def step() -> None:
            if threading.current_thread() is reader:
                reading.set()
            if request.choice is not None or len(request.output) < 20:
                real()

        monkeypatch.setattr(engine._loop, "step", step)
        reader.start()
        assert engine.next_piece(running) is not None
        reading.wait()
        stopped = engine.abort(running)
        reader.join()
        assert stopped is not None
        assert stopped.finish_reason == "abort"
        assert 0 < len(stopped.token_ids) <= 20


def test_a_closed_engine_has_no_more_steps() -> None:
    engine = tiny_engine("off")
    engine.close()
    assert engine.step() is False


def model_engine(**draft: Any) -> Engine:
    return tiny_engine("model", draft={"depth": 3, "topk": 2, **draft}, max_batch=2)


def test_a_costly_drafter_that_never_pays_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    Uneven(1).rules(monkeypatch)
    with model_engine(adaptive=True) as engine:
        engine.warm_up(params())  # measuring drafts too
        monkeypatch.setattr(engine._loop.budget, "rows", lambda needs, gains: 1)
        proposed: list[int] = []
        drafter = engine._loop.round.drafter
        real = drafter.propose

        def propose(view: View, levels: int) -> Proposal:
            proposed.append(levels)
            return real(view, levels)

        monkeypatch.setattr(drafter, "propose", propose)
        out = engine.collect(engine.submit(prompt_of(20), params(max_tokens=200)))
        assert list(out.token_ids) == judged(prompt_of(20), params(max_tokens=200, seed=out.seed))
        assert out.stats.rounds == 200
        # six drafts, and three behind each of the rests of 16, 32, 64 and 128 rounds
        assert len(proposed) <= 6 + 4 * 3


def test_a_drafter_that_rested_goes_on_as_if_it_had_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target drafts for itself: where its keys are whole it is always right."""
    Uneven(1).rules(monkeypatch)
    prompt, asked = prompt_of(20), params(max_tokens=61)
    with model_engine(adaptive=True, topk=1) as engine:
        rounds = iter(range(1000))
        pays = lambda needs, gains: 4 if next(rounds) >= 20 and gains[0] else 1  # noqa: E731
        monkeypatch.setattr(engine._loop.budget, "rows", pays)
        out = engine.collect(engine.submit(prompt, asked))
        assert list(out.token_ids) == judged(prompt, params(max_tokens=61, seed=out.seed))
        assert out.stats.accepted > 0
        assert out.stats.accepted_by_depth == out.stats.offered_by_depth


def rests_of(patience: Patience, count: int) -> list[int]:
    """Lengths of the rests that so many disappointments in a row bring about."""
    rests = []
    for _ in range(count):
        if patience.note(False):
            rests.append(1)
            while not patience.asks():
                rests[-1] += 1
    return rests


@pytest.mark.parametrize(
    ("light", "tries", "again", "want"),
    [(False, 6, 3, [16, 32, 64, 128, 128, 128]), (True, 16, 1, [2, 4, 4, 4, 4, 4])],
)
def test_rests_double_and_end_where_a_draft_pays(
    light: bool, tries: int, again: int, want: list[int]
) -> None:
    patience = Patience.of(light=light)
    assert rests_of(patience, tries - 1) == []
    assert rests_of(patience, 1 + 5 * again) == want
    patience.note(True)
    assert rests_of(patience, tries - 1) == []


def test_warming_up_measures_small_rounds_ahead() -> None:
    with tiny_engine("ngram", draft={"adaptive": True}) as engine:
        engine.warm_up(params())
        (costs,) = engine._loop.budget._costs.values()
        assert sorted(costs.scored) == [1, 2, 4, 8, 16] and list(costs.drafted) == [1]
        out = engine.collect(engine.submit(prompt_of(20), params()))
        assert list(out.token_ids) == judged(prompt_of(20), params(seed=out.seed))

"""Rounds in flight and what the host decides meanwhile: pages, aborts, faults and preemptions."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
import torch
from fake_graphs import FakeRecorder
from test_drafters_heads import gap
from test_engine_ahead import LATE, ahead, guess_for
from test_engine_errors import BAD, broken_decoder, broken_head
from test_engine_errors import params as bad_params
from test_engine_faults import drain, fail_once
from test_engine_pages import answers, fighters, streams_of
from test_engine_traffic import asks
from tiny_engine import VOCAB, finished, free_pages, judged, prompt_of

from furcate.config import SamplingParams
from furcate.drafters.adversary import Adversary
from furcate.engine.budget import Patience
from furcate.engine.engine import Engine
from furcate.engine.flight import Flights
from furcate.kernels.draft import Draft

GREEDY = SamplingParams(temperature=0, max_tokens=40, seed=1, ignore_eos=True)


def guarded(engine: Engine) -> None:
    """Let nobody take a page that a round in flight could write to."""
    loop, pool = engine._loop, engine.built.scheduler.book.pool
    tables: dict[int, set[int]] = {}  # by flight, the pages of its players
    launched, landed, take = loop.flights.launched, loop.flights.landed, pool.take

    def note(flight: Any) -> None:
        tables[id(flight)] = {page for r in flight.players for page in r.pages.numbers}
        launched(flight)

    def forget(flight: Any) -> None:
        del tables[id(flight)]
        landed(flight)

    def guard(wanted: int) -> list[int]:
        taken = take(wanted)
        assert not set().union(*tables.values()) & set(taken), "a round in flight may write there"
        return taken

    loop.flights.launched = note  # type: ignore[method-assign]
    loop.flights.landed = forget  # type: ignore[method-assign]
    pool.take = guard  # type: ignore[method-assign]


def with_aborts(engine: Engine, rng: random.Random) -> list[tuple[list[int], Any, list[int]]]:
    """Requests end at any time, by rules of the host and the device, and others go on from them."""
    told: list[tuple[list[int], Any, list[int]]] = []
    asked = [*asks(10, seed=8, most=40), *fighters(6, seed=2)]
    open_now: dict[str, tuple[list[int], SamplingParams]] = {}
    while asked or open_now:
        if asked and len(open_now) < 4:
            ask = asked.pop()
            open_now[engine.submit(*ask)] = ask
        for _ in range(rng.randint(1, 6)):
            engine.step()
        name = rng.choice(list(open_now))
        prompt, params = open_now[name]
        if engine._open[name][0].choice is not None or rng.random() < 0.4:
            output = engine.abort(name)
            assert output is not None
            told.append((prompt, params, list(output.token_ids)))
            del open_now[name]
            if output.finish_reason == "abort" and len(prompt) < 60 and rng.random() < 0.7:
                more = [*prompt, *output.token_ids]
                asked.append((more, params.model_copy(update={"min_tokens": 0, "max_tokens": 9})))
    return told


@LATE
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("drafter", ["off", "ngram", "eagle3"])
def test_no_page_changes_hands_while_a_round_in_flight_may_write_to_it(
    drafter: str, rounds: int, late: bool
) -> None:
    guess = guess_for(drafter, [], 4)
    engine, recorder = ahead(guess, late=late, rounds=rounds, max_batch=4, kv_tokens=512)
    guarded(engine)
    with engine:
        told = with_aborts(engine, random.Random(rounds))
        assert free_pages(engine) == engine.built.scheduler.book.pool.count
    assert sum(recorder.ahead()) > 20
    for prompt, params, tokens in told:
        assert tokens == judged(prompt, params)[: len(tokens)]


def hands_changed(rounds: int) -> int:
    """One of two is aborted when the other has taken so many steps, 16 of them to a page."""
    caught = 0
    for steps in range(4, 4 + 16):
        engine, _ = ahead("off", rounds=rounds, max_batch=2, kv_tokens=256, reuse_prefix=False)
        guarded(engine)
        with engine:
            aborted, _ = (engine.submit(prompt_of(20, n), GREEDY) for n in (1, 2))
            for _ in range(steps):
                engine.step()
            engine.abort(aborted)
            try:
                engine.step()
            except AssertionError as fault:
                caught += "may write there" in str(fault)
    return caught


def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hands_changed(1) == 0
    monkeypatch.setattr(Flights, "hold", lambda self, pages: None)
    assert hands_changed(1) > 0, "pages are given back too early"
    assert hands_changed(0) == 0, "where nothing is in flight there is nothing to hold"


@LATE
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("drafter", ["off", "any", "model"])
def test_requests_that_fight_for_pages_give_way_and_come_back(
    drafter: str, rounds: int, late: bool
) -> None:
    asked = fighters(12, seed=17)
    streams = streams_of(asked)
    guess: Any = Adversary(streams, "any", vocab=VOCAB) if drafter == "any" else drafter
    room = {"max_batch": 6, "kv_tokens": 96, "prefill_chunk": 9}
    engine, recorder = ahead(guess, late=late, rounds=rounds, **room)
    guarded(engine)
    with engine:
        outputs = finished(engine, [engine.submit(*ask) for ask in asked])
        assert free_pages(engine) == 6
    assert [list(output.token_ids) for output in outputs] == answers(asked, streams)
    assert sum(output.stats.preemptions for output in outputs) >= 4
    assert any(recorder.ahead())


@LATE
@pytest.mark.parametrize("drafter", ["off", "ngram"])
@pytest.mark.parametrize("length", [1, 16, 40, 63])
def test_one_request_may_use_up_the_whole_pool(drafter: str, length: int, late: bool) -> None:
    prompt, p = prompt_of(length), GREEDY.model_copy(update={"max_tokens": None})
    engine, _ = ahead(drafter, late=late, kv_tokens=64)
    with engine:
        output = engine.collect(engine.submit(prompt, p))
        assert free_pages(engine) == 4
    assert output.finish_reason == "length" and output.stats.preemptions == 0
    assert list(output.token_ids) == judged(prompt, p, context=64)


@LATE
@pytest.mark.parametrize("drafter", ["off", "ngram", "eagle3"])
def test_an_abort_with_a_round_in_flight_drops_that_round_alone(drafter: str, late: bool) -> None:
    engine, _ = ahead(guess_for(drafter, [], 2), late=late, max_batch=2)
    guarded(engine)
    with engine:
        names = [engine.submit(prompt_of(20, n), GREEDY) for n in (1, 2)]
        request = engine._open[names[0]][0]
        while len(request.output) < 9:
            engine.step()
        assert len(engine._loop.flights) == 1
        seen, before = list(request.output), engine.built.scheduler.book.pool.free
        output = engine.abort(names[0])
        assert output is not None and output.finish_reason == "abort"
        assert list(output.token_ids) == seen
        assert engine.built.scheduler.book.pool.free == before, "until the round is over"
        other = engine.collect(names[1])
        assert list(other.token_ids) == judged(prompt_of(20, 2), GREEDY)
        more = [*prompt_of(20, 1), *seen]
        last = engine.collect(engine.submit(more, GREEDY))
        assert last.stats.reused_tokens == len(more) - 1, "all that was emitted but its last token"
        assert list(last.token_ids) == judged(more, GREEDY)
        assert free_pages(engine) == engine.built.scheduler.book.pool.count


def test_an_abort_while_a_head_rests_leaves_keys_of_what_was_emitted_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device is ahead of the host when the head reads on: no further than the host has."""
    drafter = guess_for("eagle3", [], 2)
    engine, _ = ahead(drafter, max_batch=2, draft={"adaptive": True})
    read, stretches = drafter.read, []

    def noting(view: Any, rows: Draft) -> None:
        stretches.append((int(rows.live_B[0]), rows.tokens_BR.shape[1]))
        read(view, rows)

    monkeypatch.setattr(drafter, "read", noting)
    monkeypatch.setattr(Patience, "asks", lambda self: False)
    with engine:
        size = engine.built.scheduler.book.page_size
        name = engine.submit(prompt_of(20), GREEDY)
        request = engine._open[name][0]
        while len(request.output) < 9:
            engine.step()
        state, slot = engine.built.round.state, request.slot
        assert int(state.length_C[slot]) > request.cached > request.read
        engine.abort(name)
        assert stretches[-1] == (9, 9)
        more = [*prompt_of(20), *request.output]
        again = engine.submit(more, GREEDY)
        engine.step()
        other = engine._open[again][0]
        assert other.stats.reused_tokens == len(more) - 1
        assert gap(drafter, other, size) < 1e-10
        assert list(engine.collect(again).token_ids) == judged(more, GREEDY)


@LATE
def test_the_last_abort_leaves_nothing_in_flight(late: bool) -> None:
    engine, _ = ahead("ngram", late=late, max_batch=2)
    with engine:
        name = engine.submit(prompt_of(20), GREEDY)
        for _ in range(5):
            engine.step()
        assert len(engine._loop.flights) == 1
        engine.abort(name)
        assert len(engine._loop.flights) == 0
        assert free_pages(engine) == engine.built.scheduler.book.pool.count


@pytest.mark.parametrize("where", ["propose", "commit", "take", "launch", "wait"])
def test_a_fault_with_rounds_in_flight_ends_its_requests_and_spares_the_next(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    engine, recorder = ahead("ngram", max_batch=2)
    with engine:
        loop = engine._loop
        owner, name = {
            "propose": (loop.round.drafter, "propose"),
            "commit": (loop.state, "commit"),
            "take": (loop, "_take"),
            "launch": (recorder, "send"),
            "wait": (loop, "_read"),
        }[where]
        names = [engine.submit(prompt_of(20, seed), GREEDY) for seed in (1, 2, 3)]
        requests = [engine._open[name][0] for name in names]
        while len(requests[1].output) < 4:
            engine.step()
        fail_once(monkeypatch, owner, name, after=3)
        with pytest.raises(MemoryError, match="planted"):
            drain(engine)
        hit = [r for r in requests if r.choice is not None and r.choice.finish_reason == "error"]
        assert hit and all(r.choice is not None and "planted" in str(r.choice.error) for r in hit)
        drain(engine)
        for seed, request in zip((1, 2, 3), requests, strict=True):
            assert request.choice is not None
            got, want = list(request.choice.token_ids), judged(prompt_of(20, seed), GREEDY)
            assert got == want[: len(got)], "what was emitted is plain decoding's"
            assert request in hit or got == want
        assert len(loop.flights) == 0
        assert free_pages(engine) == engine.built.scheduler.book.pool.count


@LATE
@pytest.mark.parametrize("make", [broken_decoder, broken_head])
@pytest.mark.parametrize("drafter", ["off", "ngram"])
def test_logits_that_are_no_numbers_end_one_request_while_a_round_is_in_flight(
    make: Any, drafter: str, late: bool
) -> None:
    good = [prompt_of(20, 1), prompt_of(31, 2)]
    engine, _ = ahead(drafter, late=late, target=make(), max_batch=3)
    guarded(engine)
    with engine:
        names = [engine.submit(prompt, bad_params(temperature=0)) for prompt in good]
        allowed = SamplingParams(temperature=0, max_tokens=20, allowed_token_ids=(BAD,), seed=1)
        broken = engine.submit(prompt_of(9, 3), allowed)
        outputs = finished(engine, [*names, broken])
        assert free_pages(engine) == engine.built.scheduler.book.pool.count
    assert outputs[2].finish_reason == "error" and outputs[2].token_ids == (BAD,)
    for prompt, output in zip(good, outputs, strict=False):
        assert list(output.token_ids) == judged(prompt, bad_params(temperature=0))


def test_pinned_memory_in_use_is_never_told_anything_new() -> None:
    """The stand-in refuses memory that the device may still read; two at most are in use."""
    recorder = FakeRecorder(late=True)
    staged = recorder.staging(torch.zeros(3))
    recorder.send(torch.zeros(3), staged)
    with pytest.raises(AssertionError, match="not copied it yet"):
        recorder.send(torch.zeros(3), staged)
    unread = recorder.staging(torch.zeros(3))
    there = weakref.ref(unread)
    recorder.fetch(unread, torch.zeros(3))  # after a fault nobody waits for it
    del unread
    assert there() is not None, "something new would get its address while the device writes there"
    engine, recorder = ahead("off", late=True, max_batch=2)
    with engine:
        engine.collect(engine.submit(prompt_of(12), GREEDY))
        recordings = list(engine.built.player._recordings.values())  # type: ignore[attr-defined]
    assert [len(recording.spare) for recording in recordings] == [2] * len(recordings)
    assert not recorder.flying

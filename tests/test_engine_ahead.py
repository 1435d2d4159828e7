"""Rounds launched before the one ahead of them is read: every answer stays what it was."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from clocks import Uneven
from fake_graphs import FakeRecorder, recorded
from test_drafters_heads import Spells, gap, led, streams_of
from test_engine_stops import Stage, matrix, one_by_one
from test_engine_traffic import LAWS, arriving_at_random, asks
from tiny_engine import (
    EOS,
    VOCAB,
    Script,
    finished,
    free_pages,
    ids,
    judged,
    prompt_of,
    tiny_engine,
    twins,
)
from tiny_heads import around, network

from furcate.config import SamplingParams
from furcate.drafters.adversary import Adversary
from furcate.engine import graphs
from furcate.engine.budget import Patience, Returns
from furcate.engine.engine import Engine
from furcate.engine.report import backend_json
from furcate.kernels.backend import TORCH

LATE = pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
GREEDY = SamplingParams(temperature=0, max_tokens=20, seed=1, ignore_eos=True)


def ahead(
    *args: Any, late: bool = False, rounds: int = 1, **options: Any
) -> tuple[Engine, FakeRecorder]:
    """An engine whose player launches so many rounds before it reads one."""
    engine, recorder = recorded(*args, recorder=FakeRecorder(late=late), **options)
    engine.built.player.ahead = rounds
    return engine, recorder


def guess_for(drafter: str, streams: list[list[int]], batch: int) -> Any:
    if drafter == "any":
        return Adversary(streams, "any", vocab=VOCAB)
    return around(network(drafter), max_batch=batch) if drafter in ("eagle3", "mtp") else drafter


@LATE
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("drafter", ["off", "ngram", "any", "model", "eagle3"])
def test_whoever_comes_and_goes_every_answer_is_that_of_the_slow_loop(
    drafter: str, rounds: int, late: bool
) -> None:
    asked = asks(14, seed=rounds)
    want = [judged(*ask) for ask in asked]
    streams = [[*prompt, *tokens] for (prompt, _), tokens in zip(asked, want, strict=True)]
    guess = guess_for(drafter, streams, 5)
    engine, recorder = ahead(guess, late=late, rounds=rounds, max_batch=5, prefill_chunk=9)
    with engine:
        before = engine.built.scheduler.book.pool.free
        assert arriving_at_random(engine, asked, seed=3) == want
        assert free_pages(engine) == before
    assert sum(recorder.ahead()) > 2


def test_the_next_round_is_launched_before_the_last_one_is_read() -> None:
    shares = {}
    for rounds in (0, 1):
        engine, recorder = ahead("off", rounds=rounds, max_batch=2)
        with engine:
            outputs = finished(engine, [engine.submit(prompt_of(12, n), GREEDY) for n in range(2)])
        assert all(
            list(o.token_ids) == judged(prompt_of(12, n), GREEDY) for n, o in enumerate(outputs)
        )
        shares[rounds] = sum(recorder.ahead()) / len(recorder.ahead())
    assert shares[0] == 0, "a player that does not run ahead is found out"
    assert shares[1] > 0.8


@LATE
def test_pieces_logprobs_and_figures_are_those_of_rounds_that_are_waited_for(late: bool) -> None:
    asked = asks(9, seed=5)
    told = []
    for rounds in (0, 1):
        engine, _ = ahead("ngram", late=late, rounds=rounds, max_batch=3)
        with engine:
            names = [
                engine.submit(prompt, p.model_copy(update={"logprobs": True, "top_logprobs": 2}))
                for prompt, p in asked
            ]
            outputs = finished(engine, names)
        told.append(
            [
                (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs, c.stats.tokens)
                for o in outputs
                for c in o.choices
            ]
        )
        assert all(c.stats.tokens == len(c.token_ids) for o in outputs for c in o.choices)
    assert [t[:4] for t in told[0]] == [t[:4] for t in told[1]]
    for one, other in zip(*told, strict=True):
        assert one[4] is not None and len(one[4]) == len(one[0])
        for a, b in zip(one[4], other[4] or (), strict=True):
            assert a.token_id == b.token_id
            assert a.logprob == pytest.approx(b.logprob, abs=1e-9)


@LATE
@pytest.mark.parametrize("drafter", ["off", "ngram", "twins"])
def test_every_rule_ends_the_answer_where_plain_decoding_would(drafter: str, late: bool) -> None:
    stage = Stage(drafter, max_context=256)
    guess = stage.drafter
    stage.engine, recorder = ahead(guess, late=late, target=stage.script, max_context=256)
    with stage.engine:
        for words, asked in islice(matrix(), 0, None, 9 * stage.every):
            choice = stage.play(words, logprobs=True, **asked)
            want = one_by_one(words, SamplingParams(**asked), 256)
            assert (list(choice.token_ids), choice.text, choice.finish_reason) == want
            assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
            assert choice.stats.tokens == len(choice.token_ids)
        assert free_pages(stage.engine) == stage.engine.built.scheduler.book.pool.count
    assert any(recorder.ahead())


@LATE
@pytest.mark.parametrize("drafter", ["off", "twins"])
def test_what_is_kept_behind_a_stop_string_ends_with_it(drafter: str, late: bool) -> None:
    """The tokens of the round in flight are nobody's: a later prompt does not find their keys."""
    words = [*ids("abcHIdefgijkmn"), *ids("pqrs")]
    prompt = ids("k" * 20)
    stream = [*prompt, *words]
    guess = twins([stream]) if drafter == "twins" else "off"
    engine, recorder = ahead(guess, late=late, target=Script(stream), max_context=256)
    with engine:
        one = engine.collect(engine.submit(prompt, SamplingParams(temperature=0, stop="HI")))
        assert list(one.token_ids) == ids("abcHI")
        assert one.text == "abc"
        assert recorder.ahead()[-1], "a round was in flight when the string was found"
        again = engine.collect(engine.submit(stream, GREEDY.model_copy(update={"max_tokens": 1})))
        assert again.stats.reused_tokens == len(prompt) + 5 - 1, "the last one's keys come later"
        pool = engine.built.scheduler.book.pool
        assert free_pages(engine) == pool.count


@LATE
@pytest.mark.parametrize("most", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("drafter", ["off", "twins", "model"])
def test_max_tokens_and_eos_are_exact(drafter: str, most: int, late: bool) -> None:
    prompt = ids("k" * 9)
    params = SamplingParams(temperature=0, max_tokens=most)
    for words in (ids("abcdefgijkmnpqrstuvy"), [*ids("abcde"), EOS, *ids("no")]):
        stream = [*prompt, *words]
        guess = twins([stream]) if drafter == "twins" else drafter
        engine, _ = ahead(guess, late=late, target=Script(stream), max_context=256)
        with engine:
            out = engine.collect(engine.submit(prompt, params))
            assert free_pages(engine) == engine.built.scheduler.book.pool.count
        end = words.index(EOS) + 1 if EOS in words else most
        assert list(out.token_ids) == words[: min(end, most)]
        assert out.finish_reason == ("stop" if end <= most and EOS in words else "length")


@pytest.mark.parametrize("drafter", ["off", "ngram", "eagle3", "medusa"])
def test_who_has_finished_on_the_device_takes_no_part_in_the_round_in_flight(drafter: str) -> None:
    """The round behind the last one writes to the scratch page alone and learns nothing."""
    prompt = prompt_of(20, 3)
    guess = around(network(drafter), max_batch=2) if drafter in ("eagle3", "medusa") else drafter
    engine, recorder = ahead(guess, max_batch=2, draft=None if drafter == "off" else {})
    with engine:
        name = engine.submit(prompt, GREEDY.model_copy(update={"max_tokens": 9}))
        request = engine._open[name][0]
        state, cache = engine.built.round.state, engine.built.round.target.cache
        engine.step()
        while not state.finish_C[request.slot]:
            engine.step()
        assert request.choice is None, "the host has not read it yet"
        length, finish = state.length_C.clone(), state.finish_C.clone()
        tokens_CW = state.tokens_CW[:, :-1].clone()
        page = cache.shape.page_size
        kept = [pool[:, page:].clone() for pool in (cache.k_LSKD, cache.v_LSKD)]
        replays = len(recorder.repeats)
        engine._loop._decode([request])
        assert len(recorder.repeats) == replays + 1
        assert torch.equal(state.length_C, length)
        assert torch.equal(state.finish_C[:-1], finish[:-1])
        assert torch.equal(state.tokens_CW[:, :-1], tokens_CW)
        for pool, old in zip((cache.k_LSKD, cache.v_LSKD), kept, strict=True):
            assert torch.equal(pool[:, page:], old)
        output = engine.collect(name)
        assert list(output.token_ids) == judged(prompt, GREEDY.model_copy(update={"max_tokens": 9}))
        assert free_pages(engine) == engine.built.scheduler.book.pool.count


@LATE
@pytest.mark.parametrize("drafter", ["off", "ngram"])
def test_many_answers_to_one_prompt(drafter: str, late: bool) -> None:
    prompt = prompt_of(40)
    params = SamplingParams(temperature=1.0, max_tokens=17, seed=4, n=5, ignore_eos=True)
    told = []
    for rounds in (0, 1):
        engine, _ = ahead(drafter, late=late, rounds=rounds, max_batch=3)
        with engine:
            output = engine.collect(engine.submit(prompt, params))
            assert free_pages(engine) == engine.built.scheduler.book.pool.count
        told.append([choice.token_ids for choice in output.choices])
    assert told[0] == told[1] and len(set(told[1])) == 5
    assert list(told[1][0]) == judged(prompt, params)


@LATE
@pytest.mark.parametrize("drafter", ["off", "ngram", "any"])
def test_eight_of_all_lengths_under_all_laws(drafter: str, late: bool) -> None:
    asked = [
        (
            prompt_of(3 + 11 * n, n),
            SamplingParams(max_tokens=6 + 5 * n, seed=n, **LAWS[n % len(LAWS)]),
        )
        for n in range(8)
    ]
    want = [judged(*ask) for ask in asked]
    streams = [[*ask[0], *tokens] for ask, tokens in zip(asked, want, strict=True)]
    engine, recorder = ahead(guess_for(drafter, streams, 8), late=late, max_batch=8)
    with engine:
        outputs = finished(engine, [engine.submit(*ask) for ask in asked])
        assert free_pages(engine) == engine.built.scheduler.book.pool.count
    assert [list(o.token_ids) for o in outputs] == want
    assert sum(recorder.ahead()) > 8


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "mtp"])
def test_a_head_that_rested_catches_up_with_the_round_in_flight(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        (prompt_of(n, n), SamplingParams(max_tokens=70, seed=n, ignore_eos=True)) for n in (8, 30)
    ]
    streams = streams_of(asked)
    drafter = led(kind, streams, max_batch=2)
    engine, recorder = ahead(drafter, max_batch=2, draft={"adaptive": True})
    with engine:
        loop, size = engine._loop, engine.built.scheduler.book.page_size
        monkeypatch.setattr(loop.budget, "rows", lambda needs, gains: 8 if any(gains[0]) else 1)
        monkeypatch.setattr(loop, "patience", Spells())
        names = [engine.submit(*ask) for ask in asked]
        rested = 0
        while engine.step():
            players = engine.built.scheduler.decoding()
            rested = max([rested, *(r.cached - r.read for r in players)])
            assert all(gap(drafter, r, size) < 1e-10 for r in players)
        outputs = finished(engine, names)
    assert rested >= 14 and sum(recorder.ahead()) > 20
    assert [[*a[0], *o.token_ids] for a, o in zip(asked, outputs, strict=True)] == streams
    assert sum(o.stats.accepted for o in outputs) > 10


class Seldom(Patience):
    """Is asked after every third round."""

    def asks(self) -> bool:
        self.vain += 1
        return self.vain % 3 == 0

    def note(self, paid: bool) -> bool:
        """Whatever comes of it."""
        return False


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_what_long_paths_in_flight_commit_is_caught_up_with(
    kind: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [(prompt_of(n, n), GREEDY.model_copy(update={"max_tokens": 70})) for n in (8, 30)]
    streams = streams_of(asked)
    drafter = led(kind, streams, max_batch=2)
    engine, _ = ahead(drafter, rounds=rounds, max_batch=2, draft={"adaptive": True})
    with engine:
        loop, size = engine._loop, engine.built.scheduler.book.page_size
        monkeypatch.setattr(loop.budget, "rows", lambda needs, gains: 8)
        monkeypatch.setattr(loop, "patience", Seldom())
        names = [engine.submit(*ask) for ask in asked]
        while engine.step():
            players = engine.built.scheduler.decoding()
            assert all(gap(drafter, r, size) < 1e-10 for r in players)
        outputs = finished(engine, names)
    assert [[*a[0], *o.token_ids] for a, o in zip(asked, outputs, strict=True)] == streams
    assert sum(o.stats.accepted for o in outputs) > 10


@LATE
@pytest.mark.parametrize("drafter", ["ngram", "eagle3"])
def test_a_drafter_that_is_asked_now_and_then_changes_no_token(
    drafter: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Uneven(seed=1).rules(monkeypatch)
    asked = asks(8, seed=6, most=60)
    guess = guess_for(drafter, [], 3)
    engine, recorder = ahead(guess, late=late, draft={"adaptive": True}, max_batch=3)
    with engine:
        engine._loop.watch.active = False  # a random head is hardly ever right
        engine.warm_up(GREEDY)
        before = len(recorder.repeats)
        got = arriving_at_random(engine, asked, seed=1)
        assert free_pages(engine) == engine.built.scheduler.book.pool.count
        names = engine.built.player.played.recorded
    assert got == [judged(*ask) for ask in asked]
    played = Counter(names[number] for number in recorder.repeats[before:])
    often = [name for name, count in played.items() if count > 4]  # what a probe plays is less
    assert {"draft=" in name for name in often} == {True, False}


def test_a_vain_draft_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds are launched by the same gains where nothing was read between them."""
    noted: list[int] = []

    def note(self: Patience, paid: bool) -> bool:
        noted.append(len(noted))
        return False

    monkeypatch.setattr(Patience, "note", note)
    for rounds in (0, 1):
        noted.clear()
        engine, _ = ahead("model", rounds=rounds, draft={"adaptive": True}, max_batch=1)
        with engine:
            monkeypatch.setattr(engine._loop.budget, "rows", lambda needs, gains: 1)
            engine.collect(engine.submit(prompt_of(20), GREEDY))
        assert len(noted) == GREEDY.max_tokens


def test_a_round_sees_as_far_as_those_before_it_may_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without buckets, so that every column counts."""
    monkeypatch.setattr(graphs, "_LEAST_COLUMNS", 1)
    monkeypatch.setattr(graphs, "_bucket", lambda count: count)
    prompt = prompt_of(20)
    streams = [[*prompt, *judged(prompt, GREEDY)]]
    for drafter in ("off", "twins"):
        engine, _ = ahead(twins(streams) if drafter == "twins" else "off", max_batch=1)
        with engine:
            output = engine.collect(engine.submit(prompt, GREEDY))
        assert list(output.token_ids) == judged(prompt, GREEDY)


def test_the_report_says_that_rounds_run_ahead() -> None:
    engine, _ = ahead("off")
    with engine:
        told = backend_json(engine.built)
        assert told["kernels"] == TORCH.name and told["rounds_ahead"] == 1
        assert told["graphs"]["recorded"] == []
    with tiny_engine("off") as engine:
        assert backend_json(engine.built)["rounds_ahead"] == 0


def test_a_round_in_vain_says_nothing_of_what_drafting_brings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that was in flight when the answer ended has no tokens, and is no disappointment."""
    tokens: list[float] = []
    monkeypatch.setattr(Returns, "note", lambda self, count, plain: tokens.append(count))
    engine, recorder = ahead("model", draft={"adaptive": True}, max_batch=1)
    with engine:
        engine.warm_up(GREEDY)
        monkeypatch.setattr(Patience, "asks", lambda self: True)
        engine.collect(engine.submit(prompt_of(20), GREEDY))
    assert recorder.ahead()[-1] and min(tokens) > 0
    assert sum(tokens) <= (GREEDY.max_tokens or 0)

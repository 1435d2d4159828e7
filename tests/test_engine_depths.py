"""Rounds whose drafts differ in depth: streams stay, and what is accepted is told of its draft."""

from __future__ import annotations

from itertools import cycle, pairwise
from typing import Any

import pytest
import torch
from fake_graphs import FakeRecorder, recorded
from test_drafters_heads import gap, led, streams_of
from tiny_engine import Script, finished, judged, prompt_of, tiny_engine
from tiny_heads import Knowing, around, beside, network

from furcate.config import SamplingParams
from furcate.engine.engine import Engine
from furcate.engine.flight import Flight
from furcate.engine.levels import Levels
from furcate.engine.probe import nobody
from furcate.engine.report import backend_json
from furcate.verify.law import Needs

ORDER = (6, 2, 2, 4, 6, 6, 2, 4)
DEEP = {"depth": 6, "topk": 3, "adaptive": True}


def params(**more: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 40, "seed": 3, "ignore_eos": True, **more}
    )


@pytest.fixture
def changing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round another depth, and sixteen rows; nothing is ever given up."""
    turns = cycle(ORDER)
    monkeypatch.setattr(Levels, "choose", lambda self, costs, rows, requests: next(turns))
    monkeypatch.setattr("furcate.engine.budget.Budget.rows", lambda self, needs, gains: 16)
    monkeypatch.setattr("furcate.engine.budget.Patience.asks", lambda self: True)
    monkeypatch.setattr("furcate.engine.loop.Loop._reckon", lambda *_: None)


def guess_for(kind: str, batch: int) -> Any:
    if kind == "model":
        return kind
    return (beside if kind == "hybrid" else around)(network("eagle3"), DEEP, max_batch=batch)


def engine_of(how: str, kind: str, batch: int) -> Engine:
    guess = guess_for(kind, batch)
    if how == "eager":
        return tiny_engine(guess, draft=DEEP, max_batch=batch)
    engine, _ = recorded(
        guess, recorder=FakeRecorder(late=how == "late"), draft=DEEP, max_batch=batch
    )
    return engine


@pytest.mark.usefixtures("changing")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["model", "eagle3", "hybrid"])
@pytest.mark.parametrize("how", ["eager", "recorded", "late"])
def test_depths_that_change_from_round_to_round_change_no_token(
    how: str, kind: str, batch: int, temperature: float
) -> None:
    asked = [(prompt_of(n, n), params(temperature=temperature, seed=n)) for n in (9, 20, 31)]
    with engine_of(how, kind, batch) as engine:
        outputs = finished(engine, [engine.submit(*ask) for ask in asked])
        played = engine.built.player.played
    assert [list(o.token_ids) for o in outputs] == [judged(*ask) for ask in asked]
    assert all(2 < o.stats.mean_levels < 6 for o in outputs)
    if how != "eager":
        assert played.eager == 0 and played.refused == {}
        assert {name.split("draft=")[-1] for name in played.recorded} == {"2", "4", "6"}


@pytest.mark.usefixtures("changing")
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("batch", [1, 3])
def test_what_a_round_accepts_is_told_of_the_draft_that_it_scored(
    ahead: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a head drafts which is always right is accepted, and no more."""
    stream = prompt_of(200, seed=7)
    script = Script(stream)
    guess = around(Knowing(script), DEEP | {"topk": 1, "beta": 1.0}, max_batch=batch)
    engine, _ = recorded(guess, target=script, draft=DEEP, max_batch=batch)
    engine.built.player.ahead = ahead
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(engine._loop.budget.levels, "heard", seen.extend)
    with engine:
        names = [engine.submit(stream[:n], params(max_tokens=50)) for n in (2, 23, 40)]
        outputs = finished(engine, names)
    assert [list(o.token_ids) for o in outputs] == [stream[n : n + 50] for n in (2, 23, 40)]
    assert len(seen) == sum(o.stats.rounds for o in outputs)
    assert sum(levels for levels, _ in seen) == sum(o.stats.levels for o in outputs)
    cut = sum(levels != accepted for levels, accepted in seen)
    assert cut <= 3, "the last round of each answer alone"
    assert {levels for levels, _ in seen} == {2, 4, 6}


@pytest.mark.usefixtures("changing")
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_keys_are_caught_up_with_when_rounds_of_different_depth_follow_one_another(
    kind: str, ahead: int
) -> None:
    asked = [(prompt_of(n, n), params(max_tokens=70)) for n in (8, 30)]
    streams = streams_of(asked)
    drafter = led(kind, streams, draft=DEEP, max_batch=2)
    engine, _ = recorded(drafter, draft=DEEP, max_batch=2)
    engine.built.player.ahead = ahead
    with engine:
        size = engine.built.scheduler.book.page_size
        names = [engine.submit(*ask) for ask in asked]
        while engine.step():
            players = engine.built.scheduler.decoding()
            assert all(gap(drafter, r, size) < 1e-10 for r in players)
        outputs = finished(engine, names)
    assert [[*a[0], *o.token_ids] for a, o in zip(asked, outputs, strict=True)] == streams
    assert max(len(o.stats.accepted_by_depth) for o in outputs) >= 4


def test_a_draft_that_was_not_scored_tells_nothing_of_its_levels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("furcate.engine.budget.Budget.rows", lambda self, needs, gains: 1)
    heard: list[tuple[int, int]] = []
    with tiny_engine("model", draft=DEEP, max_batch=1) as engine:
        monkeypatch.setattr(engine._loop.budget.levels, "heard", heard.extend)
        out = engine.collect(engine.submit(prompt_of(9, 1), params(max_tokens=12)))
    assert out.stats.levels > 0 and out.stats.drafted == 0
    assert heard == []


def test_a_round_at_rest_scores_a_draft_of_no_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("furcate.engine.budget.Budget.rows", lambda self, needs, gains: 1)
    flights: list[Flight] = []
    engine = tiny_engine("model", draft=DEEP, max_batch=1)
    read = engine._loop._read

    @torch.inference_mode()
    def noted(flight: Flight) -> None:
        flights.append(flight)
        read(flight)

    monkeypatch.setattr(engine._loop, "_read", noted)
    with engine:
        engine.collect(engine.submit(prompt_of(20), params(max_tokens=80)))
    for one, other in pairwise(flights):
        assert other.levels == [one.batch.levels]
    assert any(flight.levels == [0] for flight in flights)


@pytest.mark.parametrize("depth", [2, 4, 7, 8])
def test_warming_up_records_eight_kinds_at_most(depth: int) -> None:
    draft = {"depth": depth, "topk": 5, "adaptive": True, "num_draft_tokens": 63}
    engine, recorder = recorded(
        around(network("eagle3"), draft, max_batch=1), draft=draft, max_batch=1
    )
    with engine:
        engine.warm_up(params())
        assert recorder.count <= 8
        told = backend_json(engine.built)["graphs"]["recorded"]
        assert len(set(told)) == len(told) == recorder.count
        chosen = engine._loop.budget.levels.now
        played = {f"1x{rows} columns=512 draft={chosen}" for rows in (2, 4, 8, 16)}
        assert played <= set(told), "rounds that come next are recorded"
        output = engine.collect(engine.submit(prompt_of(20), params(max_tokens=60)))
        assert list(output.token_ids) == judged(prompt_of(20), params(max_tokens=60))


@pytest.mark.parametrize("kind", ["ngram", "medusa"])
def test_warming_up_records_as_few_kinds_as_before_where_there_is_no_choice(kind: str) -> None:
    guess = around(network(kind), DEEP | {"depth": 4}, max_batch=1) if kind == "medusa" else kind
    engine, recorder = recorded(guess, draft={"adaptive": True}, max_batch=1)
    with engine:
        engine.warm_up(params())
        assert recorder.count == 6


def test_an_engine_that_is_not_adaptive_drafts_all_levels() -> None:
    drafter = around(network("eagle3"), DEEP, max_batch=1)
    with tiny_engine(drafter, draft=DEEP | {"adaptive": False}, max_batch=1) as engine:
        output = engine.collect(engine.submit(prompt_of(20), params()))
    assert output.stats.mean_levels == 6


def test_plain_decoding_drafts_no_level() -> None:
    with tiny_engine("off") as engine:
        output = engine.collect(engine.submit(prompt_of(20), params(max_tokens=9)))
    assert (output.stats.mean_levels, output.stats.rounds) == (0, 9)


@pytest.mark.parametrize(
    ("requests", "rows", "want"),
    [(1, 16, (1, 16)), (2, 64, (2, 32)), (2, 32, (2, 16)), (4, 4, (3, 1))],
)
def test_nobody_plays_as_many_rows_as_are_asked_for_or_as_there_is_room_for(
    requests: int, rows: int, want: tuple[int, int]
) -> None:
    with tiny_engine("ngram", max_batch=3) as engine:
        state = engine.built.round.state
        batch = nobody(state, requests, rows, Needs(), levels=4, most=33)
        assert (len(batch.slot_B), batch.rows) == want
    with tiny_engine("ngram", max_batch=1) as engine:
        one = nobody(engine.built.round.state, 2, 64, Needs(), levels=4, most=33)
        assert (len(one.slot_B), one.rows) == (1, 33)

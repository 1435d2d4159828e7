"""What rounds cost where they run ahead: their seconds are the device's, and rests are plain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from test_engine_ahead import ahead
from tiny_engine import judged, prompt_of, tiny_engine

from furcate.config import SamplingParams
from furcate.engine.budget import Patience, Returns
from furcate.engine.engine import Engine
from furcate.engine.flight import Flight
from furcate.engine.player import Eager, Outcome
from furcate.engine.round import Batch, Round

ROUND = 0.02  # seconds that the device of this test takes for one


@dataclass
class Clock:
    """Time that passes only where somebody waits."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


class Device(Eager):
    """Rounds of equal length, one behind the other."""

    def __init__(self, round_: Round, clock: Clock, rounds: int) -> None:
        super().__init__(round_)
        self.ahead = rounds
        self._clock, self._free = clock, 0.0

    def launch(self, batch: Batch) -> Outcome:
        outcome = super().launch(batch)
        end = self._free = max(self._free, self._clock.now) + ROUND

        def wait() -> Any:
            self._clock.now = max(self._clock.now, end)
            return outcome()

        return wait


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("pause", [0.0, 0.015])
def test_a_round_takes_the_devices_time_however_many_are_in_flight(
    rounds: int, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("furcate.engine.loop.time", clock)
    built = tiny_engine("off").built
    engine = Engine(replace(built, player=Device(built.round, clock, rounds)))
    params = SamplingParams(temperature=0, max_tokens=30, seed=1, ignore_eos=True)
    with engine:
        pieces = []
        for piece in engine.stream("abc abc ab", params):
            pieces.append(piece)
            clock.now += pause  # the reader's, while the device works
    assert pieces[-1].choice is not None
    stats = pieces[-1].choice.stats
    assert stats.rounds == 30
    assert stats.decode_seconds == pytest.approx(30 * ROUND)


def test_a_rest_is_plain_decoding_and_loses_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third draft disappoints; trees always look worth their rows."""
    played: list[tuple[int, bool, int]] = []
    judged_drafts = iter(range(10**6))

    class Moody(Patience):
        def note(self, paid: bool) -> bool:
            return Patience.note(self, next(judged_drafts) % 3 != 2)

    engine, _ = ahead("model", draft={"adaptive": True}, max_batch=1)
    loop = engine._loop
    monkeypatch.setattr(loop.budget, "_probe", lambda needs, b, rows, levels: 1 + 0.001 * rows)
    monkeypatch.setattr(Returns, "positive", True)
    loop.patience = Moody(tries=1, again=1, first=4, longest=4)
    read = loop._read

    @torch.inference_mode()
    def noted(flight: Flight) -> None:
        emitted = flight.outcome()
        played.append((flight.batch.rows, flight.batch.levels > 0, emitted.told()[0].drafted))
        read(replace(flight, outcome=lambda: emitted))

    monkeypatch.setattr(loop, "_read", noted)
    prompt = prompt_of(12, 1)
    params = SamplingParams(temperature=0, max_tokens=60, seed=1, ignore_eos=True)
    with engine:
        answer = engine.collect(engine.submit(prompt, params))
    assert list(answer.token_ids) == judged(prompt, params)
    rests = [at for at in range(1, len(played)) if not played[at - 1][1] and not played[at][1]]
    assert len(rests) > 3
    for at, (rows, _, drafted) in enumerate(played[1:], start=1):
        if not played[at - 1][1]:
            assert (rows, drafted) == (1, 0), "there is no draft behind a round that asks for none"
        elif at < len(played) - 1:
            assert rows > 1 and drafted > 0, "whatever was proposed is scored"

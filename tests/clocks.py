"""Clocks in place of the engine's: with them nothing hangs on how busy a machine is."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

__all__ = ["Still", "Uneven"]


@dataclass
class Still:
    """Time that passes only where a test makes it pass."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


class Uneven:
    """Every look takes a random time, the same in every run: rounds cost now more, now less."""

    def __init__(self, seed: int) -> None:
        self._rng, self._now = random.Random(seed), 0.0

    def perf_counter(self) -> float:
        self._now += 1e-3 * self._rng.lognormvariate(0, 1)
        return self._now

    def rules(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rounds and probes are timed by this clock from now on."""
        monkeypatch.setattr("furcate.engine.loop.time", self)
        monkeypatch.setattr("furcate.engine.probe.time", self)

"""What goes into a training run beside its recipe, and what comes out of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from furcate.train.checkpoint import Position
from furcate.train.held_out import Depths

__all__ = ["OnReport", "Outcome", "Report", "Run", "Steps"]


@dataclass(frozen=True, slots=True)
class Run:
    """Where a run lies and what is told about it.

    `provenance` goes into every head's provenance as it is: command, commit, licence, target.
    """

    out: Path
    resume: bool = False
    provenance: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None  # of the target's vocabulary
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Steps:
    """Of one head, means over the last steps, depth by depth."""

    loss: tuple[float, ...]  # cross entropy in nats, the target's own entropy included
    overlap: tuple[float, ...]
    agreement: tuple[float, ...]
    gradient: float  # norm before clipping


@dataclass(frozen=True, slots=True)
class Report:
    """How a run stands; `held_out` is there when it was just measured."""

    done: float  # share of the run
    step: int
    tokens: int
    seconds: float
    tokens_per_second: float  # since the last report
    rate: float
    heads: Mapping[str, Steps]
    held_out: Mapping[str, Depths] | None = None


OnReport = Callable[[Report], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run: heads by name where it ended, else a checkpoint to go on from."""

    finished: bool
    position: Position
    heads: Mapping[str, Path]
    held_out: Mapping[str, Depths]
    notes: tuple[str, ...] = ()

"""A recorder without a device: replays are the same function over the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from tiny_engine import tiny_engine
from torch import Tensor

from furcate.engine.engine import Engine
from furcate.engine.graphs import Graphs

__all__ = ["FakeRecorder", "recorded"]


@dataclass
class FakeRecorder:
    """As strict as a GPU: a recording is played blind, and its result always lies in one place.

    What the host holds is overwritten with junk as soon as it has been copied, as pinned memory is
    by the next round.
    """

    repeats: list[int] = field(default_factory=list)  # which recording was replayed
    refuse: Callable[[int], bool] = lambda number: False
    count: int = 0

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        number, self.count = self.count, self.count + 1
        step()  # to warm up
        if self.refuse(number):
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        block = step().clone()

        def repeat() -> None:
            self.repeats.append(number)
            made = step()
            assert made.shape == block.shape and made.dtype == block.dtype
            block.copy_(made)

        return repeat, block

    def staging(self, like: Tensor) -> Tensor:
        return torch.full_like(like, 77, device="cpu")

    def wait(self) -> None:
        pass


def recorded(
    *args: object, recorder: FakeRecorder | None = None, **options: object
) -> tuple[Engine, FakeRecorder]:
    """A tiny engine whose rounds are replayed."""
    recorder = recorder or FakeRecorder()
    engine = tiny_engine(*args, **options)  # type: ignore[arg-type]
    built = engine.built
    return Engine(replace(built, player=Graphs(built.round, recorder))), recorder

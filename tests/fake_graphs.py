"""A recorder without a device: replays are the same function over the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from tiny_engine import tiny_engine
from torch import Tensor

from furcate.engine.engine import Engine
from furcate.engine.graphs import MOST_RECORDINGS, Graphs

__all__ = ["FakeRecorder", "recorded"]

JUNK = 77


@dataclass
class FakeRecorder:
    """As strict as a GPU: a recording is played blind, and its result always lies in one place.

    What the host holds is junk until it has been waited for, and again once it was copied to the
    device. The work itself is done as soon as it is launched; or, if `late`, only when somebody
    waits for it, so that whatever the host does meanwhile comes before it.
    """

    late: bool = False
    refuse: Callable[[int], bool] = lambda number: False
    repeats: list[int] = field(default_factory=list)  # which recording was replayed
    log: list[tuple[str, int]] = field(default_factory=list)  # "launched" and "read", by replay
    count: int = 0
    # what the device may still copy from or to: kept, so that nothing new gets its address
    flying: dict[int, Tensor] = field(default_factory=dict)
    _queue: list[Callable[[], None]] = field(default_factory=list)
    _done: int = 0

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self._work(len(self._queue))
        number, self.count = self.count, self.count + 1
        step()  # to warm up
        if self.refuse(number):
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        block = step().clone()

        def play() -> None:
            made = step()
            assert made.shape == block.shape and made.dtype == block.dtype
            block.copy_(made)

        def repeat() -> None:
            self.log.append(("launched", len(self.repeats)))
            self.repeats.append(number)
            self._launch(play)

        return repeat, block

    def staging(self, like: Tensor) -> Tensor:
        return torch.full_like(like, JUNK, device="cpu")

    def send(self, device: Tensor, staged: Tensor) -> None:
        self._fly(staged)

        def copy() -> None:
            device.copy_(staged)
            self._landed(staged).fill_(JUNK)

        self._launch(copy)

    def fetch(self, staged: Tensor, device: Tensor) -> Callable[[], None]:
        self._fly(staged).fill_(JUNK)
        hidden: list[Tensor] = []
        self._launch(lambda: hidden.append(device.clone()))
        behind, replay = len(self._queue), len(self.repeats) - 1

        def wait() -> None:
            self._work(behind)
            self.log.append(("read", replay))
            self._landed(staged).copy_(hidden[0])

        return wait

    def ahead(self) -> list[bool]:
        """Of each replay but the last, whether the next one was launched before it was read."""
        at = {what: place for place, what in enumerate(self.log)}
        return [at["launched", n + 1] < at["read", n] for n in range(len(self.repeats) - 1)]

    def _launch(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        if not self.late:
            self._work(len(self._queue))

    def _work(self, end: int) -> None:
        while self._done < end:
            self._done += 1
            with torch.inference_mode():
                self._queue[self._done - 1]()

    def _fly(self, staged: Tensor) -> Tensor:
        assert id(staged) not in self.flying, "the device has not copied it yet"
        self.flying[id(staged)] = staged
        return staged

    def _landed(self, staged: Tensor) -> Tensor:
        del self.flying[id(staged)]
        return staged


def recorded(
    *args: object,
    recorder: FakeRecorder | None = None,
    most: int = MOST_RECORDINGS,
    **options: object,
) -> tuple[Engine, FakeRecorder]:
    """A tiny engine whose rounds are replayed, with `most` recordings at once."""
    recorder = recorder or FakeRecorder()
    engine = tiny_engine(*args, **options)  # type: ignore[arg-type]
    built = engine.built
    return Engine(replace(built, player=Graphs(built.round, recorder, most))), recorder

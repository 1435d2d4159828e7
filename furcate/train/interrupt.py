"""Turns Ctrl-C and SIGTERM into a wish that a loop heeds between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Stop", "heeding_signals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    @property
    def asked(self) -> bool:
        """True from the first wish on."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Wish for it."""
        self._asked.set()


@contextmanager
def heeding_signals() -> Iterator[Stop]:
    """The first signal asks to stop; a second one does what it did before.

    Only the main thread may take signals; in others they stay as they are.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def ask(number: int, _: FrameType | None) -> None:
        stop.ask()
        signal.signal(number, before[signal.Signals(number)])

    for number in _SIGNALS:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

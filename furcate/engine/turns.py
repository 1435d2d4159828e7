"""A lock that hands itself on: who waits gets it before its last holder can have it again."""

from __future__ import annotations

import threading
from types import TracebackType

__all__ = ["Turns"]


class Turns:
    """Threads take turns. A plain lock lets a thread that loops over it starve all others.

    Not reentrant.
    """

    def __init__(self) -> None:
        self._door = threading.Lock()  # held by the one who is next
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._door:
            self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None
    ) -> None:
        self._lock.release()

"""Counts torch's own compute launches: what is neither a view, nor an allocation, nor Triton's."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Launches"]

FREE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "alias", "_unsafe_view")


class Launches(TorchDispatchMode):
    """What is called inside, by name; each would be a kernel of its own on a GPU.

    Args:
        but: files of furcate whose own calls do not count.
    """

    def __init__(self, *but: str) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._aside = (
            "triton/runtime/interpreter.py",
            "tests/conftest.py",
            "tests/poison.py",
            *but,
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in FREE and not self._is_aside():
            self.calls[f"{name} in {self._caller()}"] += 1
        return func(*args, **(kwargs or {}))

    def _is_aside(self) -> bool:
        return any(name.endswith(self._aside) for name in _files(lambda name: True))

    def _caller(self) -> str:
        return next(iter(_files(lambda name: "/furcate/" in name)), "elsewhere").split("/")[-1]


def _files(wanted: Callable[[str], bool]) -> list[str]:
    """The files of all calls that lead here, the innermost first."""
    frame, found = sys._getframe(2), []
    while frame is not None:
        if wanted(frame.f_code.co_filename):
            found.append(frame.f_code.co_filename)
        frame = frame.f_back  # type: ignore[assignment]
    return found

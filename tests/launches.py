"""Counts what a GPU would launch beside the Triton kernels: torch's own operations, by source.

A launch costs about a microsecond however little it does, so a round is as slow as it has many.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Launches"]

_NOTHING = ("empty", "detach", "alias", "lift_fresh", "_reshape_alias", "_unsafe_view")


class Launches(TorchDispatchMode):
    """Inside, every operation that writes memory is noted; views and what is inside kernels not."""

    def __init__(self) -> None:
        super().__init__()
        self.by_source: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.by_source.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        source = None if _is_free(func, out) else _source()
        if source is not None:
            self.by_source[f"{source} {func.overloadpacket.__name__}"] += 1
        return out


def _is_free(func: Any, out: Any) -> bool:
    """Whether it only looks at memory, makes it, or writes none."""
    name = func.overloadpacket.__name__
    views = func.is_view and not func._schema.is_mutable
    return views or name.startswith(_NOTHING) or (isinstance(out, Tensor) and out.numel() == 0)


def _source() -> str | None:
    """The line of furcate that asked, or None inside the interpreter of a kernel."""
    frame, found = sys._getframe(2), None
    while frame is not None:
        file = frame.f_code.co_filename
        if "/triton/runtime/" in file:
            return None
        if found is None and "/furcate/" in file and "/tests/" not in file:
            found = f"{file.rsplit('/furcate/', 1)[1]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return found or "elsewhere"

"""What a round launches: torch's own operations and the Triton kernels around them, by name.

Without a GPU, where Triton's kernels are interpreted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Launches", "launches"]

_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "set_", "lift_fresh", "detach")


@dataclass
class Launches:
    """How often each was launched; views and allocations launch nothing."""

    torch: Counter[str] = field(default_factory=Counter)
    triton: Counter[str] = field(default_factory=Counter)


class _Counting(TorchDispatchMode):
    def __init__(self, found: Launches) -> None:
        super().__init__()
        self.found = found
        self.silent = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (self.silent or func.is_view or name in _FREE or _same(args, made) or _hollow(made)):
            self.found.torch[name] += 1
        return made


def _same(args: Any, made: Any) -> bool:
    """Whether a reshape or a cast had nothing to do."""
    return any(made is given for given in args)


def _hollow(made: Any) -> bool:
    """Whether nothing is computed, since nothing is in it."""
    tensors = [x for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
    return bool(tensors) and all(x.numel() == 0 for x in tensors)


@contextmanager
def launches() -> Iterator[Launches]:
    """Count what is launched inside; interpreted kernels are one launch, whatever they do."""
    # not before `triton_device` has turned the interpreter on
    from triton.runtime import interpreter

    found = Launches()
    counting = _Counting(found)
    play = interpreter.GridExecutor.__call__

    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.triton[self.fn.__name__] += 1
        counting.silent = True
        try:
            return play(self, *args, **kwargs)
        finally:
            counting.silent = False

    with pytest.MonkeyPatch.context() as patch, counting:
        patch.setattr(interpreter.GridExecutor, "__call__", once)
        yield found

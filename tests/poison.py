"""Memory that nobody wrote, in whole numbers: the twin of what conftest does with floats."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

__all__ = ["POISON", "unwritten_numbers_are_poison"]

POISON = -77  # fits every dtype, and is no token, row, page or count


@pytest.fixture
def unwritten_numbers_are_poison() -> Iterator[None]:
    """Inside furcate new tensors hold -77 (NaN where they are floats, true where bool)."""
    with pytest.MonkeyPatch.context() as patch:
        for home, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(home, name, _poisoned(getattr(home, name)))
        yield


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = allocate(*args, **kwargs)
        if str(sys._getframe(1).f_globals.get("__name__", "")).startswith("furcate."):
            made.fill_(float("nan") if made.is_floating_point() else POISON)
        return made

    return wrapper

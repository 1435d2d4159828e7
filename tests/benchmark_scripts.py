"""Where the measuring scripts are, and a fixture that lets them import each other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["HOME", "scripts_find_each_other"]

HOME = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def scripts_find_each_other(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What they import is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(HOME))
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(HOME)):
            del sys.modules[name]

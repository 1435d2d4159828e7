"""Tree speculative decoding that changes no token of what the model says.

The names below are the public face. They load on first use, so `import furcate` is light: torch
comes with the first name that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from furcate.config import DraftOptions, EngineOptions, SamplingParams
    from furcate.engine.engine import Engine
    from furcate.engine.outputs import Output, Piece, Stats
    from furcate.errors import (
        BadFile,
        BadRequest,
        Busy,
        FetchFailed,
        FurcateError,
        OutOfPages,
        RequestFailed,
        StorageFailed,
        Unsupported,
        UserError,
    )

__version__ = "0.1.0"

_HOME = {
    "BadFile": "errors",
    "BadRequest": "errors",
    "Busy": "errors",
    "DraftOptions": "config",
    "Engine": "engine.engine",
    "EngineOptions": "config",
    "FetchFailed": "errors",
    "FurcateError": "errors",
    "OutOfPages": "errors",
    "Output": "engine.outputs",
    "Piece": "engine.outputs",
    "RequestFailed": "errors",
    "SamplingParams": "config",
    "Stats": "engine.outputs",
    "StorageFailed": "errors",
    "Unsupported": "errors",
    "UserError": "errors",
}

__all__ = [
    "BadFile",
    "BadRequest",
    "Busy",
    "DraftOptions",
    "Engine",
    "EngineOptions",
    "FetchFailed",
    "FurcateError",
    "OutOfPages",
    "Output",
    "Piece",
    "RequestFailed",
    "SamplingParams",
    "Stats",
    "StorageFailed",
    "Unsupported",
    "UserError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"furcate has no {name!r}; it exports {', '.join(__all__)}")
    return getattr(import_module(f"furcate.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

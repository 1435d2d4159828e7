"""What an engine had to do without, in lines for a reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["fallbacks"]


def fallbacks(backend: Mapping[str, Any]) -> list[str]:
    """One line for each kernel or recording that was not to be had; `Engine.backend` says which."""
    lines = [
        f"{name.replace('_', ' ')}: torch's own, since {backend[f'{name}_why']}"
        for name in ("kernels", "draft_kernels", "put_kernels", "join_kernels")
        if backend[f"{name}_why"] is not None
    ]
    graphs = backend["graphs"]
    refused = {} if graphs is None else graphs["refused"]
    return lines + [f"not recorded: rounds of {kind}, since {why}" for kind, why in refused.items()]

"""Lets Triton compile for an H200 where there is no GPU: what is launched does nothing.

`absent` must come before anything is launched in a process, and the interpreter must be off there.
Tensors stay on the CPU and keep what they held; a kernel is compiled for the arguments that it gets
as it would be on the device, and kept in the same cache (`TRITON_CACHE_DIR`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

__all__ = ["HOPPER", "NoDevice", "absent"]

HOPPER = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024  # bytes that a program may have
THREADS = 1024


def _launch_nothing(*_: Any, **__: Any) -> None:
    """All that a launch does."""


@dataclass
class NoDevice:
    """What Triton asks of a driver; `loaded` are names of kernels in the order they came."""

    loaded: list[str] = field(default_factory=list)
    launcher_cls: Callable[..., Any] = lambda source, metadata: _launch_nothing

    @property
    def utils(self) -> SimpleNamespace:
        return SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda device: {"max_shared_mem": SHARED}
        )

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def _load(self, name: str, *_: Any) -> tuple[int, int, int, int, int]:
        self.loaded.append(name)
        return 0, 0, 0, 0, THREADS


def absent() -> NoDevice:
    """From now on nothing is launched in this process."""
    found = NoDevice()
    driver.set_active(found)
    return found

"""Chooses between a kernel's torch reference and its Triton twin, by device."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

__all__ = ["twin"]


def twin(name: str, device: torch.device) -> ModuleType:
    """The module of `furcate.kernels` by this name, or its Triton twin on a GPU."""
    # the twins need triton, which machines without a GPU need not have
    suffix = "_triton" if device.type == "cuda" else ""
    return import_module(f"furcate.kernels.{name}{suffix}")

"""How much shared memory a program may have: what needs more cannot be launched there."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["H200", "shared_memory"]

H200 = 227 * 1024  # bytes, where the cuts were measured; 163 KB on 8.0, 99 KB on 8.6, 8.9 and 12.0


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program of this device may have; of a CPU, whose kernels are torch's, H200's."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]

"""How a kernel's row is made: checked before it is timed, and set beside the ceilings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gpu_timing import Timing
from torch import Tensor

from furcate.kernels.backend import Kernels
from furcate.kernels.draws import Draws

__all__ = ["Bench", "equal"]

# relative distance to a float32 reference that is rounding
_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Bench:
    """Where and how all kernels are measured."""

    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    top: Mapping[str, float]  # ceilings

    def row(
        self, check: float | bool, timing: Timing, *, moved: int = 0, work: int = 0
    ) -> dict[str, Any]:
        """One kernel at one size.

        Args:
            check: a relative distance, or whether results are equal.
            timing: of it.
            moved: every byte that must be read or written, once.
            work: operations of matrix units.
        """
        exact = isinstance(check, bool)
        row: dict[str, Any] = {
            "sound": check if exact else check <= _LIMIT[self.dtype],
            "us": timing.ms * 1e3,
            "spread_us": timing.spread * 1e3,
        }
        if not exact:
            row["error"] = check
        floor_us = self.top["smallest_kernel_us"]
        if moved:
            speed = moved / timing.ms / 1e6
            row |= {"gb_per_s": speed, "share_of_memory": speed / self.top["memory_gb_per_s"]}
            floor_us = max(floor_us, moved / self.top["memory_gb_per_s"] / 1e3)
        if work:
            speed = work / timing.ms / 1e9
            row |= {"tflop_per_s": speed, "share_of_product": speed / self.top["bf16_tflop_per_s"]}
            floor_us = max(floor_us, work / self.top["bf16_tflop_per_s"] / 1e6)
        return {**row, "floor_us": floor_us}

    def draws(self, batch: int, rows: int) -> Draws:
        """Of warm requests."""
        seed_B = torch.randint(-(2**63), 2**63 - 1, (batch,), device=self.device)
        position_T = torch.randint(0, 9999, (batch * rows,), device=self.device)
        warm_B = torch.full((batch,), 0.8, device=self.device)
        return Draws(warm_B, seed_B, torch.zeros_like(seed_B), position_T)

    def random(self, *size: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(size, device=self.device, dtype=self.dtype)


def equal(one: Any, other: Any) -> bool:
    """Whether two records hold the same tensors."""
    pairs = [(getattr(one, n), getattr(other, n)) for n in one.__dataclass_fields__]
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))

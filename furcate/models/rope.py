"""Rotary positions: frequencies of every scaling we know, and the turn of queries and keys.

Legend: T rows, H heads, D head size, F = D / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self

import torch
from torch import Tensor, nn

from furcate.models.spec import RopeSpec, ScalingKind

__all__ = ["Rope", "Turn", "frequencies", "turn"]


@dataclass(frozen=True, slots=True)
class Turn:
    """Cosine and signed sine of every row, once per pass: [T, 1, D], first half of sin negated."""

    cos_T1D: Tensor
    sin_T1D: Tensor


class Rope(nn.Module):
    """Positions to angles. Angles are float32, or float64 where the network is float64."""

    def __init__(
        self, spec: RopeSpec, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec = spec
        self.head_dim = head_dim
        self.dtype = dtype
        self.register_buffer("freq_F", self._make(device), persistent=False)
        self.freq_F: Tensor

    def forward(self, positions_T: Tensor) -> Turn:
        """cos and sin in the network's dtype for int64 positions."""
        angle_TF = positions_T.to(self.freq_F.dtype)[:, None] * self.freq_F
        cos_TF = angle_TF.cos() * self.spec.attention_factor
        sin_TF = angle_TF.sin() * self.spec.attention_factor
        cos_TD = torch.cat((cos_TF, cos_TF), -1).to(self.dtype)
        sin_TD = torch.cat((-sin_TF, sin_TF), -1).to(self.dtype)
        return Turn(cos_TD[:, None], sin_TD[:, None])

    def _make(self, device: torch.device) -> Tensor:
        precise = torch.float64 if self.dtype == torch.float64 else torch.float32
        if device.type == "meta":
            return torch.empty(self.head_dim // 2, dtype=precise, device=device)
        return frequencies(self.spec, self.head_dim, precise).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `.to(bfloat16)` must not round the frequencies: they are made anew for the new dtype
        probe: Any = fn(torch.empty(0, dtype=self.dtype, device=self.freq_F.device))
        self.dtype = probe.dtype
        self.freq_F = self._make(probe.device)
        return self


def turn(x_THD: Tensor, by: Turn) -> Tensor:
    """Rotate the pair (i, i + D/2) of every head by the row's angle.

    RoFormer, equation 34, in the half-split order of transformers: x·cos + swap(x)·(∓sin).
    """
    known = x_THD.is_cuda and x_THD.dtype != torch.float64
    if known and not torch.compiler.is_compiling():  # a compiler makes its own
        on_gpu: Tensor = import_module("furcate.models.rope_triton").turn(
            x_THD, by.cos_T1D, by.sin_T1D
        )
        return on_gpu
    swapped_THD = x_THD.roll(x_THD.shape[-1] // 2, -1)
    return torch.addcmul(x_THD * by.cos_T1D, swapped_THD, by.sin_T1D)


def frequencies(spec: RopeSpec, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Angle per position of each pair, [F] on the CPU.

    Computed in `dtype` in transformers' order of operations: at position 8000 one ulp of a
    frequency is already 5e-4 of angle.
    """
    exponent_F = torch.arange(0, head_dim, 2, dtype=dtype, device="cpu") / head_dim
    return _SCALINGS[spec.kind](spec, 1.0 / spec.theta**exponent_F)


def _unscaled(spec: RopeSpec, freq_F: Tensor) -> Tensor:
    return freq_F


def _linear(spec: RopeSpec, freq_F: Tensor) -> Tensor:
    """Position interpolation (Chen et al. 2023, section 2.3)."""
    return freq_F / spec.factor


def _table(spec: RopeSpec, freq_F: Tensor) -> Tensor:
    return freq_F / torch.tensor(spec.divisors, dtype=freq_F.dtype, device=freq_F.device)


def _llama3(spec: RopeSpec, freq_F: Tensor) -> Tensor:
    """Llama 3.1: long waves divided by `factor`, short ones kept, a linear blend in between."""
    turns_F = spec.original_max_position / (2 * math.pi / freq_F)
    low, high = spec.low_freq_factor, spec.high_freq_factor
    keep_F = (turns_F - low) / (high - low)
    blend_F = (1 - keep_F) * freq_F / spec.factor + keep_F * freq_F
    stretched_F = torch.where(turns_F < low, freq_F / spec.factor, blend_F)
    return torch.where(turns_F > high, freq_F, stretched_F)


def _yarn(spec: RopeSpec, freq_F: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2, "NTK-by-parts")."""
    half = len(freq_F)
    low, high = _ramp_borders(spec, 2 * half)
    index_F = torch.arange(half, dtype=freq_F.dtype, device=freq_F.device)
    keep_F = 1 - ((index_F - low) / (high - low)).clamp(0, 1)
    return freq_F / spec.factor * (1 - keep_F) + freq_F * keep_F


def _ramp_borders(spec: RopeSpec, dim: int) -> tuple[float, float]:
    low, high = (
        dim
        * math.log(spec.original_max_position / (rotations * 2 * math.pi))
        / (2 * math.log(spec.theta))
        for rotations in (spec.beta_fast, spec.beta_slow)
    )
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high if high != low else high + 0.001


_SCALINGS: dict[ScalingKind, Callable[[RopeSpec, Tensor], Tensor]] = {
    "none": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "table": _table,
}

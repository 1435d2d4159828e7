"""Rows picked from several matrices, normed and laid side by side: what a network reads of a token.

Legend: B requests, R rows of each, T = B * R flat rows, S rows to pick from, C columns of a
matrix, I columns of all of them, D head size, F = D / 2 frequencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["MOST_PARTS", "Angles", "Beside", "Laid", "Norm", "Part", "Rows", "beside"]

MOST_PARTS = 4  # of one call


class Norm(Protocol):
    """A root mean square norm over a row; the models' `RmsNorm` is one."""

    @property
    def weight(self) -> Tensor:
        """[C]."""

    @property
    def eps(self) -> float:
        """Added to the mean square."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a matrix by number, which nobody has picked yet."""

    x_SC: Tensor  # entries of a row lie dense
    number_BR: Tensor  # int64
    step: int = 0  # rows of `x` that are a request's own, counted from its first; 0: shared by all
    last: int | None = None  # what numbers above it read as; None: there are none

    def picked(self) -> Tensor:
        """[T, C]."""
        number_BR = self.number_BR
        if self.last is not None:
            number_BR = number_BR.clamp_max(self.last)
        if self.step:
            first_B = torch.arange(len(number_BR), device=number_BR.device) * self.step
            number_BR = number_BR + first_B[:, None]
        return self.x_SC.index_select(0, number_BR.flatten())


Part = tuple[Rows, Norm | None]


@dataclass(frozen=True, slots=True)
class Angles:
    """Rotary angles that are still to be made, of every row."""

    position_T: Tensor  # int64
    freq_F: Tensor  # float32, angle of a position
    factor: float  # of cosines and sines


@dataclass(frozen=True, slots=True)
class Laid:
    """What rows have come to."""

    all_TI: Tensor  # the parts side by side, each normed by its own norm if it has one
    last_TC: Tensor  # the last part as it is
    angles: tuple[Tensor, Tensor] | None = None  # cosines and sines, [T, 1, D] as a `Turn` has them


class Beside(Protocol):
    """Lays up to four parts of the same number of rows side by side; `beside` is the reference.

    What it makes of `angles` is what the models' `Rope` makes, in the parts' dtype.
    """

    def __call__(self, parts: Sequence[Part], angles: Angles | None = None) -> Laid: ...


def beside(parts: Sequence[Part]) -> Laid:
    """`Beside` in torch, angles aside."""
    picked = [rows.picked() for rows, _ in parts]
    normed = [_normed(x_TC, norm) for x_TC, (_, norm) in zip(picked, parts, strict=True)]
    return Laid(torch.cat(normed, 1), picked[-1])


def _normed(x_TC: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x_TC
    return functional.rms_norm(x_TC, (x_TC.shape[1],), norm.weight, norm.eps)

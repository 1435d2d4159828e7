"""Whose noise decides at each row of scores: what kernels that draw it on the fly are told.

Legend: B requests, T flat rows, the same number of them for every request.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Draws"]


@dataclass(frozen=True, slots=True)
class Draws:
    """The requests, and the position that each row's choice would take.

    The first T / B rows are the first request's, and so on; all tensors lie dense.
    """

    temperature_B: Tensor  # float32; at 0 no noise is drawn
    seed_B: Tensor  # int64, the bit pattern of the 64-bit request seeds
    choice_B: Tensor  # int64, index of the choice among the request's `n`
    position_T: Tensor  # int64, absolute

    @property
    def dense(self) -> bool:
        """Whether the tensors lie as kernels read them."""
        fields = (self.temperature_B, self.seed_B, self.choice_B, self.position_T)
        return all(field.is_contiguous() for field in fields)

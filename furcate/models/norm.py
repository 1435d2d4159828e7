"""Root mean square norm, by itself or of a sum: what stands between any two halves of a layer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["RmsNorm", "add_norm"]


class RmsNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019, equation 4) over the last axis."""

    def __init__(self, size: int, eps: float, *, like: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.new_empty(size))
        self.shape = (size,)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.shape, self.weight, self.eps)


def add_norm(x: Tensor, more: Tensor | None, norm: RmsNorm) -> tuple[Tensor, Tensor]:
    """(x + more, the norm of it over the last axis); without `more` x is the sum."""
    total = x if more is None else x + more
    normed: Tensor = norm(total)
    return total, normed

"""A sum and the root mean square norm of it: what stands between any two halves of a layer.

Legend: T rows, C hidden size.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["add_norm"]


def add_norm(x_TC: Tensor, more_TC: Tensor, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + more, its norm times the weight); see `RmsNorm`.

    One kernel on a GPU where no gradients are asked for.
    """
    if x_TC.is_cuda and x_TC.dtype != torch.float64 and torch.is_inference_mode_enabled():
        twin = import_module("furcate.models.norm_triton")
        on_gpu: tuple[Tensor, Tensor] = twin.add_norm(x_TC, more_TC, weight_C, eps)
        return on_gpu
    sum_TC = x_TC + more_TC
    return sum_TC, functional.rms_norm(sum_TC, weight_C.shape, weight_C, eps)

"""Weights that a head starts with.

Legend: T rows, F features of all layers, C hidden size.
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor, nn

from furcate.heads.eagle import Eagle3
from furcate.heads.medusa import Medusa
from furcate.heads.mtp import Mtp
from furcate.heads.places import Head
from furcate.models.decoder import Decoder
from furcate.train.recipe import HeadPlan

__all__ = ["start"]

_SPREAD = 0.02


def start(plan: HeadPlan, head: Head, target: Decoder, features_TF: Tensor, seed: int) -> None:
    """Fill the weights: matrices N(0, 0.02), norms 1, biases 0.

    Medusa's heads start as the identity (Medusa, section 2.1.1), the final norms of others as the
    target's. EAGLE-3 has no norm before `fc`, so its columns are divided by the root mean square
    of their layer's features.
    """
    rng = torch.Generator().manual_seed(seed * 2**32 + crc32(plan.name.encode()))
    with torch.no_grad():
        for name, weight in sorted(head.named_parameters()):
            _fill(name, weight, rng)
        if isinstance(head, Medusa):
            for weight in head.parameters():
                weight.zero_()
        if isinstance(head, Eagle3 | Mtp):
            head.norm.weight.copy_(target.norm.weight)
        if isinstance(head, Eagle3) and not (head.spec.norm_before_fc or head.spec.fc_norm):
            _scale_columns(head.fc.weight, features_TF, len(head.layers))


def _fill(name: str, weight: nn.Parameter, rng: torch.Generator) -> None:
    if weight.ndim == 1:
        weight.fill_(0.0 if name.endswith("bias") else 1.0)
    else:
        drawn = torch.randn(weight.shape, generator=rng, dtype=torch.float32)
        weight.copy_(drawn * _SPREAD)


def _scale_columns(weight_CF: Tensor, features_TF: Tensor, layers: int) -> None:
    features_TLC = features_TF.float().view(len(features_TF), layers, -1)
    size_L = features_TLC.square().mean((0, 2)).sqrt()
    weight_CF /= size_L.repeat_interleave(weight_CF.shape[1] // layers).to(weight_CF.dtype)

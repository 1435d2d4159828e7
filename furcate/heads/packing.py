"""Lays a network's matrices out for the CPU, as `Decoder.pack` does for the target's."""

from __future__ import annotations

import torch
from torch import nn

from furcate.heads.output import Output
from furcate.models.linear import Linear, can_pack, can_pack_bfloat16

__all__ = ["pack"]


def pack(network: nn.Module) -> None:
    """Every matrix that has a packed layout on this device gets one; elsewhere nothing happens.

    In bfloat16 where the CPU has it: that is what heads are stored in, and a guess may round.
    """
    for module in network.modules():
        if isinstance(module, Linear | Output) and can_pack(module.weight):
            module.pack(torch.bfloat16 if can_pack_bfloat16(module.weight) else None)

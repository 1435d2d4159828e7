"""Lays a network's matrices out for the CPU, as `Decoder.pack` does for the target's."""

from __future__ import annotations

from torch import nn

from furcate.heads.output import Output
from furcate.models.linear import Linear, can_pack

__all__ = ["pack"]


def pack(network: nn.Module) -> None:
    """Every matrix that has a packed layout on this device gets one; elsewhere nothing happens."""
    for module in network.modules():
        if isinstance(module, Linear | Output) and can_pack(module.weight):
            module.pack()

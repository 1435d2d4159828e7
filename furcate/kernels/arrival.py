"""What a pass begins with: its rows' places, embeddings and angles.

Legend: B requests, R rows, T = B * R flat rows, V vocabulary, C hidden size, D head size, F = D / 2
frequencies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from furcate.kernels.draft import Draft
from furcate.kernels.tree_attention import Places

__all__ = ["Arrival", "Arrive", "Words"]


@dataclass(frozen=True, slots=True)
class Words:
    """What a network makes of tokens and positions."""

    embedding_VC: Tensor
    freq_F: Tensor  # float32, angle of a position
    factor: float  # of cosines and sines


@dataclass(frozen=True, slots=True)
class Arrival:
    """The rows before the first layer."""

    slot_BR: Tensor  # int64, where their keys go; that of pads is scratch, except in a run
    next_BR: Tensor  # int64, position of the token behind each row
    x_TC: Tensor
    cos_T1D: Tensor  # as a `Turn` has them, in the network's dtype
    sin_T1D: Tensor


Arrive = Callable[[Places, Draft, Words], Arrival]
"""What `tree_attention.behind`, `Decoder.embed` and `Rope` do one after the other."""

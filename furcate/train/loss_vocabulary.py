"""Which tokens a batch's loss looks at: frequent ones, those that occur, and random others.

Legend: V vocabulary, F tokens that are always there, D columns, N rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Chooser", "Columns"]

_ALWAYS, _OCCURS = 2.0, 1.0  # priorities; a random number below 1 is added
_PRIME = 1_000_003  # so that runs of neighbouring seeds draw from other streams


@dataclass(frozen=True, slots=True)
class Columns:
    """Tokens in ascending order, and how much each stands for."""

    token_D: Tensor  # int64
    bias_D: Tensor  # float32: log(1 / probability of being chosen)


class Chooser:
    """Chooses `size` columns for every batch; three quarters are the most frequent tokens.

    What is left goes to other tokens that occur in the batch and then to random ones, each of
    which is biased so that it stands for those that were not chosen (sampled softmax, Bengio and
    Senécal 2008). Nothing waits for the device.

    Args:
        frequent_V: all ids by falling frequency.
        size: columns; from V on all tokens are columns.
        seed: of the random ones, together with the step.
        device: where the columns are wanted.
    """

    def __init__(
        self, frequent_V: NDArray[np.int64], size: int, seed: int, device: torch.device
    ) -> None:
        self._size = min(size, len(frequent_V))
        self._seed = seed
        priority_V = np.zeros(len(frequent_V), np.float32)
        priority_V[frequent_V[: self._size * 3 // 4]] = _ALWAYS
        self._priority_V = torch.from_numpy(priority_V).to(device)

    def choose(self, occurring_N: Tensor, step: int) -> Columns:
        """The columns of a step; `occurring_N` are tokens that should be among them."""
        base_V = self._priority_V
        vocab = len(base_V)
        if self._size == vocab:
            return Columns(torch.arange(vocab, device=base_V.device), torch.zeros_like(base_V))
        occurs_V = torch.zeros_like(base_V, dtype=torch.bool)
        occurs_V.index_fill_(0, occurring_N, True)
        priority_V = torch.where(occurs_V, base_V.clamp(min=_OCCURS), base_V)
        rng = torch.Generator(base_V.device).manual_seed((self._seed * _PRIME + step) % 2**63)
        drawn_V = torch.rand(vocab, generator=rng, device=base_V.device)
        token_D = (priority_V + drawn_V).topk(self._size).indices.sort().values
        others = (priority_V == 0).sum()
        chosen_D = priority_V[token_D] == 0
        odds = others.clamp(min=1) / chosen_D.sum().clamp(min=1)
        return Columns(token_D, torch.where(chosen_D, odds.log(), 0.0))

"""What a head shares with its target: embeddings, and the rows of the output matrix it scores.

Legend: V target vocabulary, D draft vocabulary, C hidden size, T flat rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from furcate.models.blocks import TORCH, Blocks
from furcate.models.decoder import Decoder
from furcate.models.linear import pack_weight

__all__ = ["Output", "Shared"]


@dataclass(frozen=True, slots=True)
class Shared:
    """Matrices of the target that its heads read and never write, and how it computes."""

    embedding_VC: Tensor
    output_VC: Tensor
    blocks: Blocks = TORCH

    @classmethod
    def of(cls, target: Decoder) -> Self:
        """Those of `target`; with tied embeddings the two are one."""
        output = target.embedding if target.head is None else target.head.weight
        return cls(target.embedding.detach(), output.detach(), target.blocks)


class Output(nn.Module):
    """Scores over the draft vocabulary: an own matrix, or rows of the target's.

    `token_D` gives the target's id of each draft id, ascending; None: the ids are the same. Rows of
    the target are not part of the state dict.
    """

    weight: Tensor
    bias: None = None
    token_D: Tensor | None

    def __init__(
        self, shared: Shared, token_D: Tensor | None, *, own: bool, width: int | None = None
    ) -> None:
        """With `own` the matrix is uninitialised, [D, width]."""
        super().__init__()
        vocab, hidden = shared.output_VC.shape
        self.register_buffer("token_D", token_D, persistent=False)
        self.packed: Tensor | None = None
        self.blocks = shared.blocks
        if own:
            rows = vocab if token_D is None else len(token_D)
            self.weight = nn.Parameter(shared.output_VC.new_empty(rows, width or hidden))
        else:
            rows_DC = shared.output_VC if token_D is None else shared.output_VC[token_D]
            self.register_buffer("weight", rows_DC, persistent=False)

    def forward(self, hidden_TC: Tensor) -> Tensor:
        return self.blocks.linear(hidden_TC, self)

    def pack(self, dtype: torch.dtype | None = None) -> None:
        """Lay a copy of the rows out for passes of more than a few rows, as `Linear.pack` does."""
        if self.packed is None:
            self.packed = pack_weight(self.weight.detach(), dtype)

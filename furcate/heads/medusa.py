"""Medusa heads: each guesses one further token from the target's final state alone.

Legend: T flat rows, K heads, C hidden size, D draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from furcate.heads.output import Output, Shared
from furcate.heads.spec import MedusaSpec
from furcate.models.blocks import Blocks
from furcate.models.linear import Linear

__all__ = ["Medusa"]


class Residual(nn.Module):
    """x + SiLU(W x + b) (Medusa, section 2.1.1)."""

    def __init__(self, size: int, *, bias: bool, like: Tensor, blocks: Blocks) -> None:
        super().__init__()
        self.blocks = blocks
        self.linear = Linear(size, size, bias=bias, like=like)

    def forward(self, x_TC: Tensor) -> Tensor:
        return x_TC + functional.silu(self.blocks.linear(x_TC, self.linear))


class Medusa(nn.Module):
    """K heads. The target's own output at position p - 1 is token p; head k guesses p + k, k >= 1.

    All heads score with one matrix, rows of the target's, or each with its own.
    """

    def __init__(self, spec: MedusaSpec, shared: Shared, token_D: Tensor | None) -> None:
        super().__init__()
        like, blocks = shared.embedding_VC, shared.blocks
        self.spec = spec
        self.layers = spec.layers
        self.depth = spec.num_heads
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(
                    Residual(spec.hidden_size, bias=spec.bias, like=like, blocks=blocks)
                    for _ in range(spec.num_layers)
                )
            )
            for _ in range(spec.num_heads)
        )
        outputs = spec.num_heads if spec.own_output else 1
        self.outputs = nn.ModuleList(
            Output(shared, token_D, own=spec.own_output) for _ in range(outputs)
        )

    @property
    def token_D(self) -> Tensor | None:
        """Target id of each draft id, int64 [D]; None: the same ids."""
        output = self.outputs[0]
        assert isinstance(output, Output)
        return output.token_D

    def forward(self, state_TC: Tensor) -> Tensor:
        """What each head's output matrix reads: [K, T, C]."""
        return torch.stack([head(state_TC) for head in self.heads])

    def logits(self, hidden_KTC: Tensor) -> Tensor:
        """Scores over the draft vocabulary, [K, T, D], from what `forward` returns."""
        if len(self.outputs) == 1:
            scores_KTD: Tensor = self.outputs[0](hidden_KTC.flatten(0, 1)).view(
                *hidden_KTC.shape[:2], -1
            )
            return scores_KTD
        each = [
            output(hidden_TC) for output, hidden_TC in zip(self.outputs, hidden_KTC, strict=True)
        ]
        return torch.stack(each)

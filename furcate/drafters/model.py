"""A whole small decoder as a draft network: it needs no state of the target, only its tokens.

Legend: T flat rows, F features of the target, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from furcate.heads.recurrent import Fed, KvSizes, whole
from furcate.models.decoder import Attend, Decoder

__all__ = ["ModelNetwork"]


class ModelNetwork:
    """A decoder behind the protocol of draft heads; its token ids must be the target's."""

    layers: tuple[int, ...] = ()
    state_size = 0
    token_D: Tensor | None = None

    def __init__(self, decoder: Decoder) -> None:
        spec = decoder.spec
        self.decoder = decoder
        self.vocab = spec.vocab_size
        self.kv = KvSizes(spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, states and logits."""
        return self.decoder.dtype

    def parameters(self) -> Iterator[Tensor]:
        """The decoder's."""
        return self.decoder.parameters()

    def buffers(self) -> Iterator[Tensor]:
        """The decoder's."""
        return self.decoder.buffers()

    def fuse(self, features: Tensor | Fed) -> Tensor:
        """There are none, and nothing is made of them."""
        return whole(features)

    def __call__(
        self, tokens_T: Tensor, state: Tensor | Fed, positions_T: Tensor, attend: Attend
    ) -> Tensor:
        """Final hidden states, [T, C]; what came before is in the keys."""
        if isinstance(state, Fed):  # its kernel finds embeddings as well; there is no state to pick
            token = state.named(self.decoder.embedding, tokens_T, None)
            x_TC, _, by = state.read((token,), self.decoder.rope, positions_T)
            return self.decoder.through(x_TC, by, attend, ()).last_TC
        hidden_TC: Tensor = self.decoder(tokens_T, positions_T, attend)
        return hidden_TC

    def logits(self, state_TC: Tensor) -> Tensor:
        """Scores of the next token, [T, V]."""
        return self.decoder.logits(state_TC)

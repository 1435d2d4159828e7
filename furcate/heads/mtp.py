"""Multi-token prediction as a recurrent head: one module, fed with what it gave itself.

Legend: T flat rows, C hidden size, I inputs, D draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from furcate.heads.output import Output, Shared
from furcate.heads.recurrent import Fed, KvSizes, whole
from furcate.heads.spec import MtpSpec
from furcate.models.blocks import Stream
from furcate.models.decoder import Attend, Layer
from furcate.models.linear import Linear
from furcate.models.norm import RmsNorm
from furcate.models.rope import Rope

__all__ = ["Mtp"]


class Mtp(nn.Module):
    """DeepSeek-V3, section 2.2: h' = layer(M [norm(embedding); norm(h)]), embedding first.

    What is fed on is the state behind the module's own final norm, as h is behind the target's;
    so the norm is applied exactly once before scoring.
    """

    def __init__(self, spec: MtpSpec, shared: Shared, token_D: Tensor | None) -> None:
        super().__init__()
        block, like = spec.block, shared.embedding_VC
        size, eps = block.hidden_size, block.rms_norm_eps
        self.spec = spec
        self.blocks = shared.blocks
        self.layers = spec.layers
        self.state_size = size
        self.vocab = block.vocab_size
        self.kv = KvSizes(1, block.num_heads, block.num_kv_heads, block.head_dim)
        self.rope = Rope(block.rope, block.head_dim, like.dtype, like.device)
        self.embedding: Tensor
        self.register_buffer("embedding", shared.embedding_VC, persistent=False)
        self.token_norm = RmsNorm(size, eps, like=like)
        self.state_norm = RmsNorm(size, eps, like=like)
        self.project = Linear(2 * size, size, bias=False, like=like)
        self.layer = Layer(block, 0, like=like)
        self.norm = RmsNorm(size, eps, like=like)
        self.output = Output(shared, token_D, own=spec.own_output)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, states and logits."""
        return self.embedding.dtype

    @property
    def token_D(self) -> Tensor | None:
        """Target id of each draft id, int64 [D]; None: the same ids."""
        return self.output.token_D

    def fuse(self, features: Tensor | Fed) -> Tensor:
        """The target's final state as it is."""
        return whole(features)

    def forward(
        self, tokens_T: Tensor, state: Tensor | Fed, positions_T: Tensor, attend: Attend
    ) -> Tensor:
        """States behind the tokens, normed."""
        if isinstance(state, Fed):
            token = state.named(self.embedding, tokens_T, self.token_norm)
            parts = (token, state.by(self.state_norm))
            both_TI, _, by = state.read(parts, self.rope, positions_T)
        else:
            token_TC = self.token_norm(functional.embedding(tokens_T, self.embedding))
            both_TI, by = torch.cat((token_TC, self.state_norm(state)), 1), self.rope(positions_T)
        stream = Stream(self.blocks.linear(both_TI, self.project))
        stream = self.layer(stream, by, attend, self.blocks)
        _, normed_TC = self.blocks.norm(stream, self.norm)
        return normed_TC

    def final(self, state_TC: Tensor) -> Tensor:
        """What the output matrix reads: the state, which is normed already."""
        return state_TC

    def logits(self, state_TC: Tensor) -> Tensor:
        """Scores of the next token over the draft vocabulary, [T, D]."""
        scores_TD: Tensor = self.output(state_TC)
        return scores_TD

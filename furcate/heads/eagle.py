"""EAGLE-1 and EAGLE-3 networks: one layer that runs on the target's states and then on its own.

Legend: T flat rows, F features of the target, C hidden size of the head, I inputs, D draft
vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from furcate.heads.output import Output, Shared
from furcate.heads.recurrent import Fed, KvSizes, whole
from furcate.heads.spec import EagleSpec
from furcate.kernels.beside import MOST_PARTS
from furcate.models.blocks import Stream
from furcate.models.decoder import Attend, Attention, Layer, Mlp
from furcate.models.linear import Linear
from furcate.models.norm import RmsNorm
from furcate.models.rope import Rope, Turn

__all__ = ["Eagle1", "Eagle3"]


class _Eagle(nn.Module):
    """What both share: embeddings, rotary positions, and how the result is scored."""

    embedding: Tensor
    mlp_norm: RmsNorm
    mlp: Mlp
    more: nn.ModuleList  # layers above the first

    def __init__(self, spec: EagleSpec, shared: Shared, token_D: Tensor | None) -> None:
        super().__init__()
        block, like = spec.block, shared.embedding_VC
        self.spec = spec
        self.blocks = shared.blocks
        self.layers = spec.layers
        self.state_size = block.hidden_size
        self.vocab = block.vocab_size
        self.kv = KvSizes(block.num_layers, block.num_heads, block.num_kv_heads, block.head_dim)
        self.rope = Rope(block.rope, block.head_dim, like.dtype, like.device)
        self.output = Output(shared, token_D, own=spec.own_output, width=block.hidden_size)
        if spec.own_embedding:
            own = like.new_empty(block.vocab_size, block.hidden_size)
            self.embedding = nn.Parameter(own)
        else:
            self.register_buffer("embedding", shared.embedding_VC, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, states and logits."""
        return self.embedding.dtype

    @property
    def token_D(self) -> Tensor | None:
        """Target id of each draft id, int64 [D]; None: the same ids."""
        return self.output.token_D

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Embeddings of int64 tokens: [T, C]."""
        return functional.embedding(tokens_T, self.embedding)

    def _behind(self, stream: Stream, by: Turn, attend: Attend) -> Stream:
        """What the layers make of the stream behind the first one's attention."""
        stream = self.mlp(stream, self.mlp_norm, self.blocks)
        for layer in self.more:
            stream = layer(stream, by, attend, self.blocks)
        return stream


class Eagle3(_Eagle):
    """EAGLE-3 (arXiv:2503.01840, section 3): features of several layers fused, no feature loss.

    The first layer reads the token's embedding and the state before it side by side, each normed;
    further layers are ordinary ones.
    """

    def __init__(self, spec: EagleSpec, shared: Shared, token_D: Tensor | None) -> None:
        super().__init__(spec, shared, token_D)
        block, like = spec.block, shared.embedding_VC
        size, eps = block.hidden_size, block.rms_norm_eps
        width = spec.target_hidden_size
        features = width * len(spec.layers)
        self.fc = Linear(features, size, bias=spec.fc_bias, like=like)
        self.input_norm = RmsNorm(features, eps, like=like) if spec.norm_before_fc else None
        norms = [RmsNorm(width, eps, like=like) for _ in spec.layers] if spec.fc_norm else []
        self.fc_norms = nn.ModuleList(norms)
        self.token_norm = RmsNorm(size, eps, like=like)
        self.state_norm = RmsNorm(size, eps, like=like)
        self.attention = Attention(block, 0, like=like, inputs=2 * size)
        self.mlp_norm = RmsNorm(size, eps, like=like)
        self.mlp = Mlp(block, like=like)
        self.more = nn.ModuleList(Layer(block, i, like=like) for i in range(1, block.num_layers))
        self.norm = RmsNorm(size, eps, like=like)

    def fuse(self, features: Tensor | Fed) -> Tensor:
        """States [T, C] from the target's features, layer after layer."""
        count = len(self.fc_norms)
        together = count <= MOST_PARTS and not (self.input_norm is not None and count)
        if isinstance(features, Fed) and together:
            norms = [cast(RmsNorm, norm) for norm in self.fc_norms]
            if norms:
                return self.blocks.linear(features.parts(norms), self.fc)
            laid = features.beside((features.by(self.input_norm),))
            return self.blocks.linear(laid.all_TI, self.fc)
        features_TF = features.rows.picked() if isinstance(features, Fed) else features
        if self.input_norm is not None:
            features_TF = self.input_norm(features_TF)
        if len(self.fc_norms):
            parts = features_TF.chunk(len(self.fc_norms), 1)
            normed = [norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)]
            features_TF = torch.cat(normed, 1)
        return self.blocks.linear(features_TF, self.fc)

    def forward(
        self, tokens_T: Tensor, state: Tensor | Fed, positions_T: Tensor, attend: Attend
    ) -> Tensor:
        """States behind the tokens, before the norm unless `norm_output`."""
        both_TI, x_TC, by = self._read(tokens_T, state, positions_T)
        qkv_TI = self.blocks.linear(both_TI, self.attention.qkv)
        seen_TI = self.attention.seen(qkv_TI, by, attend, self.blocks)
        stream = self.blocks.linear_add(seen_TI, self.attention.out, x_TC)
        stream = self._behind(stream, by, attend)
        if self.spec.norm_output:
            return self.blocks.norm(stream, self.norm)[1]
        return stream.whole()

    def _read(
        self, tokens_T: Tensor, state: Tensor | Fed, positions_T: Tensor
    ) -> tuple[Tensor, Tensor, Turn]:
        """(embeddings and states side by side, normed; what the first sum adds to; the turn)."""
        if isinstance(state, Fed):
            token = state.named(self.embedding, tokens_T, self.token_norm)
            parts = (token, state.by(self.state_norm))
            both_TI, state_TC, by = state.read(parts, self.rope, positions_T)
            normed_TC = both_TI[:, self.state_size :]
        else:
            state_TC, normed_TC = state, self.state_norm(state)
            both_TI = torch.cat((self.token_norm(self.embed(tokens_T)), normed_TC), 1)
            by = self.rope(positions_T)
        return both_TI, normed_TC if self.spec.norm_before_residual else state_TC, by

    def final(self, state_TC: Tensor) -> Tensor:
        """What the output matrix reads: the state, normed exactly once."""
        final_TC: Tensor = state_TC if self.spec.norm_output else self.norm(state_TC)
        return final_TC

    def logits(self, state_TC: Tensor) -> Tensor:
        """Scores of the next token over the draft vocabulary, [T, D]."""
        if self.spec.norm_output:
            scores_TD: Tensor = self.output(state_TC)
            return scores_TD
        return self.blocks.norm_linear(Stream(state_TC), self.norm, self.output)[1]


class Eagle1(_Eagle):
    """EAGLE-1 (arXiv:2401.15077, section 4.1): embedding and feature in, next feature out.

    Its layers have no norm before attention in the first one, and none at the end: what comes out
    stands for the target's own final state.
    """

    def __init__(self, spec: EagleSpec, shared: Shared, token_D: Tensor | None) -> None:
        super().__init__(spec, shared, token_D)
        block, like = spec.block, shared.embedding_VC
        size = block.hidden_size
        self.fc = Linear(2 * size, size, bias=spec.fc_bias, like=like)
        self.attention = Attention(block, 0, like=like)
        self.mlp_norm = RmsNorm(size, block.rms_norm_eps, like=like)
        self.mlp = Mlp(block, like=like)
        self.more = nn.ModuleList(Layer(block, i, like=like) for i in range(1, block.num_layers))

    def fuse(self, features: Tensor | Fed) -> Tensor:
        """The target's final state as it is."""
        return whole(features)

    def forward(
        self, tokens_T: Tensor, state: Tensor | Fed, positions_T: Tensor, attend: Attend
    ) -> Tensor:
        """Guessed final states of the target behind the tokens."""
        if isinstance(state, Fed):
            token = state.named(self.embedding, tokens_T, None)
            both_TI, _, by = state.read((token, state.by(None)), self.rope, positions_T)
        else:
            both_TI, by = torch.cat((self.embed(tokens_T), state), 1), self.rope(positions_T)
        stream = Stream(self.blocks.linear(both_TI, self.fc))
        stream = self.attention(stream, None, by, attend, self.blocks)
        return self._behind(stream, by, attend).whole()

    def final(self, state_TC: Tensor) -> Tensor:
        """What the output matrix reads: the state as it is."""
        return state_TC

    def logits(self, state_TC: Tensor) -> Tensor:
        """Scores of the next token, [T, D]."""
        scores_TD: Tensor = self.output(state_TC)
        return scores_TD

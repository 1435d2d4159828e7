"""The target network: one decoder for the Llama family; attention is an argument.

Legend: T flat rows of all requests, C hidden size, H query heads, K key/value heads, D head size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from furcate.errors import BadRequest, Unsupported
from furcate.models.blocks import Blocks, Stream, blocks_of
from furcate.models.linear import Linear, Table, can_pack, pack_weight
from furcate.models.norm import RmsNorm
from furcate.models.rope import Rope, Turn, turn
from furcate.models.spec import DecoderSpec

__all__ = ["Attend", "Attention", "Decoder", "Layer", "Mlp", "States", "Turning"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_THD, k_TKD, v_TKD) -> out_THD. Keys are already turned to their positions."""


Turning = Callable[[int, Tensor, tuple[Tensor, Tensor]], Tensor]
"""(layer, qkv_TAD, (cosines, sines)) -> out_THD: an `Attend` may have it as its `turning`.

It takes queries, keys and values side by side and turns the first two on their way to where they
are kept.
"""


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class States:
    """What a pass leaves behind: the final states, and those that a draft head asked for."""

    last_TC: Tensor  # behind the final norm
    features_TF: Tensor  # F = C for each layer asked for, in the order asked; F may be 0


class Attention(nn.Module):
    """Queries, keys and values in one product; how rows see each other is the caller's matter.

    `inputs` is the width of what it reads where that is not the hidden size.
    """

    def __init__(
        self, spec: DecoderSpec, index: int, *, like: Tensor, inputs: int | None = None
    ) -> None:
        super().__init__()
        self.index = index
        self.turned = spec.rope_layers[index]
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.width = spec.num_heads * spec.head_dim
        out = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv = Linear(inputs or spec.hidden_size, out, bias=spec.qkv_bias, like=like)
        self.out = Linear(self.width, spec.hidden_size, bias=spec.o_bias, like=like)
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = RmsNorm(spec.head_dim, spec.rms_norm_eps, like=like)
            self.k_norm = RmsNorm(spec.head_dim, spec.rms_norm_eps, like=like)

    def forward(
        self, stream: Stream, norm: RmsNorm | None, by: Turn, attend: Attend, blocks: Blocks
    ) -> Stream:
        x_TC, qkv_TI = blocks.norm_linear(stream, norm, self.qkv)
        return blocks.linear_add(self.seen(qkv_TI, by, attend, blocks), self.out, x_TC)

    def seen(self, qkv_TI: Tensor, by: Turn, attend: Attend, blocks: Blocks) -> Tensor:
        """What the rows see, all heads side by side, from their queries, keys and values."""
        H, K = self.heads, self.kv_heads
        qkv_TAD = qkv_TI.view(-1, H + 2 * K, self.head_dim)
        turning = _turning(attend)
        if self.turned and self.q_norm is None and turning is not None:
            seen_THD = turning(self.index, qkv_TAD, (by.cos_T1D, by.sin_T1D))
        else:
            qk_TAD, v_TKD = self._normed(qkv_TAD[:, : H + K], blocks), qkv_TAD[:, H + K :]
            if self.turned:
                qk_TAD = turn(qk_TAD, by)
            seen_THD = attend(self.index, qk_TAD[:, :H], qk_TAD[:, H:], v_TKD)
        return seen_THD.reshape(-1, self.width)

    def _normed(self, qk_TAD: Tensor, blocks: Blocks) -> Tensor:
        if self.q_norm is None or self.k_norm is None:
            return qk_TAD
        _, q_THD = blocks.norm(Stream(qk_TAD[:, : self.heads]), self.q_norm)
        _, k_TKD = blocks.norm(Stream(qk_TAD[:, self.heads :]), self.k_norm)
        return torch.cat((q_THD, k_TKD), 1)


def _turning(attend: object) -> Turning | None:
    """Asked for each layer of each pass: a look for the name takes 0.1 us, `isinstance` 11."""
    found: Turning | None = getattr(attend, "turning", None)
    return found


class Mlp(nn.Module):
    """SwiGLU (Shazeer 2020), gate and up in one product."""

    def __init__(self, spec: DecoderSpec, *, like: Tensor) -> None:
        super().__init__()
        size, inner = spec.hidden_size, spec.intermediate_size
        self.gate_up = Linear(size, 2 * inner, bias=spec.mlp_bias, like=like)
        self.down = Linear(inner, size, bias=spec.mlp_bias, like=like)

    def forward(self, stream: Stream, norm: RmsNorm, blocks: Blocks) -> Stream:
        x_TC, inner_TI = blocks.gate_linear(stream, norm, self.gate_up)
        return blocks.linear_add(inner_TI, self.down, x_TC)


class Layer(nn.Module):
    """Attention and MLP, each behind its norm and added to the stream."""

    def __init__(self, spec: DecoderSpec, index: int, *, like: Tensor) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(spec.hidden_size, spec.rms_norm_eps, like=like)
        self.attention = Attention(spec, index, like=like)
        self.mlp_norm = RmsNorm(spec.hidden_size, spec.rms_norm_eps, like=like)
        self.mlp = Mlp(spec, like=like)

    def forward(self, stream: Stream, by: Turn, attend: Attend, blocks: Blocks) -> Stream:
        stream = self.attention(stream, self.attention_norm, by, attend, blocks)
        after: Stream = self.mlp(stream, self.mlp_norm, blocks)
        return after


class Decoder(nn.Module):
    """Tokens and positions in, final hidden states out. Weights are uninitialised until loaded.

    Nothing in `forward` or `logits` waits for the device or branches on data. Raises BadRequest
    for a dtype that is not a floating point type of 16 bits or more.
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        if dtype not in _DTYPES:
            known = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
            raise BadRequest("unknown dtype", field="dtype", value=dtype, hint=f"known: {known}")
        like = torch.empty(0, dtype=dtype, device=device)
        self.spec = spec
        self.blocks = blocks_of(device, dtype)
        self.embedding = nn.Parameter(like.new_empty(spec.vocab_size, spec.hidden_size))
        self.rope = Rope(spec.rope, spec.head_dim, dtype, device)
        self.layers = nn.ModuleList(Layer(spec, i, like=like) for i in range(spec.num_layers))
        self.norm = RmsNorm(spec.hidden_size, spec.rms_norm_eps, like=like)
        self.head = None
        if not spec.tied_embeddings:
            self.head = Linear(spec.hidden_size, spec.vocab_size, bias=False, like=like)
        self._packed_head: Tensor | None = None  # of tied embeddings, whose table stays for lookup

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, hidden states and logits."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Embeddings of int64 tokens: [T, C]."""
        return functional.embedding(tokens_T, self.embedding)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm, [T, C], for int64 tokens at int64 positions."""
        return self.states(tokens_T, positions_T, attend, ()).last_TC

    def states(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, layers: tuple[int, ...]
    ) -> States:
        """The same, and the states of `layers`, counted as transformers' `hidden_states` are.

        State k < num_layers is the stream that enters layer k, state num_layers the final one
        behind the norm.
        """
        return self.through(self.embed(tokens_T), self.rope(positions_T), attend, layers)

    def through(self, x_TC: Tensor, by: Turn, attend: Attend, layers: tuple[int, ...]) -> States:
        """`states` from the embeddings and angles of the rows."""
        stream = Stream(x_TC)
        kept: dict[int, Tensor] = {}
        for index, layer in enumerate(cast(list[Layer], list(self.layers))):
            if index in layers:
                kept[index] = stream.whole()
                stream = Stream(kept[index])
            stream = layer(stream, by, attend, self.blocks)
        _, last_TC = self.blocks.norm(stream, self.norm)
        kept[len(self.layers)] = last_TC
        wanted = [kept[index] for index in layers]
        return States(last_TC, torch.cat(wanted, 1) if wanted else last_TC[:, :0])

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """Scores of the next token, [T, V], from what `forward` returns."""
        matrix = Table(self.embedding, self._packed_head) if self.head is None else self.head
        return self.blocks.linear(hidden_TC, matrix)

    def on(self, blocks: Blocks) -> Self:
        """The same weights, computed with in this way."""
        if blocks is self.blocks:
            return self
        other = copy(self)
        other.blocks = blocks
        return other

    @property
    def can_pack(self) -> bool:
        """Whether `pack` is possible here: float32 on a CPU."""
        return can_pack(self.embedding)

    def pack(self) -> None:
        """Lay copies of the linear weights out for passes of more than a few rows.

        Trees need it: eight rows then cost 1.4 times one row and not 2.3 times (two cores; see
        docs/LOG.md). It takes the memory of the linear weights once more; results stay within
        float32 rounding, and dtype and device are fixed from here on. Raises Unsupported where
        `can_pack` is false.
        """
        if not self.can_pack:
            raise Unsupported(
                "packed weights are for float32 on a CPU",
                field="pack",
                value=f"{self.dtype} on {self.device}",
            )
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
        if self.head is None and self._packed_head is None:
            self._packed_head = pack_weight(self.embedding.detach())

"""Where each stored tensor of a head goes: one name for each, whatever format it came in.

The names are those of EAGLE-3 checkpoints with `layers.0.` (and Qwen3-Next's for the norms of MTP),
so that most formats only need prefixes changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from furcate.heads.eagle import Eagle1, Eagle3
from furcate.heads.medusa import Medusa, Residual
from furcate.heads.mtp import Mtp
from furcate.heads.output import Output, Shared
from furcate.heads.spec import HeadSpec, MedusaSpec, MtpSpec
from furcate.models.decoder import Attention, Layer, Mlp
from furcate.models.linear import Linear
from furcate.models.norm import RmsNorm

__all__ = ["EMBEDDING", "OUTPUT", "Head", "draw", "make", "places"]

Head = Eagle1 | Eagle3 | Mtp | Medusa
Place = tuple[str, Tensor]

EMBEDDING = "embed_tokens.weight"
OUTPUT = "lm_head.weight"


def make(spec: HeadSpec, shared: Shared, token_D: Tensor | None) -> Head:
    """The network of a spec, its own weights uninitialised."""
    if isinstance(spec, MtpSpec):
        return Mtp(spec, shared, token_D)
    if isinstance(spec, MedusaSpec):
        return Medusa(spec, shared, token_D)
    return (Eagle3 if spec.kind == "eagle3" else Eagle1)(spec, shared, token_D)


def draw(spec: HeadSpec) -> Head:
    """The same without memory, to learn names and shapes from."""
    like = torch.empty(0, device="meta")
    matrix_VC = like.new_empty(spec.vocab_size, spec.target_hidden_size)
    token_D = None
    if spec.draft_vocab_size < spec.vocab_size:
        token_D = torch.empty(spec.draft_vocab_size, dtype=torch.int64, device="meta")
    return make(spec, Shared(matrix_VC, matrix_VC), token_D)


def places(head: Head) -> dict[str, Tensor]:
    """The view of a parameter into which each of the head's own tensors is written, by name."""
    if isinstance(head, Medusa):
        return dict(_of_medusa(head))
    if isinstance(head, Mtp):
        return dict(_of_mtp(head))
    return dict(_of_eagle(head))


def _of_eagle(head: Eagle1 | Eagle3) -> Iterator[Place]:
    yield from _split(head.fc, {"fc": -1})
    if isinstance(head, Eagle3):
        yield from _around_eagle3(head)
    yield from _core("layers.0.", head.attention, head.mlp, head.mlp_norm)
    for index, layer in enumerate(head.more, start=1):
        yield from _layer(f"layers.{index}.", layer)
    if head.spec.own_embedding:
        yield EMBEDDING, head.embedding.detach()
    yield from _own_output(head.output, OUTPUT, head.spec)


def _around_eagle3(head: Eagle3) -> Iterator[Place]:
    if head.input_norm is not None:
        yield _norm("input_norm", head.input_norm)
    for index, norm in enumerate(head.fc_norms):
        yield _norm(f"fc_norm.{index}", norm)
    yield _norm("layers.0.input_layernorm", head.token_norm)
    yield _norm("layers.0.hidden_norm", head.state_norm)
    yield _norm("norm", head.norm)


def _of_mtp(head: Mtp) -> Iterator[Place]:
    yield from _split(head.project, {"fc": -1})
    yield _norm("pre_fc_norm_embedding", head.token_norm)
    yield _norm("pre_fc_norm_hidden", head.state_norm)
    yield from _layer("layers.0.", head.layer)
    yield _norm("norm", head.norm)
    yield from _own_output(head.output, OUTPUT, head.spec)


def _of_medusa(head: Medusa) -> Iterator[Place]:
    for index, blocks in enumerate(head.heads):
        assert isinstance(blocks, nn.Sequential)
        for at, block in enumerate(blocks):
            assert isinstance(block, Residual)
            yield from _split(block.linear, {f"heads.{index}.blocks.{at}": -1})
    for index, output in enumerate(head.outputs):
        yield from _own_output(output, f"heads.{index}.{OUTPUT}", head.spec)


def _layer(prefix: str, layer: nn.Module) -> Iterator[Place]:
    assert isinstance(layer, Layer)
    yield _norm(f"{prefix}input_layernorm", layer.attention_norm)
    yield from _core(prefix, layer.attention, layer.mlp, layer.mlp_norm)


def _core(prefix: str, attention: Attention, mlp: Mlp, mlp_norm: RmsNorm) -> Iterator[Place]:
    within = f"{prefix}self_attn."
    q, kv = attention.width, attention.kv_heads * attention.head_dim
    rows = {f"{within}q_proj": q, f"{within}k_proj": kv, f"{within}v_proj": kv}
    yield from _split(attention.qkv, rows)
    yield from _split(attention.out, {f"{within}o_proj": -1})
    if attention.q_norm is not None and attention.k_norm is not None:
        yield _norm(f"{within}q_norm", attention.q_norm)
        yield _norm(f"{within}k_norm", attention.k_norm)
    inner = len(mlp.gate_up.weight) // 2
    yield from _split(mlp.gate_up, {f"{prefix}mlp.gate_proj": inner, f"{prefix}mlp.up_proj": inner})
    yield from _split(mlp.down, {f"{prefix}mlp.down_proj": -1})
    yield _norm(f"{prefix}post_attention_layernorm", mlp_norm)


def _own_output(output: nn.Module, name: str, spec: HeadSpec) -> Iterator[Place]:
    assert isinstance(output, Output)
    if spec.own_output:
        yield name, output.weight.detach()


def _norm(name: str, norm: nn.Module) -> Place:
    assert isinstance(norm, RmsNorm)
    return f"{name}.weight", norm.weight.detach()


def _split(linear: Linear, rows: Mapping[str, int]) -> Iterator[Place]:
    """Weight and bias of a fused layer, cut into its parts by rows; -1 means all rows."""
    start = 0
    for name, count in rows.items():
        stop = None if count < 0 else start + count
        for kind, whole in (("weight", linear.weight), ("bias", linear.bias)):
            if whole is not None:
                yield f"{name}.{kind}", whole.detach()[start:stop]
        start += count

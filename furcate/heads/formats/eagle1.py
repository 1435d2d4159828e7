"""EAGLE-1 and 2 as their authors, SGLang and vLLM keep them: a plain Llama config, no `model.`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from furcate.errors import BadFile, Unsupported
from furcate.heads.formats.configs import block_from_hf, block_to_hf, flag
from furcate.heads.formats.shipment import Shipment, Written, refuse
from furcate.heads.formats.source import Source
from furcate.heads.held import Held
from furcate.heads.places import EMBEDDING
from furcate.heads.spec import EagleSpec
from furcate.models.spec import DecoderSpec

__all__ = [
    "EAGLE1_SGLANG",
    "read_eagle1",
    "read_eagle1_sglang",
    "write_eagle1",
    "write_eagle1_sglang",
]

EAGLE1_SGLANG = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
_KEYS = ("bias", "qkv_bias")
_KINDS = ("llama", "qwen2")
_BIAS = "fc.bias"


def read_eagle1(source: Source, target: DecoderSpec) -> Held:
    """The authors' layout. A missing `bias` means that fc has one, a missing `qkv_bias` none."""
    return _held(source, target, fc_bias=flag(source.config, "bias", True))


def read_eagle1_sglang(source: Source, target: DecoderSpec) -> Held:
    """SGLang's: its fc always has a bias, and one of zeros is none."""
    if _BIAS not in source.tensors:
        return _held(source, target, fc_bias=flag(source.config, "bias", True))
    kept = source.tensors[_BIAS]
    if bool(kept.read().any()):
        return _held(source, target, fc_bias=True)
    tensors = {name: each for name, each in source.tensors.items() if name != _BIAS}
    return _held(replace(source, tensors=tensors), target, fc_bias=False)


def write_eagle1(shipment: Shipment) -> Written:
    """The authors' layout, which carries the embeddings."""
    spec = _checked(shipment, "original")
    refuse("original", {"o_bias": spec.block.o_bias, "mlp_bias": spec.block.mlp_bias})
    config = _config(spec, shipment, "LlamaForCausalLM")
    config |= {"bias": spec.fc_bias, "qkv_bias": spec.block.qkv_bias}
    return Written(config, shipment.own() | shipment.embedding())


def write_eagle1_sglang(shipment: Shipment) -> Written:
    """SGLang's: embeddings and output are the target's, and a bias of fc is always read.

    No key `bias`: SGLang would take it for biases of its attention.
    """
    spec = _checked(shipment, "sglang")
    refuse(
        "sglang",
        {
            "own_embedding": spec.own_embedding,
            "qkv_bias": spec.block.qkv_bias,
            "o_bias": spec.block.o_bias,
            "mlp_bias": spec.block.mlp_bias,
        },
    )
    tensors = shipment.own()
    if _BIAS not in tensors:
        tensors[_BIAS] = torch.zeros(spec.block.hidden_size, dtype=shipment.held.dtype)
    return Written(_config(spec, shipment, EAGLE1_SGLANG[0]), tensors)


def _held(source: Source, target: DecoderSpec, *, fc_bias: bool) -> Held:
    block = block_from_hf(source.config, _KEYS, _KINDS)
    qkv_bias = flag(source.config, "qkv_bias", flag(source.config, "attention_bias", False))
    block = replace(block, qkv_bias=qkv_bias)
    spec = EagleSpec(
        kind="eagle1",
        block=block,
        target_hidden_size=block.hidden_size,
        layers=(target.num_layers,),
        draft_vocab_size=block.vocab_size,
        own_embedding=EMBEDDING in source.tensors,
        fc_bias=fc_bias,
    )
    return Held(spec, source.tensors, fingerprint=source.fingerprint)


def _checked(shipment: Shipment, where: str) -> EagleSpec:
    spec = shipment.held.spec
    if not isinstance(spec, EagleSpec) or spec.kind != "eagle1":
        raise BadFile("is no EAGLE-1 head", field="kind", value=spec.kind)
    refuse(where, {"own_output": spec.own_output, "qk_norm": spec.block.qk_norm})
    if spec.draft_vocab_size != spec.vocab_size:
        raise Unsupported(
            f"EAGLE-1 in {where} scores all tokens",
            field="draft_vocab_size",
            value=spec.draft_vocab_size,
            hint=f"write it with draft_vocab {spec.vocab_size}",
        )
    return spec


def _config(spec: EagleSpec, shipment: Shipment, architecture: str) -> dict[str, Any]:
    # queries, keys and values alone may have biases here, which the key `qkv_bias` says
    block = replace(spec.block, qkv_bias=spec.block.o_bias)
    config: Mapping[str, Any] = block_to_hf(block, shipment.held.dtype)
    return {"architectures": [architecture], **config}

"""Multi-token prediction that lies inside its target: DeepSeek's names, and Qwen3-Next's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from furcate.errors import BadFile, Unsupported, UserError
from furcate.heads.formats.configs import block_from_hf, count
from furcate.heads.formats.source import Source
from furcate.heads.held import Held
from furcate.heads.places import OUTPUT
from furcate.heads.spec import MtpSpec
from furcate.heads.tensor_files import Kept, Kepts
from furcate.models.hf_config import ARCHITECTURES
from furcate.models.hf_module import MODULE_KEYS, MODULES, QWEN_MODULES, QWEN_PREFIX
from furcate.models.spec import DecoderSpec

__all__ = ["MODULES", "QWEN_PREFIX", "read_mtp_deepseek", "read_mtp_qwen"]

_LAYERS = "num_hidden_layers"
_DEEPSEEK = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": OUTPUT,
}
_AROUND = {"fc.weight", "norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"}
_COPY = "embed_tokens.weight"
_TABLE = "model.embed_tokens.weight"
# parts of tensor names that give away layers which are not Llama's
_FOREIGN = {
    "experts": "a mixture of experts",
    "mlp.gate.weight": "a mixture of experts",
    "kv_a_proj": "multi-head latent attention",
    "kv_b_proj": "multi-head latent attention",
    "linear_attn": "linear attention",
    "indexer": "sparse attention",
}
_STAGE = re.compile(r"mtp\.\d+\.")


def read_mtp_deepseek(source: Source, target: DecoderSpec) -> Held:
    """Names `model.layers.{L}.`, L the target's number of layers."""
    layers = count(source.config, _LAYERS)
    found = _under(source.tensors, f"model.layers.{layers}.")
    if not found:
        raise BadFile(
            "are promised by the config, but there are none",
            field=f"model.layers.{layers}.",
            hint="the module was not uploaded with its target",
        )
    _refuse_foreign(found)
    if count(source.config, MODULES) != 1:
        raise Unsupported(
            "modules of one further token each are not chained; one that is reused is read",
            field=MODULES,
            value=source.config[MODULES],
        )
    tensors = {_DEEPSEEK.get(name, f"layers.0.{name}"): kept for name, kept in found.items()}
    faults = _unlike_target(tensors.pop(f"layers.0.{_COPY}", None), source.tensors.get(_TABLE))
    head = source.tensors.get(OUTPUT, source.tensors.get(_TABLE))
    if OUTPUT in tensors and _same(tensors[OUTPUT], head):
        del tensors[OUTPUT]
    return _held(source, target, tensors, faults)


def read_mtp_qwen(source: Source, target: DecoderSpec) -> Held:
    """Names `mtp.`; embeddings and output are the target's."""
    for name in source.tensors:
        if _STAGE.match(name):
            raise Unsupported("stages of DSpark are not multi-token prediction", field=name)
    found = _under(source.tensors, QWEN_PREFIX)
    _refuse_foreign(found)
    modules = source.config.get(QWEN_MODULES, source.config.get(MODULES, 1))
    if modules != 1 or any(name.startswith("layers.1.") for name in found):
        raise Unsupported("modules of several layers are not read", field=QWEN_MODULES)
    tensors = {
        name if name in _AROUND or name.startswith("layers.0.") else QWEN_PREFIX + name: kept
        for name, kept in found.items()
    }
    return _held(source, target, tensors, ())


def _held(
    source: Source, target: DecoderSpec, tensors: Kepts, faults: tuple[UserError, ...]
) -> Held:
    block = block_from_hf(source.config, MODULE_KEYS, tuple(ARCHITECTURES))
    spec = MtpSpec(
        block=replace(block, num_layers=1, rope_layers=(True,)),
        layers=(target.num_layers,),
        draft_vocab_size=block.vocab_size,
        own_output=OUTPUT in tensors,
    )
    return Held(spec, tensors, fingerprint=source.fingerprint, faults=faults)


def _under(tensors: Kepts, prefix: str) -> dict[str, Kept]:
    return {
        name.removeprefix(prefix): kept for name, kept in tensors.items() if name.startswith(prefix)
    }


def _refuse_foreign(tensors: Mapping[str, Any]) -> None:
    for name in tensors:
        for part, what in _FOREIGN.items():
            if part in name:
                raise Unsupported(
                    f"the module has {what}; only plain layers as Llama's are computed", field=name
                )


def _unlike_target(copy: Kept | None, table: Kept | None) -> tuple[UserError, ...]:
    if copy is None or _same(copy, table):
        return ()
    return (
        BadFile(
            f"must equal {_TABLE}, of which it is a copy",
            field=copy.name,
            hint="an MTP module reads the target's embeddings",
        ),
    )


def _same(one: Kept, other: Kept | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one.read(), other.read())

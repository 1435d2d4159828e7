"""Medusa as its authors keep it, and in vLLM's former layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from furcate.errors import BadFile, Unsupported
from furcate.heads.formats.configs import count, flag, must_be, refuse_unknown
from furcate.heads.formats.draft_ids import rows_in_order
from furcate.heads.formats.shipment import Shipment, Written, refuse
from furcate.heads.formats.source import MEDUSA_PICKLE, Source
from furcate.heads.held import Held
from furcate.heads.places import OUTPUT
from furcate.heads.spec import MedusaSpec
from furcate.heads.tensor_files import Kept, Kepts
from furcate.models.spec import DecoderSpec

__all__ = ["read_medusa", "read_medusa_vllm", "write_medusa"]

_HARMLESS = frozenset({"transformers_version", "torch_dtype", "dtype", "_name_or_path", "version"})
_KEYS = _HARMLESS | {
    "base_model_name_or_path",
    "medusa_num_heads",
    "medusa_num_layers",
    "model_type",
}
_VLLM_KEYS = _HARMLESS | {
    "architectures",
    "hidden_size",
    "logit_scale",
    "max_paths",
    "max_seq_len",
    "medusa_fc_bias",
    "model_type",
    "num_heads",
    "num_hidden_layers",
    "num_lookahead_tokens",
    "original_lm_head",
    "topk",
    "truncated_vocab_size",
    "vocab_size",
}
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_MATRIX = re.compile(r"(\d+)\.(\d+)\.weight")
_VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_VLLM_MATRIX = re.compile(r"lm_heads\.(\d+)\.weight")
_VLLM_PREFIX = "medusa_heads."
_TOKEN_MAP = "token_map"


def read_medusa(source: Source, target: DecoderSpec) -> Held:
    """The authors' layout. Heads are counted in the file: uploaded configs count wrongly."""
    refuse_unknown(source.config, _KEYS)
    must_be(source.config, "model_type", "llama", "mistral", "medusa", why="others are not known")
    layers = count(source.config, "medusa_num_layers", 1)
    tensors = dict(_ours(source.tensors, layers))
    first = tensors.get(f"heads.0.{OUTPUT}")
    if first is None or len(first.shape) != 2:
        raise BadFile("is missing, or is no matrix", field=f"0.{layers}.weight")
    vocab, hidden = first.shape
    heads = 1 + max(int(found[1]) for name in source.tensors if (found := _MATRIX.fullmatch(name)))
    spec = MedusaSpec(
        hidden_size=hidden,
        vocab_size=vocab,
        num_heads=heads,
        num_layers=layers,
        layers=(target.num_layers,),
        draft_vocab_size=vocab,
        own_output=True,
        bias=True,
    )
    told = count(source.config, "medusa_num_heads", heads)
    remarks = () if told == heads else (f"config.json says {told} heads, the file has {heads}",)
    return Held(spec, tensors, fingerprint=source.fingerprint, remarks=remarks)


def read_medusa_vllm(source: Source, target: DecoderSpec) -> Held:
    """vLLM's former layout: blocks and output matrices apart, at times over fewer tokens."""
    config = source.config
    refuse_unknown(config, _VLLM_KEYS)
    must_be(config, "logit_scale", 1, 1.0, why="scores are not scaled")
    heads, vocab = count(config, "num_heads"), count(config, "vocab_size")
    draft = count(config, "truncated_vocab_size", vocab)
    tensors = {name.removeprefix(_VLLM_PREFIX): kept for name, kept in source.tensors.items()}
    token_map = tensors.pop(_TOKEN_MAP, None)
    if flag(config, "original_lm_head", False):
        tensors.update(_for_each(tensors.pop(OUTPUT, None), heads))
    order_D = None if token_map is None else _order(token_map, draft)
    spec = MedusaSpec(
        hidden_size=count(config, "hidden_size"),
        vocab_size=vocab,
        num_heads=heads,
        num_layers=count(config, "num_hidden_layers", 1),
        layers=(target.num_layers,),
        draft_vocab_size=draft,
        own_output=True,
        bias=flag(config, "medusa_fc_bias", False),
    )
    token_D = None
    if token_map is not None and order_D is not None and draft < vocab:
        token_D = token_map.read().to(torch.int64)[order_D]
    kept = dict(_ours_from_vllm(tensors, order_D))
    return Held(spec, kept, token_D=token_D, fingerprint=source.fingerprint)


def write_medusa(shipment: Shipment) -> Written:
    """The authors' layout: every head with a whole output matrix of its own."""
    spec = shipment.held.spec
    if not isinstance(spec, MedusaSpec):
        raise BadFile("is no Medusa", field="kind", value=spec.kind)
    refuse("medusa_lm_head.pt", {"blocks without bias": not spec.bias})
    if spec.draft_vocab_size != spec.vocab_size:
        raise Unsupported(
            "heads of this layout score all tokens",
            field="draft_vocab_size",
            value=spec.draft_vocab_size,
            hint=f"write it with draft_vocab {spec.vocab_size}",
        )
    config = {
        "medusa_num_heads": spec.num_heads,
        "medusa_num_layers": spec.num_layers,
        "base_model_name_or_path": shipment.verifier,
    }
    return Written(config, dict(_theirs(shipment, spec)), MEDUSA_PICKLE)


def _ours(tensors: Kepts, layers: int) -> Iterator[tuple[str, Kept]]:
    """`0.1.linear.weight` is block 1 of head 0, `0.2.weight` its output matrix."""
    for name, kept in tensors.items():
        if found := _BLOCK.fullmatch(name):
            yield f"heads.{found[1]}.blocks.{found[2]}.{found[3]}", kept
        elif (found := _MATRIX.fullmatch(name)) and int(found[2]) == layers:
            yield f"heads.{found[1]}.{OUTPUT}", kept
        else:
            yield name, kept


def _ours_from_vllm(tensors: Kepts, order_D: Tensor | None) -> Iterator[tuple[str, Kept]]:
    for name, kept in tensors.items():
        if found := _VLLM_BLOCK.fullmatch(name):
            yield f"heads.{found[1]}.blocks.{found[2]}.{found[3]}", kept
        elif found := _VLLM_MATRIX.fullmatch(name):
            matrix = kept if order_D is None else rows_in_order(kept, order_D)
            yield f"heads.{found[1]}.{OUTPUT}", matrix
        else:
            yield name, kept


def _theirs(shipment: Shipment, spec: MedusaSpec) -> Iterator[tuple[str, Tensor]]:
    own = shipment.own()
    rows = {} if spec.own_output else shipment.rows()
    for head in range(spec.num_heads):
        for block in range(spec.num_layers):
            for kind in ("weight", "bias"):
                yield f"{head}.{block}.linear.{kind}", own[f"heads.{head}.blocks.{block}.{kind}"]
        matrix = own[f"heads.{head}.{OUTPUT}"] if spec.own_output else rows[OUTPUT]
        yield f"{head}.{spec.num_layers}.weight", matrix


def _for_each(matrix: Kept | None, heads: int) -> Mapping[str, Kept]:
    """All heads score with one matrix: the original one of the target, stored once."""
    if matrix is None:
        raise BadFile("is missing", field=OUTPUT, hint="original_lm_head is true")
    return {f"lm_heads.{head}.weight": matrix for head in range(heads)}


def _order(token_map: Kept, draft: int) -> Tensor:
    if token_map.dtype not in (torch.int64, torch.int32) or token_map.shape != (draft,):
        found: Any = (token_map.dtype, token_map.shape)
        raise BadFile(f"must hold {draft} whole numbers", field=_TOKEN_MAP, value=found)
    return token_map.read().to(torch.int64).argsort()

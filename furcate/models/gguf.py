"""Loads a GGUF file: metadata to a spec, each tensor dequantised straight into its place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gguf import dequantize
from torch import Tensor

from furcate.errors import Unsupported
from furcate.gguf_file import GgufTensor, GgufValue, read_gguf
from furcate.models.decoder import Decoder
from furcate.models.gguf_spec import spec_from_gguf
from furcate.models.spec import DecoderSpec
from furcate.models.weights import Stored, build

__all__ = ["QUANTISATIONS", "load_gguf"]

QUANTISATIONS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

_ROPE_DIVISORS = "rope_freqs.weight"
_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def load_gguf(path: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder with the dequantised weights of a GGUF file.

    Raises BadFile for a file that is truncated, damaged or incomplete, Unsupported for an
    architecture, quantisation or metadata key that furcate does not know.
    """
    file = read_gguf(path)
    _refuse_splits(file.metadata)
    for tensor in file.tensors:
        _check_quantisation(tensor)
    tensors = {tensor.name: tensor for tensor in file.tensors}
    divisors = tensors.pop(_ROPE_DIVISORS, None)
    spec = spec_from_gguf(
        file.metadata,
        {name: tensor.shape for name, tensor in tensors.items()},
        () if divisors is None else tuple(_read(path, divisors).tolist()),
    )
    heads = _permuted_heads(file.metadata, spec)
    stored = {_hf_name(name): _stored(path, tensor, heads) for name, tensor in tensors.items()}
    return build(spec, stored, dtype, device)


def _refuse_splits(metadata: Mapping[str, GgufValue]) -> None:
    if metadata.get("split.count", 1) not in (0, 1):
        raise Unsupported(
            "the model is split over several files",
            field="split.count",
            value=metadata["split.count"],
            hint="merge them with `llama-gguf-split --merge`",
        )


def _check_quantisation(tensor: GgufTensor) -> None:
    if tensor.kind.name not in QUANTISATIONS:
        raise Unsupported(
            "unknown quantisation",
            field=tensor.name,
            value=tensor.kind.name,
            hint=f"known: {', '.join(QUANTISATIONS)}",
        )


def _hf_name(name: str) -> str:
    outer, _, kind = name.rpartition(".")
    if outer in _OUTER:
        return f"{_OUTER[outer]}.{kind}"
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _INNER:
        return name  # no place will be found for it, and it is refused by this name
    return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"


def _permuted_heads(metadata: Mapping[str, GgufValue], spec: DecoderSpec) -> dict[str, int]:
    """Heads of the tensors in which llama.cpp's converter pairs 2i with 2i + 1, not i with i + D/2.

    It does so for the architecture `llama` alone.
    """
    if metadata["general.architecture"] != "llama":
        return {}
    return {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}


def _stored(path: Path, tensor: GgufTensor, heads: Mapping[str, int]) -> Stored:
    match = _BLOCK.fullmatch(tensor.name)
    count = heads.get(match[2]) if match is not None else None
    if count is None:
        return Stored(tensor.name, tensor.shape, partial(_read, path, tensor))
    return Stored(tensor.name, tensor.shape, partial(_read_permuted, path, tensor, count))


def _read(path: Path, tensor: GgufTensor) -> Tensor:
    raw = np.fromfile(path, np.uint8, tensor.size, offset=tensor.start)
    # row by row: the dequantiser works on the last axis
    values = dequantize(raw.reshape(*tensor.shape[:-1], -1), tensor.kind)
    return torch.from_numpy(values.reshape(tensor.shape))


def _read_permuted(path: Path, tensor: GgufTensor, heads: int) -> Tensor:
    """From interleaved pairs (2i, 2i + 1) back to pairs (i, i + D/2), head by head."""
    rows = _read(path, tensor)
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)

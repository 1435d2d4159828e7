"""Small random networks: of transformers, of furcate, and written as GGUF."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from furcate.models.decoder import Decoder
from furcate.models.spec import DecoderSpec, RopeSpec
from furcate.models.weights import places

MAX_POSITION = 128
_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_POSITION,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Small:
    """One architecture and what differs from the common small config."""

    name: str
    kind: str
    changes: Mapping[str, Any] = field(default_factory=dict)


def _rope(kind: str, theta: float = 10000.0, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **numbers}}


_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32}

SMALL = (
    Small("llama", "llama"),
    Small("llama_tied", "llama", {"tie_word_embeddings": True}),
    Small("llama_no_groups", "llama", {"num_key_value_heads": 6}),
    Small("llama_wide_heads", "llama", {"head_dim": 16}),
    Small("llama_attention_bias", "llama", {"attention_bias": True}),
    Small("llama_mlp_bias", "llama", {"mlp_bias": True}),
    Small("llama_linear", "llama", _rope("linear", factor=4.0)),
    Small("llama_llama3", "llama", _rope("llama3", 500.0, **_LLAMA3)),
    Small("llama_yarn", "llama", _rope("yarn", **_YARN)),
    Small("llama_yarn_ramp", "llama", _rope("yarn", **_YARN, truncate=False, beta_fast=16.0)),
    Small("llama_yarn_mscale", "llama", _rope("yarn", **_YARN, mscale=0.7, mscale_all_dim=0.4)),
    Small("llama_yarn_factor", "llama", _rope("yarn", **_YARN, attention_factor=1.3)),
    Small("mistral", "mistral", {"sliding_window": None}),
    Small("mistral_wide_window", "mistral", {"sliding_window": MAX_POSITION}),
    Small("qwen2", "qwen2", _rope("default", 1000000.0)),
    Small("qwen2_tied", "qwen2", {"tie_word_embeddings": True}),
    Small("qwen3", "qwen3", _rope("default", 1000000.0)),
    Small("qwen3_tied_bias", "qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    Small("smollm3", "smollm3", _rope("default", 5000000.0)),
    Small("smollm3_every_other", "smollm3", {"no_rope_layer_interval": 2}),
    Small("smollm3_listed", "smollm3", {"no_rope_layers": [0, 1, 1, 0], "attention_bias": True}),
)


def small(name: str) -> Small:
    """The entry of SMALL with this name."""
    return next(entry for entry in SMALL if entry.name == name)


def hf_model(entry: Small, seed: int = 0) -> Any:
    """A transformers model with random weights that make its laws far from flat."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {k: v for k, v in _SIZES.items() if k != "head_dim" or entry.kind != "smollm3"}
    config = AutoConfig.for_model(entry.kind, **{**sizes, **entry.changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    fill_randomly(dict(model.named_parameters()), seed)
    return model


def fill_randomly(tensors: Mapping[str, Tensor], seed: int) -> None:
    """Norms near one, biases of size 0.3, the rest normal with gain 1.5."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(tensors.items()):
            noise = torch.randn(tensor.shape, generator=rng)
            if "norm" in name:
                noise = 1 + 0.2 * noise
            elif name.endswith("bias"):
                noise *= 0.3
            elif "embed" not in name:
                noise *= 1.5 / tensor.shape[-1] ** 0.5
            tensor.copy_(noise)


def save_hf(entry: Small, folder: Path, seed: int = 0) -> Any:
    """Save a random model as transformers does, and return it."""
    model = hf_model(entry, seed)
    model.save_pretrained(folder)
    return model


def change_config(folder: Path, *, without: tuple[str, ...] = (), **changes: Any) -> None:
    """Edit config.json in place."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    kept = {key: value for key, value in config.items() if key not in without}
    path.write_text(json.dumps({**kept, **changes}))


def tiny_decoder(dtype: torch.dtype = torch.float32, seed: int = 0, vocab: int = 64) -> Decoder:
    """A random furcate decoder of two layers whose laws are far from flat; on the CPU."""
    spec = DecoderSpec(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        max_position=4096,
        rope=RopeSpec(theta=10000.0),
        rope_layers=(True, True),
        qkv_bias=True,
    )
    decoder = Decoder(spec, dtype, torch.device("cpu"))
    fill_randomly(places(decoder), seed)
    return decoder.requires_grad_(False)


@dataclass(frozen=True)
class GgufRecipe:
    """How `write_gguf` stores a model: its architecture, types, and further metadata.

    `kind` is the type of matrices; norms and biases stay F32.
    """

    architecture: str = "llama"
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
    metadata: Mapping[str, Any] = field(default_factory=dict)  # without the architecture's prefix
    keys: Mapping[str, Any] = field(default_factory=dict)  # metadata by full keys
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)  # further tensors


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}


def gguf_name(name: str) -> str:
    """A tensor's name in GGUF files from its name in transformers."""
    for theirs, ours in _GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def write_gguf(path: Path, config: Any, weights: Mapping[str, Tensor], recipe: GgufRecipe) -> None:
    """Write weights, named as in transformers, the way llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, recipe.architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_token_list(["a", "b", "c"])
    for key, value in recipe.metadata.items():
        _add(writer, f"{recipe.architecture}.{key}", value)
    for key, value in recipe.keys.items():
        _add(writer, key, value)
    for name, tensor in weights.items():
        array = tensor.detach().float().numpy()
        if recipe.architecture == "llama":
            array = _permuted(name, array, config)
        kind = recipe.kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        _add_tensor(writer, gguf_name(name), array, kind)
    for name, array in recipe.extra.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: gguf.GGMLQuantizationType
) -> None:
    stored = quantised(array, kind)
    writer.add_tensor(name, stored, raw_dtype=kind)


def quantised(array: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Bytes of an array; where gguf cannot quantise, random blocks with small scales instead."""
    scales = _SCALES_AT.get(kind.name)
    if scales is None:
        return gguf.quantize(np.ascontiguousarray(array), kind)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(array.size)
    blocks = array.size // per_block
    raw = rng.integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    for at in scales:
        halves = rng.uniform(1e-4, 1e-3, blocks).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8).reshape(blocks, 2)
    return raw.reshape(*array.shape[:-1], -1)


# where the 16-bit scales stand in a block (ggml, ggml-common.h)
_SCALES_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def _permuted(name: str, array: np.ndarray, config: Any) -> np.ndarray:
    """Pairs (i, i + D/2) become neighbours, as llama.cpp's converter writes q and k."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((n for part, n in heads.items() if part in name), None)
    if count is None:
        return array
    pairs = array.reshape(count, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))

"""Reads and writes what configs of heads have in common: typed keys, and the layers' own sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from furcate.errors import BadFile, Unsupported
from furcate.models.hf_config import spec_from_hf_config
from furcate.models.spec import DecoderSpec, RopeSpec

__all__ = [
    "block_from_hf",
    "block_to_hf",
    "count",
    "flag",
    "layer_ids",
    "must_be",
    "refuse_unknown",
]


_SCALING_KEYS = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor"),
}


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """true or false; null counts as absent."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadFile("must be true or false", field=key, value=value)
    return value


def count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number from 1 on; null counts as absent, and absent without default is an error."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise BadFile("is missing", field=key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadFile("must be a whole number from 1 on", field=key, value=value)
    return value


def layer_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...] | None:
    """A list of whole numbers; None where it is absent, null or empty."""
    value = config.get(key)
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise BadFile("must list whole numbers", field=key, value=value)
    return tuple(value)


def must_be(config: Mapping[str, Any], key: str, *allowed: object, why: str) -> None:
    """Refuse any other value of a key that may also be absent or null."""
    value = config.get(key)
    if value is not None and value not in allowed:
        raise Unsupported(f"must be {allowed[0]!r}: {why}", field=key, value=value)


def refuse_unknown(config: Mapping[str, Any], known: Collection[str], where: str = "") -> None:
    """Refuse keys by name that might change what a head computes."""
    for key, value in config.items():
        if key not in known:
            raise Unsupported(
                "unknown here, and it might change the computation",
                field=f"{where}{key}",
                value=value,
                hint="if it does not, remove it from config.json",
            )


def block_from_hf(
    config: Mapping[str, Any], own: Collection[str], kinds: Collection[str]
) -> DecoderSpec:
    """A head's layers, from a config in transformers' style.

    Args:
        own: keys that speak of the head and not of its layers.
        kinds: values of model_type whose layers this format knows.
    """
    if config.get("model_type") not in kinds:
        raise Unsupported(
            "heads with such layers are not read",
            field="model_type",
            value=config.get("model_type"),
            hint=f"known: {', '.join(kinds)}",
        )
    apart = {*own, "architectures"}
    spec = spec_from_hf_config({key: value for key, value in config.items() if key not in apart})
    return replace(spec, tied_embeddings=False)


def block_to_hf(block: DecoderSpec, dtype: torch.dtype) -> dict[str, Any]:
    """The inverse for layers of Llama or Qwen 3. Raises Unsupported for what no key can say."""
    if not all(block.rope_layers):
        raise Unsupported("layers without positions cannot be written", field="rope_layers")
    if block.qkv_bias != block.o_bias:
        raise Unsupported(
            "biases of queries, keys and values without one of the output cannot be written",
            field="qkv_bias",
            value=block.qkv_bias,
        )
    if block.qk_norm and block.mlp_bias:
        raise Unsupported("Qwen 3 has no such bias", field="mlp_bias", value=True)
    config = {
        "model_type": "qwen3" if block.qk_norm else "llama",
        "vocab_size": block.vocab_size,
        "hidden_size": block.hidden_size,
        "intermediate_size": block.intermediate_size,
        "num_hidden_layers": block.num_layers,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "head_dim": block.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": block.rms_norm_eps,
        "max_position_embeddings": block.max_position,
        "attention_bias": block.qkv_bias,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if not block.qk_norm:
        config["mlp_bias"] = block.mlp_bias
    return config | {"rope_theta": block.rope.theta, "rope_scaling": _scaling(block.rope)}


def _scaling(rope: RopeSpec) -> dict[str, Any] | None:
    if rope.kind == "table":
        raise Unsupported(
            "a table of frequencies cannot be written",
            field="rope",
            value=rope.kind,
            hint="train the head on the safetensors of its target",
        )
    if rope.kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "linear":
        return scaling
    scaling["original_max_position_embeddings"] = rope.original_max_position
    return scaling | {name: getattr(rope, name) for name in _SCALING_KEYS[rope.kind]}

"""Reads a network's description out of GGUF metadata, refusing what it does not know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from furcate.errors import BadFile, Unsupported
from furcate.models.spec import DecoderSpec, RopeSpec, check_layers

__all__ = ["ARCHITECTURES", "spec_from_gguf"]

ARCHITECTURES = ("llama", "qwen2")

# under "<architecture>."; everything else there is refused, since llama.cpp would compute with it
_KNOWN = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.finetuned",  # says how the weights were made
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "vocab_size",
    }
)
_HARMLESS_AT_ZERO = frozenset({"expert_count", "expert_used_count", "attention.sliding_window"})


class _Metadata:
    """Typed look-ups of one architecture's keys; what is wrong is named by its full key."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.prefix = f"{architecture}."

    def refuse_unknown(self) -> None:
        for key, value in self.metadata.items():
            name = key.removeprefix(self.prefix)
            if not key.startswith(self.prefix) or name in _KNOWN:
                continue
            if name in _HARMLESS_AT_ZERO and value == 0:
                continue
            raise Unsupported(
                "furcate does not compute with this",
                field=key,
                value=value,
                hint="use another file",
            )

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadFile("must be one whole number", field=self.prefix + name, value=value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BadFile("must be a number", field=self.prefix + name, value=value)
        return float(value)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.metadata

    def text(self, name: str, default: str) -> str:
        return str(self._get(name, default))

    def _get(self, name: str, default: object) -> object:
        value = self.metadata.get(self.prefix + name, default)
        if value is None:
            raise BadFile("metadata is missing", field=self.prefix + name)
        return value


def spec_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], divisors: tuple[float, ...]
) -> DecoderSpec:
    """The network described by `metadata`.

    Args:
        metadata: all keys of the file.
        shapes: of its tensors, rows first; biases and tied embeddings are told by presence.
        divisors: contents of `rope_freqs.weight`, empty where the file has none.

    Raises Unsupported for an architecture or key that furcate does not compute, BadFile for
    values that are missing or contradict each other.
    """
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise Unsupported(
            "unknown architecture",
            field="general.architecture",
            value=architecture,
            hint=f"known in GGUF files: {', '.join(ARCHITECTURES)}; others load from safetensors",
        )
    values = _Metadata(metadata, architecture)
    values.refuse_unknown()
    heads = values.integer("attention.head_count")
    layers = check_layers(f"{architecture}.block_count", values.integer("block_count"))
    if "token_embd.weight" not in shapes:
        raise BadFile("tensor is missing", field="token_embd.weight")
    spec = DecoderSpec(
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=values.integer("embedding_length"),
        intermediate_size=values.integer("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=values.integer("attention.head_count_kv", heads),
        head_dim=_head_dim(values, heads),
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        max_position=values.integer("context_length"),
        rope=_rope(values, divisors),
        rope_layers=(True,) * layers,
        tied_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
    )
    for name, told in (("vocab_size", spec.vocab_size), ("rope.dimension_count", spec.head_dim)):
        _check_same(values, name, told)
    return spec


def _head_dim(values: _Metadata, heads: int) -> int:
    hidden = values.integer("embedding_length")
    if values.has("attention.key_length"):
        head_dim = values.integer("attention.key_length")
    elif heads > 0 and hidden % heads == 0:
        head_dim = hidden // heads
    else:
        raise BadFile(
            f"must divide {hidden}", field=f"{values.prefix}attention.head_count", value=heads
        )
    _check_same(values, "attention.value_length", head_dim)
    return head_dim


def _check_same(values: _Metadata, name: str, told: int) -> None:
    if values.integer(name, told) != told:
        raise Unsupported(
            f"must be {told} here", field=values.prefix + name, value=values.integer(name)
        )


def _rope(values: _Metadata, divisors: tuple[float, ...]) -> RopeSpec:
    theta = values.number("rope.freq_base", 10000.0)
    kind = values.text("rope.scaling.type", "none")
    if kind == "none":
        # a factor without a type would be applied by llama.cpp as linear scaling
        for name in ("factor", "attn_factor"):
            if values.number(f"rope.scaling.{name}", 1.0) not in (0.0, 1.0):
                raise Unsupported(
                    "needs rope.scaling.type beside it", field=f"{values.prefix}rope.scaling.{name}"
                )
        return RopeSpec(theta, "table", divisors=divisors) if divisors else RopeSpec(theta)
    if divisors:
        raise Unsupported(
            f"cannot stand beside rope.scaling.type {kind}", field="rope_freqs.weight"
        )
    factor = values.number("rope.scaling.factor")
    if kind == "linear":
        return RopeSpec(theta, "linear", factor=factor)
    if kind != "yarn":
        raise Unsupported(
            "unknown rope scaling",
            field=f"{values.prefix}rope.scaling.type",
            value=kind,
            hint="known: none, linear, yarn",
        )
    # llama.cpp: magnitude 1 + 0.1 ln(factor), times the file's own factor
    magnitude = 1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0
    return RopeSpec(
        theta,
        "yarn",
        factor=factor,
        original_max_position=values.integer("rope.scaling.original_context_length"),
        attention_factor=magnitude * values.number("rope.scaling.attn_factor", 1.0),
    )

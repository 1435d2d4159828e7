"""What a target network is, as numbers alone: the same record whatever file it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from furcate.errors import BadFile

__all__ = ["MAX_LAYERS", "DecoderSpec", "RopeSpec", "ScalingKind", "check_layers"]

ScalingKind = Literal["none", "linear", "llama3", "yarn", "table"]

MAX_LAYERS = 1024  # far above any network, far below what a damaged file may claim


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions (RoFormer, section 3.4) and how their frequencies were stretched.

    `table` divides each base frequency by its entry of `divisors` (the form in which GGUF files
    carry Llama 3.1's scaling). Fields that `kind` does not use keep their defaults.
    """

    theta: float
    kind: ScalingKind = "none"
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position: int = 0  # llama3, yarn: positions of the first training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole numbers as borders of the ramp
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    divisors: tuple[float, ...] = ()  # table: head_dim / 2 numbers

    def __post_init__(self) -> None:
        for name in ("theta", "factor", "attention_factor", "beta_fast", "beta_slow"):
            _check_positive(f"rope.{name}", getattr(self, name))
        if self.theta <= 1:
            raise BadFile("must be above 1", field="rope.theta", value=self.theta)
        if self.kind in ("llama3", "yarn"):
            _check_positive("rope.original_max_position", self.original_max_position)
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise BadFile(
                f"must lie between 0 and high_freq_factor = {self.high_freq_factor}",
                field="rope.low_freq_factor",
                value=self.low_freq_factor,
            )
        for divisor in self.divisors:
            _check_positive("rope.divisors", divisor)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder of the Llama family: sizes, biases, norms and rotary positions.

    `rope_layers[i]` is false where layer i sees no positions (NoPE). Raises BadFile for sizes
    that do not fit together.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeSpec
    rope_layers: tuple[bool, ...]
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type in ("int", "float"):
                _check_positive(field.name, getattr(self, field.name))
        if self.num_heads % self.num_kv_heads:
            raise BadFile(
                f"must divide num_heads = {self.num_heads}",
                field="num_kv_heads",
                value=self.num_kv_heads,
            )
        if self.head_dim % 2:
            raise BadFile("must be even", field="head_dim", value=self.head_dim)
        _check_length("rope_layers", len(self.rope_layers), self.num_layers)
        if self.rope.kind == "table":
            _check_length("rope.divisors", len(self.rope.divisors), self.head_dim // 2)


def check_layers(field: str, layers: int) -> int:
    """The number of layers, believed only up to MAX_LAYERS. Raises BadFile beyond."""
    if not 1 <= layers <= MAX_LAYERS:
        raise BadFile(f"must be 1 to {MAX_LAYERS}", field=field, value=layers)
    return layers


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise BadFile("must be a positive number", field=name, value=value)


def _check_length(name: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise BadFile(f"must have {wanted} entries", field=name, value=found)

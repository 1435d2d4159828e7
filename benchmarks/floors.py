"""The least time that a pass of a target can take on a device whose ceilings are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from furcate.models.spec import DecoderSpec

__all__ = ["Floor", "floor_of", "kv_bytes", "weight_bytes"]


@dataclass(frozen=True)
class Floor:
    """What a device does at most in a millisecond."""

    bytes: float
    operations: float

    @classmethod
    def of(cls, top: Mapping[str, float]) -> Floor:
        """From measured ceilings."""
        return cls(top["memory_gb_per_s"] * 1e6, top["bf16_tflop_per_s"] * 1e9)

    def ms(self, moved: float, operations: float) -> float:
        """Whichever of the two takes longer."""
        return max(moved / self.bytes, operations / self.operations)


def weight_bytes(spec: DecoderSpec, itemsize: int = 2) -> int:
    """Of all that is read once a pass: the layers, and the matrix of scores."""
    return itemsize * (spec.num_layers * _layer(spec) + spec.vocab_size * spec.hidden_size)


def kv_bytes(spec: DecoderSpec, tokens: int, itemsize: int = 2) -> int:
    """Keys and values of so many tokens, all layers."""
    return 2 * itemsize * spec.num_layers * spec.num_kv_heads * spec.head_dim * tokens


def floor_of(spec: DecoderSpec, batch: int, context: int, rows: int, device: Floor) -> float:
    """Milliseconds of a pass over `rows` rows of each request behind `context` tokens.

    The products read every weight once, attention every key and value once; each of the two is
    bound by bytes or by arithmetic. Norms, turns and writes are left out.
    """
    weights = weight_bytes(spec)
    products = device.ms(weights, weights * batch * rows)  # 2 operations for 2 bytes
    seen = batch * (context + rows)
    scores = 4 * seen * rows * spec.num_heads * spec.head_dim * spec.num_layers
    return products + device.ms(kv_bytes(spec, seen), scores)


def _layer(spec: DecoderSpec) -> int:
    """Weights of a layer's matrices."""
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
    attention = spec.hidden_size * heads * spec.head_dim
    return attention + 3 * spec.hidden_size * spec.intermediate_size

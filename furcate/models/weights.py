"""Where each stored tensor goes: straight into the decoder's fused parameters, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.errors import BadFile
from furcate.models.decoder import Decoder, Layer
from furcate.models.linear import Linear
from furcate.models.spec import DecoderSpec

__all__ = ["Stored", "build", "places"]

Place = tuple[str, Tensor]
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its name there, its shape, and a way to read it."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def places(decoder: Decoder) -> dict[str, Tensor]:
    """The view of a parameter into which each tensor, by its name in transformers, is written."""
    found = dict(_of_layers(decoder))
    found["model.embed_tokens.weight"] = decoder.embedding.detach()
    found["model.norm.weight"] = decoder.norm.weight.detach()
    if decoder.head is not None:
        found.update(_split(decoder.head, {"lm_head": decoder.spec.vocab_size}))
    return found


def build(
    spec: DecoderSpec, tensors: Mapping[str, Stored], dtype: torch.dtype, device: torch.device
) -> Decoder:
    """A frozen decoder holding all tensors, which are keyed by their names in transformers.

    Needs no second copy of the weights, and no memory before names and shapes are known to fit.
    Raises BadFile, naming the tensor, where one is missing, unknown, misshapen or not finite.
    """
    drawn = places(Decoder(spec, dtype, torch.device("meta")))
    _check_names(drawn, tensors)
    for name, tensor in tensors.items():
        _check_shape(drawn[name], tensor)
    decoder = Decoder(spec, dtype, device)
    wanted = places(decoder)
    for name, tensor in tensors.items():
        _write(wanted[name], tensor)
    return decoder.requires_grad_(False)


def _of_layers(decoder: Decoder) -> Iterator[Place]:
    for index, layer in enumerate(decoder.layers):
        assert isinstance(layer, Layer)
        for name, view in _of_layer(layer):
            yield f"model.layers.{index}.{name}", view


def _of_layer(layer: Layer) -> Iterator[Place]:
    attention, mlp = layer.attention, layer.mlp
    q, kv = attention.width, attention.kv_heads * attention.head_dim
    prefix = "self_attn."
    yield from _split(
        attention.qkv, {f"{prefix}q_proj": q, f"{prefix}k_proj": kv, f"{prefix}v_proj": kv}
    )
    yield from _split(attention.out, {f"{prefix}o_proj": -1})
    if attention.q_norm is not None and attention.k_norm is not None:
        yield f"{prefix}q_norm.weight", attention.q_norm.weight.detach()
        yield f"{prefix}k_norm.weight", attention.k_norm.weight.detach()
    yield from _split(mlp.down, {"mlp.down_proj": -1})
    assert mlp.gate_up.weight is not None
    inner = len(mlp.gate_up.weight) // 2
    yield from _split(mlp.gate_up, {"mlp.gate_proj": inner, "mlp.up_proj": inner})
    yield "input_layernorm.weight", layer.attention_norm.weight.detach()
    yield "post_attention_layernorm.weight", layer.mlp_norm.weight.detach()


def _split(linear: Linear, rows: Mapping[str, int]) -> Iterator[Place]:
    """Weight and bias of a fused layer, cut into its parts by rows; -1 means all rows."""
    start = 0
    for name, count in rows.items():
        stop = None if count < 0 else start + count
        for kind, whole in (("weight", linear.weight), ("bias", linear.bias)):
            if whole is not None:
                yield f"{name}.{kind}", whole.detach()[start:stop]
        start += count


def _check_names(wanted: Mapping[str, Tensor], tensors: Mapping[str, Stored]) -> None:
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise BadFile(
            "tensors are missing",
            field=missing[0],
            value=_some(missing),
            hint="the checkpoint is incomplete, or its config describes another network",
        )
    extra = [tensor.name for name, tensor in tensors.items() if name not in wanted]
    if extra:
        raise BadFile(
            "tensors that this architecture does not have",
            field=extra[0],
            value=_some(extra),
            hint="the config describes another network",
        )


def _check_shape(place: Tensor, tensor: Stored) -> None:
    if tensor.shape != tuple(place.shape):
        raise BadFile(
            f"the config asks for shape {tuple(place.shape)}", field=tensor.name, value=tensor.shape
        )


def _write(place: Tensor, tensor: Stored) -> None:
    source = tensor.read()
    place.copy_(source)
    if _finite(place):
        return
    if _finite(source):
        raise BadFile(
            f"holds numbers too large for {place.dtype}",
            field=tensor.name,
            value=float(source.abs().max()),
            hint="load it as bfloat16 or float32",
        )
    raise BadFile(
        "holds numbers that are not finite",
        field=tensor.name,
        hint="the checkpoint is damaged; fetch it again",
    )


def _finite(tensor: Tensor) -> bool:
    # the extremes carry any NaN along and need no mask as large as the tensor
    low, high = torch.aminmax(tensor)
    return math.isfinite(float(low)) and math.isfinite(float(high))


def _some(names: Iterable[str]) -> str:
    all_names = list(names)
    more = len(all_names) - _SHOWN
    return ", ".join(all_names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")

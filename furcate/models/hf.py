"""Loads a Hugging Face directory: config.json and safetensors, sharded or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from furcate.errors import BadFile, Unsupported
from furcate.models.decoder import Decoder
from furcate.models.hf_config import spec_from_hf_config
from furcate.models.hf_module import of_module, without_module
from furcate.models.weights import Stored, build

__all__ = ["load_hf", "read_json"]

_CONFIG = "config.json"
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F64", "F32", "F16", "BF16")
_PICKLES = ("*.bin", "*.pt", "*.pth")
_REFETCH = "fetch the checkpoint again"
_DERIVED = ".rotary_emb.inv_freq"  # older checkpoints store what follows from the config


def load_hf(path: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder with the weights of a directory that holds config.json and safetensors.

    A module for multi-token prediction that lies there too is left aside.

    Raises BadFile for files or tensors that are missing, damaged or do not fit the config,
    Unsupported for pickles and for what `spec_from_hf_config` refuses.
    """
    config = read_json(path / _CONFIG)
    spec = spec_from_hf_config(without_module(config))
    aside = of_module(config, spec.num_layers)
    shards = _shards(path)
    with ExitStack() as stack:
        tensors = {
            tensor.name: tensor
            for file, names in shards.items()
            for tensor in _tensors(stack.enter_context(_open(file)), file, names, aside)
        }
        tied = tensors.pop("lm_head.weight", None) if spec.tied_embeddings else None
        decoder = build(spec, tensors, dtype, device)
        if tied is not None:
            _check_tied(decoder, tied)
    return decoder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises BadFile where it is absent or anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadFile("no such file", field=str(path)) from None
    except (OSError, ValueError) as err:
        raise BadFile(f"cannot be read: {err}", field=str(path), hint=_REFETCH) from None
    if not isinstance(found, dict):
        raise BadFile("must hold a JSON object", field=str(path))
    return found


def _shards(path: Path) -> dict[Path, set[str] | None]:
    """Files to read, each with the tensors it must hold; None: whatever it holds."""
    if (path / _WHOLE).is_file():
        return {path / _WHOLE: None}
    if (path / _INDEX).is_file():
        return _indexed(path / _INDEX)
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise Unsupported(
            "a pickle can run any code when loaded; furcate never opens one",
            field=str(path / pickles[0]),
            hint="save the model as safetensors (transformers: model.save_pretrained(directory))",
        )
    raise BadFile(f"holds neither {_WHOLE} nor {_INDEX}", field=str(path), hint=_REFETCH)


def _indexed(index: Path) -> dict[Path, set[str] | None]:
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise BadFile("has no weight_map", field=str(index), hint=_REFETCH)
    shards: dict[Path, set[str]] = {}
    for name, file in entries.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise BadFile(
                "must name a file beside the index", field=f"weight_map.{name}", value=file
            )
        shards.setdefault(index.parent / file, set()).add(name)
    for shard in shards:
        if not shard.is_file():
            raise BadFile("named by the index but absent", field=str(shard), hint=_REFETCH)
    return dict(shards)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as err:
        raise BadFile(f"truncated or damaged: {err}", field=str(file), hint=_REFETCH) from None


def _tensors(
    opened: Any, file: Path, names: set[str] | None, aside: Callable[[str], bool]
) -> Iterator[Stored]:
    held = set(opened.keys())
    if names is not None and held != names:
        odd = min(held ^ names)
        where = "is not in the index" if odd in held else "is in the index only"
        raise BadFile(f"{where} ({file.name})", field=odd, hint=_REFETCH)
    for name in sorted(held):
        if name.endswith(_DERIVED) or aside(name):
            continue
        described = opened.get_slice(name)
        if described.get_dtype() not in _DTYPES:
            raise Unsupported(
                "quantised or whole-number weights are not read",
                field=name,
                value=described.get_dtype(),
                hint=f"known: {', '.join(_DTYPES)}",
            )
        yield Stored(name, tuple(described.get_shape()), partial(opened.get_tensor, name))


def _check_tied(decoder: Decoder, tied: Stored) -> None:
    """A head stored beside tied embeddings must equal them, or one of the two would be ignored."""
    same = tied.shape == tuple(decoder.embedding.shape) and torch.equal(
        tied.read().to(decoder.dtype), decoder.embedding.detach().cpu()
    )
    if not same:
        raise BadFile(
            "differs from model.embed_tokens.weight although tie_word_embeddings is true",
            field=tied.name,
            hint="set tie_word_embeddings to false if the head is its own",
        )

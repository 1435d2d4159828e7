"""Tensors in safetensors files, described before they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from furcate.errors import BadFile, Unsupported
from furcate.models.hf import read_json

__all__ = [
    "INDEX",
    "REFETCH",
    "WHOLE",
    "Kept",
    "Kepts",
    "finite",
    "held",
    "open_tensors",
    "write_tensors",
]

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
REFETCH = "fetch the checkpoint again"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that lies in a file or in memory: its name there, what it is, a way to read it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


Kepts = Mapping[str, Kept]


def held(name: str, tensor: Tensor) -> Kept:
    """A tensor in memory."""
    return Kept(name, tuple(tensor.shape), tensor.dtype, lambda: tensor)


def open_tensors(directory: Path) -> dict[str, Kept]:
    """Everything in model.safetensors, or in the shards that its index names, by name.

    Nothing is read yet but headers. Raises BadFile for files that are missing, damaged or not as
    the index says, Unsupported for quantised tensors.
    """
    if (directory / WHOLE).is_file():
        return _in_file(directory / WHOLE)
    if not (directory / INDEX).is_file():
        raise BadFile(f"holds neither {WHOLE} nor {INDEX}", field=str(directory), hint=REFETCH)
    wanted = _indexed(directory / INDEX)
    found: dict[str, Kept] = {}
    for file in sorted(set(wanted.values())):
        found.update(_in_file(directory / file))
    odd = sorted(wanted.keys() ^ found.keys())
    if odd:
        where = "is in the index only" if odd[0] in wanted else "is not in the index"
        raise BadFile(where, field=odd[0], hint=REFETCH)
    return found


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file; raises OSError where it cannot be written."""
    whole: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        # the format has no word for two names of one tensor
        whole[name] = plain.clone() if plain.data_ptr() in seen else plain
        seen.add(plain.data_ptr())
    try:
        save_file(whole, path, metadata={"format": "pt"})
    except SafetensorError as fault:
        raise OSError(str(fault)) from fault


def finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite."""
    if tensor.numel() == 0:
        return True
    # the extremes carry any NaN along and need no mask as large as the tensor
    low, high = torch.aminmax(tensor)
    return math.isfinite(float(low)) and math.isfinite(float(high))


def _indexed(index: Path) -> dict[str, str]:
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise BadFile("has no weight_map", field=str(index), hint=REFETCH)
    for name, file in entries.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise BadFile("must name a file beside it", field=f"weight_map.{name}", value=file)
    return entries


def _in_file(file: Path) -> dict[str, Kept]:
    try:
        opened: Any = safe_open(file, framework="pt", device="cpu")
        names = sorted(opened.keys())
    except FileNotFoundError:
        raise BadFile("no such file", field=str(file), hint=REFETCH) from None
    except (SafetensorError, OSError) as fault:
        raise BadFile(f"truncated or damaged: {fault}", field=str(file), hint=REFETCH) from None
    return {name: _described(opened, name) for name in names}


def _described(opened: Any, name: str) -> Kept:
    part = opened.get_slice(name)
    stored = part.get_dtype()
    if stored not in _DTYPES:
        raise Unsupported(
            "quantised weights are not read",
            field=name,
            value=stored,
            hint=f"known: {', '.join(_DTYPES)}",
        )
    return Kept(name, tuple(part.get_shape()), _DTYPES[stored], partial(opened.get_tensor, name))

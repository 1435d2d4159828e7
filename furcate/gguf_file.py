"""Reads a GGUF file's header: metadata and where each tensor lies, every length checked first."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from furcate.errors import BadFile, Unsupported

__all__ = ["GgufFile", "GgufTensor", "GgufValue", "read_gguf"]

GgufValue = str | int | float | bool | list[str] | list[int | float | bool]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# type codes of the GGUF specification, version 3 (ggml, docs/gguf.md)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_MAX_DIMS = 4
_ALIGNMENT = 32
_HINT = "fetch it again, or give another file"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` has rows first, `start` and `size` are bytes of the file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A header. Arrays of strings, which only vocabularies have, are read on request only."""

    path: Path
    metadata: Mapping[str, GgufValue]
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path, *, strings: bool = False) -> GgufFile:
    """The header of a little-endian GGUF file of version 2 or 3; `strings`: with its vocabulary.

    Raises BadFile, naming the file, if it is no such file or ends before its lengths say, and
    Unsupported for another version.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Cursor(data, path), strings)
    except (OSError, ValueError) as err:  # ValueError: an empty file
        raise BadFile(f"cannot be read: {err}", field=str(path), hint=_HINT) from None


class _Cursor:
    """A position in the file that only moves forward, and never past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def take(self, count: int) -> int:
        """Move on by `count` bytes and return where they begin."""
        begin = self.at
        self.at += count
        if self.at > len(self.data):
            raise self.bad("ends too early; it is truncated or damaged")
        return begin

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        begin = self.take(struct.calcsize(f"<{code}") * count)
        return struct.unpack_from(f"<{count}{code}", self.data, begin)

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def string(self) -> str:
        begin = self.skip_string()
        raw = self.data[begin : self.at]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad("holds a string that is not UTF-8", raw[:40]) from None

    def skip_string(self) -> int:
        return self.take(self.number("Q"))

    def bad(self, what: str, value: object = None) -> BadFile:
        return BadFile(what, field=str(self.path), value=value, hint=_HINT)


def _read(cursor: _Cursor, strings: bool) -> GgufFile:
    magic = cursor.data[:4]
    if magic != _MAGIC:
        raise cursor.bad("is not a GGUF file", magic)
    cursor.take(len(_MAGIC))
    version = cursor.number("I")
    if version not in _VERSIONS:
        hint = "versions 2 and 3, little-endian, are read"
        raise Unsupported("GGUF version", field=str(cursor.path), value=version, hint=hint)
    tensor_count, pair_count = cursor.numbers("Q", 2)
    metadata = _metadata(cursor, pair_count, strings)
    tensors = [_tensor(cursor) for _ in range(tensor_count)]
    return GgufFile(cursor.path, metadata, _placed(cursor, metadata, tensors))


def _metadata(cursor: _Cursor, count: int, strings: bool) -> dict[str, GgufValue]:
    found: dict[str, GgufValue] = {}
    for _ in range(count):
        key = cursor.string()
        value = _value(cursor, cursor.number("I"), strings)
        if value is not None:
            found[key] = value
    return found


def _value(cursor: _Cursor, kind: int, strings: bool) -> GgufValue | None:
    if kind == _STRING:
        return cursor.string()
    if kind != _ARRAY:
        scalar: GgufValue = cursor.number(_code(cursor, kind))
        return scalar
    of, count = cursor.number("I"), cursor.number("Q")
    if of != _STRING:
        return list(cursor.numbers(_code(cursor, of), count))
    if strings:
        return [cursor.string() for _ in range(count)]
    for _ in range(count):
        cursor.skip_string()
    return None


def _code(cursor: _Cursor, kind: int) -> str:
    if kind not in _SCALARS:
        raise cursor.bad("metadata of unknown type", kind)
    return _SCALARS[kind]


def _tensor(cursor: _Cursor) -> GgufTensor:
    """A tensor whose `start` still counts from the end of the header."""
    name, dims = cursor.string(), cursor.number("I")
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.bad(f"tensor {name} must have 1 to {_MAX_DIMS} dimensions", dims)
    shape = cursor.numbers("Q", dims)[::-1]  # the file counts from the fastest axis
    code, start = cursor.number("I"), cursor.number("Q")
    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        raise cursor.bad(f"tensor {name} is of unknown type", code) from None
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % per_block:
        raise cursor.bad(f"tensor {name} must have rows of whole blocks of {per_block}", shape)
    return GgufTensor(name, kind, shape, start, math.prod(shape) // per_block * block_bytes)


def _placed(
    cursor: _Cursor, metadata: Mapping[str, GgufValue], tensors: list[GgufTensor]
) -> tuple[GgufTensor, ...]:
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.bad("general.alignment must be a positive number", alignment)
    base = -(-cursor.at // alignment) * alignment
    placed = {}
    for tensor in tensors:
        start = base + tensor.start
        if start + tensor.size > len(cursor.data):
            raise cursor.bad(f"ends inside tensor {tensor.name}; it is truncated or damaged")
        if tensor.name in placed:
            raise cursor.bad(f"holds tensor {tensor.name} twice")
        placed[tensor.name] = GgufTensor(tensor.name, tensor.kind, tensor.shape, start, tensor.size)
    return tuple(placed.values())

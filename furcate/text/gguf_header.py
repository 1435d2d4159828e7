"""Reads the tokenizer's keys from the header of a GGUF file, without touching its tensors."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from furcate.errors import BadFile, Unsupported

__all__ = ["read_tokenizer_keys"]

GgufValue = str | int | float | bool | list[str] | list[int] | list[float] | list[bool]

# type codes of the GGUF specification, version 3 (ggml, docs/gguf.md)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


@dataclass(slots=True)
class _Cursor:
    """A place in the file; every read is checked against its end."""

    data: mmap.mmap
    path: Path
    at: int = 0
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.data)

    def take(self, count: int) -> int:
        """Move on by `count` bytes and return where they begin."""
        begin = self.at
        if count > self.size - begin:
            raise BadFile("the file ends inside its header", field=str(self.path))
        self.at = begin + count
        return begin

    def number(self, code: str) -> int:
        found: int = self.numbers(code, 1)[0]
        return found

    def numbers(self, code: str, count: int) -> tuple[int, ...]:
        begin = self.take(struct.calcsize("<" + code) * count)
        return struct.unpack_from(f"<{count}{code}", self.data, begin)

    def string(self) -> str:
        length = self.number("Q")
        begin = self.take(length)
        raw = self.data[begin : begin + length]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as err:
            what = "a string in the header is not UTF-8"
            raise BadFile(what, field=str(self.path), value=raw[:40]) from err


def read_tokenizer_keys(path: Path) -> Mapping[str, GgufValue]:
    """All `tokenizer.*` keys of the file.

    Raises:
        BadFile: not a GGUF file, cut short, or with text that is not UTF-8.
        Unsupported: a version of GGUF, or a big-endian file, that is not read.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise BadFile("not a GGUF file", field=str(path))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(_Cursor(data, path, at=4))
    except OSError as err:
        raise BadFile(f"cannot be read: {err.strerror}", field=str(path)) from err


def _read(cursor: _Cursor) -> Mapping[str, GgufValue]:
    version = cursor.number("I")
    if version not in _VERSIONS:
        hint = "versions 2 and 3, little-endian, are read"
        raise Unsupported("GGUF version", field=str(cursor.path), value=version, hint=hint)
    cursor.number("Q")  # how many tensors
    found: dict[str, GgufValue] = {}
    for _ in range(cursor.number("Q")):
        key = cursor.string()
        value = _value(cursor, cursor.number("I"))
        if key.startswith("tokenizer."):
            found[key] = value
    return found


def _value(cursor: _Cursor, kind: int) -> GgufValue:
    if kind == _STRING:
        return cursor.string()
    if kind != _ARRAY:
        return cursor.number(_code(cursor, kind))
    of, count = cursor.number("I"), cursor.number("Q")
    if of == _STRING:
        return [cursor.string() for _ in range(count)]
    return list(cursor.numbers(_code(cursor, of), count))


def _code(cursor: _Cursor, kind: int) -> str:
    if kind not in _SCALARS:
        raise BadFile("unknown value type in the header", field=str(cursor.path), value=kind)
    return _SCALARS[kind]

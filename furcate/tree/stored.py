"""Reads records back from JSON: unknown, missing and misshapen fields are refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from furcate.errors import BadFile, BadRequest

__all__ = ["fields_of", "list_of", "number", "numbers", "reading", "text", "whole_numbers"]


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Whatever is wrong inside is the stored record's fault, not the caller's; blocks may nest."""
    try:
        yield
    except (BadRequest, BadFile) as err:
        field = what if err.field is None else f"{what}.{err.field}"
        raise BadFile(err.what, field=field, value=err.value, hint=err.hint) from None


def fields_of(data: object, names: tuple[str, ...]) -> Mapping[str, object]:
    """A JSON object with exactly these keys."""
    if not isinstance(data, Mapping):
        raise BadRequest("must be a JSON object", value=data)
    for name in names:
        if name not in data:
            raise BadRequest("is missing", field=name)
    for name in data:
        if name not in names:
            raise BadRequest("is not known", field=str(name), hint=f"known: {', '.join(names)}")
    return data


def text(data: object, field: str) -> str:
    """A string."""
    if not isinstance(data, str):
        raise BadRequest("must be a string", field=field, value=data)
    return data


def number(data: object, field: str) -> float:
    """A number; JSON's true and false are none."""
    if isinstance(data, bool) or not isinstance(data, int | float):
        raise BadRequest("must be a number", field=field, value=data)
    return float(data)


def list_of(data: object, field: str) -> list[object]:
    """A JSON array."""
    if not isinstance(data, list | tuple):
        raise BadRequest("must be a list", field=field, value=data)
    return list(data)


def numbers(data: object, field: str) -> tuple[float, ...]:
    """A JSON array of numbers."""
    return tuple(number(x, f"{field}[{i}]") for i, x in enumerate(list_of(data, field)))


def whole_numbers(data: object, field: str) -> tuple[int, ...]:
    """A JSON array of whole numbers."""
    found = list_of(data, field)
    for i, x in enumerate(found):
        if isinstance(x, bool) or not isinstance(x, int):
            raise BadRequest("must be a whole number", field=f"{field}[{i}]", value=x)
    return tuple(x for x in found if isinstance(x, int))

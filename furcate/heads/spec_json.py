"""Specs of heads as JSON and back: every field explicit, nothing unknown, nothing missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from furcate.errors import BadFile
from furcate.heads.spec import EagleSpec, HeadSpec, MedusaSpec, MtpSpec
from furcate.models.spec import DecoderSpec, RopeSpec, check_layers

__all__ = ["spec_from_json", "spec_to_json"]

_KINDS: dict[str, type[EagleSpec] | type[MtpSpec] | type[MedusaSpec]] = {
    "eagle1": EagleSpec,
    "eagle3": EagleSpec,
    "mtp": MtpSpec,
    "medusa": MedusaSpec,
}
_NESTED: tuple[type, ...] = (DecoderSpec, RopeSpec)


def spec_to_json(spec: HeadSpec) -> dict[str, Any]:
    """A JSON object with every field."""
    return asdict(spec)


def spec_from_json(data: object) -> HeadSpec:
    """The inverse; raises BadFile, naming the field."""
    if not isinstance(data, Mapping):
        raise BadFile("must be a JSON object", field="spec", value=data)
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise BadFile(
            "unknown kind of head",
            field="spec.kind",
            value=kind,
            hint=f"known: {', '.join(_KINDS)}",
        )
    spec: HeadSpec = _record(_KINDS[kind], data, "spec")
    return spec


def _record(kind: type, data: object, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise BadFile("must be a JSON object", field=where, value=data)
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    for name in data:
        if name not in names:
            raise BadFile(
                "is not known", field=f"{where}.{name}", hint=f"known: {', '.join(names)}"
            )
    for name in names:
        if name not in data:
            raise BadFile("is missing", field=f"{where}.{name}")
    values = {name: _value(hints[name], data[name], f"{where}.{name}") for name in names}
    if kind is DecoderSpec:
        check_layers(f"{where}.num_layers", values["num_layers"])
    return kind(**values)


def _value(kind: Any, value: object, where: str) -> Any:
    if kind in _NESTED:
        return _record(kind, value, where)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            known = ", ".join(get_args(kind))
            raise BadFile("is not known", field=where, value=value, hint=f"known: {known}")
        return value
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise BadFile("must be a list", field=where, value=value)
        return tuple(_value(get_args(kind)[0], each, where) for each in value)
    return _scalar(kind, value, where)


def _scalar(kind: Any, value: object, where: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
        raise BadFile(f"must be {words[kind]}", field=where, value=value)
    return value

"""Reads rotary positions out of config.json, in the styles of transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from furcate.errors import BadFile, Unsupported
from furcate.models.spec import RopeSpec

__all__ = ["ROPE_KEYS", "rope_from_hf"]

ROPE_KEYS = frozenset({"partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta"})

_LARGEST = 1e300  # sums and products of two magnitudes stay finite below

_EVERYWHERE = frozenset({"partial_rotary_factor", "rope_theta", "rope_type", "type"})
_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "factor",
            "mscale",
            "mscale_all_dim",
            "original_max_position_embeddings",
            "truncate",
        }
    ),
}


def rope_from_hf(config: Mapping[str, Any], *, default_theta: float) -> RopeSpec:
    """The rotary positions of a config.

    Raises Unsupported for scalings furcate does not know, BadFile for values of the wrong type.
    """
    given = _merged(config, default_theta)
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str):
        raise BadFile("must be a name", field="rope_scaling.rope_type", value=kind)
    if kind not in _KEYS:
        raise Unsupported(
            "unknown rope scaling",
            field="rope_scaling.rope_type",
            value=kind,
            hint=f"known: {', '.join(_KEYS)}",
        )
    for key, value in given.items():
        if key not in _EVERYWHERE | _KEYS[kind]:
            raise Unsupported(
                f"unknown for scaling {kind}", field=f"rope_scaling.{key}", value=value
            )
    if given.get("partial_rotary_factor") not in (None, 1):
        raise Unsupported(
            "heads must be turned whole",
            field="partial_rotary_factor",
            value=given["partial_rotary_factor"],
        )
    return _spec(given, kind, config)


def _merged(config: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    """One flat record from either style; null values mean absent."""
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters")
    if scaling and parameters and scaling != parameters:
        raise BadFile("contradicts rope_parameters", field="rope_scaling", value=scaling)
    for name, record in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if record is not None and not isinstance(record, Mapping):
            raise BadFile("must be a JSON object", field=name, value=record)
    given = parameters or scaling or {}
    merged = {key: value for key, value in given.items() if value is not None}
    for key in ("rope_theta", "partial_rotary_factor"):
        outer = config.get(key)
        if outer is None:
            continue
        if key in merged and merged[key] != outer:
            raise BadFile(f"contradicts rope_parameters.{key}", field=key, value=outer)
        merged[key] = outer
    merged.setdefault("rope_theta", default_theta)
    return merged


def _spec(given: Mapping[str, Any], kind: str, config: Mapping[str, Any]) -> RopeSpec:
    theta = _number(given, "rope_theta")
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", factor=_number(given, "factor"))
    original = _number(
        given, "original_max_position_embeddings", config.get("max_position_embeddings")
    )
    if kind == "llama3":
        return RopeSpec(
            theta,
            "llama3",
            factor=_number(given, "factor"),
            original_max_position=int(original),
            low_freq_factor=_number(given, "low_freq_factor"),
            high_freq_factor=_number(given, "high_freq_factor"),
        )
    return RopeSpec(
        theta,
        "yarn",
        factor=_number(given, "factor"),
        original_max_position=int(original),
        beta_fast=_number(given, "beta_fast", 32.0),
        beta_slow=_number(given, "beta_slow", 1.0),
        truncate=_flag(given, "truncate", True),
        attention_factor=_attention_factor(given),
    )


def _attention_factor(given: Mapping[str, Any]) -> float:
    """YaRN (Peng et al. 2023, equation 22), with DeepSeek's two magnitudes where both are given."""
    if "attention_factor" in given:
        return _number(given, "attention_factor")
    factor = _number(given, "factor")
    over, under = _number(given, "mscale", 0.0), _number(given, "mscale_all_dim", 0.0)
    for key, scale in (("mscale", over), ("mscale_all_dim", under)):
        if scale < 0:
            raise BadFile("must not be negative", field=f"rope_scaling.{key}", value=scale)
    if over and under:
        return _magnitude(factor, over) / _magnitude(factor, under)
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _number(given: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadFile("must be a number", field=f"rope_scaling.{key}", value=value)
    if not abs(value) <= _LARGEST:  # NaN too, which Python reads where JSON has no such word
        raise BadFile("must be a finite number", field=f"rope_scaling.{key}", value=value)
    return float(value)


def _flag(given: Mapping[str, Any], key: str, default: bool) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise BadFile("must be true or false", field=f"rope_scaling.{key}", value=value)
    return value

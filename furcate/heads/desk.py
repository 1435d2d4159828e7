"""What the `heads` command does, by names and paths; its answers are records for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from furcate.errors import BadRequest, UserError
from furcate.heads.exchange import (
    Finding,
    Target,
    export_head,
    import_head,
    lint_head,
    open_head,
)
from furcate.heads.formats.detect import FORMATS, NATIVE, Format, format_named
from furcate.heads.held import Held
from furcate.heads.spec_json import spec_to_json
from furcate.heads.store import SHIPPED, ShippedHead, is_native, read_native, shipped_heads
from furcate.models.decoder import Decoder
from furcate.models.hf import read_json
from furcate.models.hf_config import spec_from_hf_config
from furcate.models.hf_module import without_module
from furcate.models.load import load_decoder
from furcate.models.zoo import cache_dir, known_models, resolve
from furcate.text.tokenizer import load_tokenizer

__all__ = ["cached", "describe", "export", "find", "import_", "lint", "list_heads", "target_of"]

_CPU = torch.device("cpu")


def cached() -> Path:
    """Where a user's own heads lie, as TARGET/NAME."""
    return cache_dir() / "heads"


def list_heads() -> list[dict[str, Any]]:
    """Heads that come with furcate, then those in the user's cache; a damaged one says so."""
    return [_row(head, where) for head, where in _all()]


def find(word: str) -> Path:
    """The directory a user's word for a head stands for: a path, or a name that `list` tells.

    Raises BadRequest where it is neither, or several heads have that name.
    """
    path = Path(word).expanduser()
    if path.is_dir():
        return path
    heads = [head for head, _ in _all()]
    named = [head.path for head in heads if word in (head.name, _long_name(head))]
    if len(named) == 1:
        return named[0]
    known = ", ".join(map(_long_name, heads)) or "none"
    what = "several heads have this name" if named else "no such head or directory"
    raise BadRequest(what, field="head", value=word, hint=f"known: {known}")


def target_of(name: str, verifier: str | None = None) -> Target:
    """A target by name or path; of a folder only the config is read until weights are needed."""
    path = resolve(name)

    @cache
    def load(dtype: torch.dtype) -> Decoder:
        return load_decoder(path, dtype, _CPU)

    if path.is_dir():
        spec = spec_from_hf_config(without_module(read_json(path / "config.json")))
    else:
        spec = load(torch.float32).spec
    fingerprint = load_tokenizer(path).fingerprint()
    return Target(spec, load, fingerprint, verifier or _hub_name(name, path))


def describe(word: str, target: Callable[[], Target]) -> dict[str, Any]:
    """What a head is, in numbers and flags; furcate's own say it without their target."""
    path = find(word)
    if is_native(path):
        format_, held = NATIVE, read_native(path)
    else:
        format_, held = open_head(path, target().spec)
    return {
        "path": str(path),
        "format": format_.name,
        "kind": held.spec.kind,
        "parameters": _parameters(held),
        "bytes": _bytes(path),
        "dtype": str(held.dtype).removeprefix("torch."),
        "listed_by_frequency": 0 if held.frequent_N is None else len(held.frequent_N),
        "fingerprint": held.fingerprint,
        "calibrated": held.calibration is not None,
        "spec": spec_to_json(held.spec),
        "provenance": dict(held.provenance),
        "remarks": list(held.remarks),
    }


def lint(word: str, target: Target, layers: tuple[int, ...] | None) -> list[Finding]:
    """Everything that is wrong with a head, or should be known."""
    return lint_head(find(word), target, layers)


def import_(
    word: str, out: Path | None, target: Target, layers: tuple[int, ...] | None
) -> dict[str, Any]:
    """Write a head as furcate's own; without `out` it goes into the user's cache."""
    path = find(word)
    out = out or cached() / (target.name or "target").split("/")[-1].lower() / path.resolve().name
    if out.exists() and any(out.iterdir()):
        raise BadRequest("is there already", field="OUT", value=str(out), hint="name another place")
    format_, held = import_head(path, out, target, layers)
    return {
        "path": str(out),
        "imported_from": format_.name,
        "kind": held.spec.kind,
        "remarks": list(held.remarks),
    }


def export(
    word: str, out: Path, to: str, target: Target, draft_vocab: int | None
) -> dict[str, Any]:
    """Write a head in another format: its full name, or `original` or `sglang` for its kind."""
    path = find(word)
    format_ = _format(open_head(path, target.spec)[1], to)
    written = export_head(path, out, format_, target, draft_vocab)
    return {
        "path": str(out),
        "format": format_.name,
        "file": written.file,
        "tensors": {name: list(tensor.shape) for name, tensor in written.tensors.items()},
    }


def _format(held: Held, to: str) -> Format:
    of_kind = f"{held.spec.kind}-{to}"
    if any(each.name == of_kind for each in FORMATS):
        return format_named(of_kind)
    return format_named(to)


def _row(head: ShippedHead, where: str) -> dict[str, Any]:
    about = {"name": head.name, "target": head.target, "where": where, "path": str(head.path)}
    try:
        held = read_native(head.path)
    except UserError as fault:
        return about | {"kind": None, "parameters": 0, "bytes": 0, "fault": str(fault)}
    return about | {
        "kind": held.spec.kind,
        "parameters": _parameters(held),
        "bytes": _bytes(head.path),
        "fault": None,
    }


def _all() -> list[tuple[ShippedHead, str]]:
    places = (("shipped", SHIPPED), ("cache", cached()))
    return [(head, where) for where, root in places for head in shipped_heads(root)]


def _parameters(held: Held) -> int:
    return sum(math.prod(kept.shape) for kept in held.tensors.values())


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def _long_name(head: ShippedHead) -> str:
    return f"{head.target}/{head.name}"


def _hub_name(name: str, path: Path) -> str | None:
    """What the hub calls a target; None for a folder of the user's."""
    for info in known_models():
        if info.path == path:
            return next((alias for alias in info.record.aliases if "/" in alias), None)
    return None if Path(name).expanduser().exists() else name

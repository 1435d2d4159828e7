"""furcate's own format of heads: a directory that is written whole, and read back as it was.

config.json       every number and flag of the head, explicitly
model.safetensors its own weights; `frequent`: token ids by falling frequency; `token_ids`: those of
                  an own, smaller output matrix
provenance.json   how it came to be
calibration.json  optional: what its scores are worth as probabilities
manifest.json     size and sha256 of the files above; a calibration may be missing from it

Legend: D draft vocabulary, N tokens by frequency.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from furcate.errors import BadFile, BadRequest, FurcateError
from furcate.files import write_json
from furcate.heads.build import build, new_head
from furcate.heads.directory import MANIFEST, check_manifest, whole_directory, write_manifest
from furcate.heads.held import Held, problems, unsound
from furcate.heads.places import Head, places
from furcate.heads.spec_json import spec_from_json, spec_to_json
from furcate.heads.tensor_files import WHOLE, Kept, held, open_tensors, write_tensors
from furcate.models.decoder import Decoder
from furcate.models.hf import read_json

__all__ = [
    "CALIBRATION",
    "FORMAT",
    "SHIPPED",
    "ShippedHead",
    "add_calibration",
    "check_fingerprint",
    "check_same_head",
    "is_native",
    "load_head",
    "new_head",
    "read_native",
    "save_head",
    "shipped",
    "shipped_heads",
    "write_native",
]

FORMAT = "furcate-head"
VERSION = 1
SHIPPED = Path(__file__).parent / "shipped"
CALIBRATION = "calibration.json"
_CONFIG = "config.json"
_PROVENANCE = "provenance.json"
_FILES = (_CONFIG, WHOLE, _PROVENANCE, CALIBRATION, MANIFEST)
_FREQUENT = "frequent"
_IDS = "token_ids"
_KEYS = ("format", "version", "spec", "fingerprint")
_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.uint16)


def save_head(
    directory: Path,
    head: Head,
    *,
    frequent_N: Tensor | None,
    provenance: Mapping[str, Any],
    draft_vocab: int | None = None,
    fingerprint: str | None = None,
) -> None:
    """Write a head; an older head there is replaced only when the new one is whole.

    Args:
        frequent_N: the target's token ids by falling frequency; needed where fewer tokens than all
            are scored with the target's own rows.
        provenance: a JSON object that says how the head came to be.
        draft_vocab: how many tokens the head scores by default when it is loaded; None: as now.
        fingerprint: of the target's vocabulary.

    Raises:
        BadFile: weights that are not finite, or ids that do not fit the head.
        BadRequest: the place holds something that is no head.
        StorageFailed: the disk is full, or the place cannot be written.
    """
    spec = head.spec if draft_vocab is None else replace(head.spec, draft_vocab_size=draft_vocab)
    ids = head.token_D if spec.own_output else None
    if draft_vocab is None and ids is None:
        _check_frequent(frequent_N, head.token_D)
    write_native(
        directory,
        Held(
            spec,
            {name: held(name, place.detach()) for name, place in places(head).items()},
            token_D=None if ids is None else ids.cpu(),
            frequent_N=None if frequent_N is None else frequent_N.cpu().to(torch.int64),
            fingerprint=fingerprint,
            provenance=provenance,
        ),
    )


def load_head(
    directory: Path,
    target: Decoder,
    *,
    draft_vocab: int | None = None,
    fingerprint: str | None = None,
) -> Head:
    """The head in `directory`, in the target's dtype and on its device, frozen.

    Args:
        draft_vocab: how many of the target's most frequent tokens it scores; the target's
            vocabulary or more means all; None: as the directory says.
        fingerprint: of the target's vocabulary; None: not compared.

    Raises:
        BadFile: anything wrong with the files, or the head is of another target.
        BadRequest: a draft vocabulary that this head cannot have.
    """
    stored = read_native(directory)
    check_fingerprint(stored, fingerprint)
    return build(stored, target, draft_vocab)


def check_fingerprint(stored: Held, fingerprint: str | None) -> None:
    """Raises BadFile where a head was made for other tokens than the target has."""
    if fingerprint is not None and stored.fingerprint not in (None, fingerprint):
        raise BadFile(
            "was made for a target with another vocabulary",
            field="fingerprint",
            value=stored.fingerprint,
            hint=f"this target's is {fingerprint}",
        )


def is_native(directory: Path) -> bool:
    """Whether a directory holds a head in this format."""
    try:
        return read_json(directory / _CONFIG).get("format") == FORMAT
    except BadFile:
        return False


def write_native(directory: Path, stored: Held) -> None:
    """Write what a directory of this format holds; tensors keep their dtype. Raises as `save_head`.

    A calibration that lies at the place stays if the weights stay the same.
    """
    for problem in (*problems(stored), *unsound(stored)):
        raise problem
    with whole_directory(directory, ours=is_native, names=_FILES) as place:
        write_json(place / _CONFIG, _config(stored))
        write_tensors(place / WHOLE, _tensors(stored))
        write_json(place / _PROVENANCE, dict(stored.provenance))
        write_manifest(place)
        calibration = stored.calibration or _kept_calibration(directory, place)
        if calibration is not None:
            write_json(place / CALIBRATION, dict(calibration))
            write_manifest(place)


def add_calibration(directory: Path, calibration: Mapping[str, Any], of: Path) -> None:
    """Put the calibration of the head at `of` beside a head, and name it in the manifest.

    At every moment the directory is whole: with the old calibration, or with the new one.

    Raises:
        BadFile: the directory is damaged.
        BadRequest: it holds another head.
        StorageFailed: the disk is full, or the place cannot be written.
    """
    check_manifest(directory)
    check_same_head(directory, of)
    named = (directory / MANIFEST).is_file()
    if named:
        write_manifest(directory, but=(CALIBRATION,))
    write_json(directory / CALIBRATION, dict(calibration))
    if named:
        write_manifest(directory)


def check_same_head(directory: Path, of: Path) -> None:
    """Raises BadRequest where a directory does not hold the weights of the head at `of`."""
    if directory.resolve() != of.resolve() and not _same_weights(directory, of):
        hint = "a calibration fits the head that it was fitted for"
        raise BadRequest("holds another head", field="out", value=str(directory), hint=hint)


def read_native(directory: Path) -> Held:
    """What lies in a directory of this format; weights are not read yet.

    Raises BadFile for files that are missing, damaged, of a later version, or not what
    manifest.json says.
    """
    config = read_json(directory / _CONFIG)
    _check_config(config)
    check_manifest(directory)
    spec = spec_from_json(config["spec"])
    tensors = open_tensors(directory)
    frequent, ids = tensors.pop(_FREQUENT, None), tensors.pop(_IDS, None)
    return Held(
        spec,
        tensors,
        token_D=_ids(ids),
        frequent_N=_ids(frequent),
        fingerprint=config["fingerprint"],
        provenance=_optional(directory / _PROVENANCE) or {},
        calibration=_optional(directory / CALIBRATION),
    )


@dataclass(frozen=True, slots=True)
class ShippedHead:
    """A head that comes with furcate, or that lies in the user's cache."""

    name: str
    target: str
    path: Path
    fingerprint: str | None


def shipped_heads(root: Path = SHIPPED) -> list[ShippedHead]:
    """All heads in `root`/TARGET/NAME, by target and name."""
    found = sorted(config.parent for config in root.glob(f"*/*/{_CONFIG}"))
    return [
        ShippedHead(path.name, path.parent.name, path, _fingerprint(path))
        for path in found
        if is_native(path)
    ]


def shipped(name: str, target_fingerprint: str, root: Path = SHIPPED) -> Path | None:
    """The directory of the shipped head of that name for a target; None where there is none."""
    for head in shipped_heads(root):
        if head.name == name and head.fingerprint == target_fingerprint:
            return head.path
    return None


def _check_frequent(frequent_N: Tensor | None, token_D: Tensor | None) -> None:
    """The tokens a head scores must be the first of the list, or it would come back another one."""
    if token_D is None:
        return
    listed = None if frequent_N is None else frequent_N[: len(token_D)].cpu().sort().values
    if listed is None or not torch.equal(listed.to(torch.int64), token_D.cpu()):
        raise BadFile(
            f"must begin with the {len(token_D)} tokens that the head scores", field="frequent"
        )


def _config(stored: Held) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": stored.fingerprint,
        "spec": spec_to_json(stored.spec),
    }


def _check_config(config: Mapping[str, Any]) -> None:
    for key in _KEYS:
        if key not in config:
            raise BadFile("is missing", field=key, hint=f"{_CONFIG} is not of a {FORMAT}")
    for key, value in config.items():
        if key not in _KEYS:
            raise BadFile("is not known", field=key, value=value)
    if config["format"] != FORMAT:
        raise BadFile(f"must be {FORMAT!r}", field="format", value=config["format"])
    if config["version"] != VERSION:
        hint = "use the furcate that wrote it, or a later one"
        raise BadFile(f"must be {VERSION}", field="version", value=config["version"], hint=hint)
    if not isinstance(config["fingerprint"], str | None):
        raise BadFile("must be a string", field="fingerprint", value=config["fingerprint"])


def _tensors(stored: Held) -> dict[str, Tensor]:
    tensors = {name: kept.read() for name, kept in stored.tensors.items()}
    small = torch.uint16 if stored.spec.vocab_size <= 1 << 16 else torch.int32
    for name, ids_X in ((_FREQUENT, stored.frequent_N), (_IDS, stored.token_D)):
        if ids_X is not None:
            tensors[name] = ids_X.to(small)
    return tensors


def _ids(kept: Kept | None) -> Tensor | None:
    if kept is None:
        return None
    if kept.dtype not in _WHOLE_NUMBERS:
        raise BadFile("must hold whole numbers", field=kept.name, value=kept.dtype)
    return kept.read().to(torch.int64)


def _optional(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None


def _fingerprint(path: Path) -> str | None:
    found = read_json(path / _CONFIG).get("fingerprint")
    return found if isinstance(found, str) else None


def _kept_calibration(directory: Path, place: Path) -> dict[str, Any] | None:
    """That of an older head at `directory`, if its weights are those now at `place`."""
    try:
        return _optional(directory / CALIBRATION) if _same_weights(directory, place) else None
    except FurcateError:
        return None


def _same_weights(one: Path, other: Path) -> bool:
    """By their manifests; without them nobody knows."""
    try:
        first, second = (read_json(each / MANIFEST)["files"][WHOLE] for each in (one, other))
    except (FurcateError, KeyError, TypeError):
        return False
    return bool(first == second)

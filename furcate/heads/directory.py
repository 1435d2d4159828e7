"""A directory is written whole or not at all: under a temporary name, then renamed."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from furcate.errors import BadFile, BadRequest, StorageFailed
from furcate.files import write_json
from furcate.models.hf import read_json

__all__ = ["MANIFEST", "check_manifest", "manifest_of", "whole_directory", "write_manifest"]

MANIFEST = "manifest.json"
_CHUNK = 1 << 20


@contextmanager
def whole_directory(
    path: Path, *, ours: Callable[[Path], bool], names: Collection[str]
) -> Iterator[Path]:
    """An empty directory to fill, which becomes `path` when the block ends without an error.

    An older directory there is replaced only if it is empty or `ours` says so; whatever lies in it
    under other names than `names` is kept.

    Raises:
        BadRequest: something else is at `path`.
        StorageFailed: the disk is full, or the place cannot be written; what was there stays.
    """
    if path.exists() and not _replaceable(path, ours):
        raise BadRequest(
            "is there already and holds something else",
            field=str(path),
            hint="choose another place",
        )
    scratch: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        filled = scratch / "new"
        filled.mkdir()
        yield filled
        _open_to_others(filled)
        _swap(filled, path, scratch / "old", names)
    except OSError as fault:
        full = fault.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(fault)
        raise StorageFailed(
            "no space left to write the directory" if full else f"cannot write: {fault}",
            field=str(path),
            hint="free some space" if full else "choose another place",
        ) from fault
    finally:
        if scratch is not None and not _strangers(scratch / "old", names):
            shutil.rmtree(scratch, ignore_errors=True)


def write_manifest(directory: Path, but: Collection[str] = ()) -> None:
    """manifest.json: size and sha256 of every file that lies in the directory now, `but` those."""
    write_json(directory / MANIFEST, manifest_of(directory, but))


def manifest_of(directory: Path, but: Collection[str] = ()) -> dict[str, object]:
    """What `write_manifest` writes."""
    unnamed = (MANIFEST, *but)
    files = sorted(file for file in directory.iterdir() if file.name not in unnamed)
    return {
        "files": {
            file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files
        }
    }


def check_manifest(directory: Path) -> None:
    """Raises BadFile where a file is not what manifest.json says; no manifest, nothing to check."""
    if not (directory / MANIFEST).is_file():
        return
    entries = read_json(directory / MANIFEST).get("files")
    if not isinstance(entries, dict):
        raise BadFile("must be a JSON object", field=f"{MANIFEST}.files", value=entries)
    for name, entry in entries.items():
        _check_entry(directory, name, entry)


def _check_entry(directory: Path, name: str, entry: object) -> None:
    if not isinstance(entry, dict) or Path(name).name != name:
        raise BadFile("must describe a file beside it", field=f"{MANIFEST}.files.{name}")
    file = directory / name
    if not file.is_file():
        raise BadFile("is named by manifest.json but absent", field=str(file))
    found = file.stat().st_size if entry.get("bytes") != file.stat().st_size else _sha256(file)
    if found != entry.get("sha256"):
        raise BadFile(
            f"differs from what {MANIFEST} says",
            field=str(file),
            value=found,
            hint=f"fetch or make it again; if the change was meant, remove {MANIFEST}",
        )


def _open_to_others(directory: Path) -> None:
    """Temporary files are their owner's alone; what is left is as readable as its directory."""
    mode = directory.stat().st_mode & 0o666
    for file in directory.iterdir():
        file.chmod(mode)


def _replaceable(path: Path, ours: Callable[[Path], bool]) -> bool:
    return path.is_dir() and (ours(path) or not any(path.iterdir()))


def _swap(filled: Path, path: Path, old: Path, names: Collection[str]) -> None:
    """Two renames; should the second fail, the first is taken back."""
    if not path.exists():
        os.rename(filled, path)
        return
    os.rename(path, old)
    try:
        os.rename(filled, path)
    except OSError:
        os.rename(old, path)
        raise
    for stranger in _strangers(old, names):
        os.rename(stranger, path / stranger.name)


def _strangers(directory: Path, names: Collection[str]) -> list[Path]:
    if not directory.is_dir():
        return []
    return [entry for entry in directory.iterdir() if entry.name not in names]


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()

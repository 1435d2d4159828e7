"""State dicts that torch.save wrote, opened so that nothing in them can run or flood the memory."""

from __future__ import annotations

import pickle
import shutil
import tempfile
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from furcate.errors import BadFile, StorageFailed, Unsupported
from furcate.heads.tensor_files import REFETCH, Kept, held

__all__ = ["MOST_BYTES", "open_pickle"]

MOST_BYTES = 16 << 30  # of a file, and of what it unpacks to
_MOST_PROGRAM = 16 << 20  # of the pickle itself, which only names tensors
_MOST_MEMBERS = 100_000
_RESAVE = "save its tensors as model.safetensors, which furcate reads too"


def open_pickle(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Kept]:
    """The tensors of a state dict, by name.

    Read from a private copy, so that what was judged is what is loaded, and with torch's
    `weights_only`, which builds tensors and nothing else.

    Raises:
        BadFile: damaged, too large, or anything but names and plain tensors.
        Unsupported: saved by a torch before 1.6, whose files cannot be judged before loading.
        StorageFailed: no room for the copy.
    """
    size = path.stat().st_size
    if size > most_bytes:
        raise BadFile(f"must be at most {most_bytes} bytes", field=str(path), value=size)
    with tempfile.TemporaryDirectory(prefix="furcate-") as scratch:
        copy = Path(scratch) / "state_dict"
        try:
            shutil.copyfile(path, copy)
        except OSError as fault:
            raise StorageFailed(
                f"cannot be copied: {fault.strerror}", field=str(path), hint="free some space"
            ) from fault
        _check_archive(path, copy, most_bytes)
        return _checked(path, _loaded(path, copy))


def _check_archive(path: Path, copy: Path, most_bytes: int) -> None:
    if not zipfile.is_zipfile(copy):
        raise Unsupported("is not a file of torch 1.6 or later", field=str(path), hint=_RESAVE)
    try:
        with zipfile.ZipFile(copy) as archive:
            members = archive.infolist()
    except zipfile.BadZipFile as fault:
        raise BadFile(f"is damaged: {fault}", field=str(path), hint=REFETCH) from None
    program = sum(member.file_size for member in members if member.filename.endswith(".pkl"))
    if program > _MOST_PROGRAM or len(members) > _MOST_MEMBERS:
        raise BadFile("names far too many things for a head", field=str(path), value=len(members))
    unpacked = sum(member.file_size for member in members)
    if unpacked > most_bytes:
        raise BadFile(f"must unpack to at most {most_bytes} bytes", field=str(path), value=unpacked)


def _loaded(path: Path, copy: Path) -> object:
    try:
        return torch.load(copy, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise BadFile(
            "holds more than tensors, which could run any code",
            field=str(path),
            hint=_RESAVE,
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise BadFile(f"is damaged: {fault}", field=str(path), hint=REFETCH) from None


def _checked(path: Path, found: object) -> dict[str, Kept]:
    if not isinstance(found, dict):
        raise BadFile("must hold a dict of tensors", field=str(path), value=type(found).__name__)
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise BadFile("must be a tensor with a name", field=str(name), value=type(tensor))
        # a view may claim far more numbers than are stored
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise BadFile("must be a plain, contiguous tensor", field=name)
    return {name: held(name, tensor.detach()) for name, tensor in found.items()}

"""Keeps a run on disk so that it can go on: exactly where it stopped, or from its weights alone.

`state.safetensors` holds masters, what the optimisers remember, and the position: with it a run
goes on bit for bit on the same machine. `portable/` holds weights in the heads' own type, one file
a head, and the position: a run moved elsewhere may go on from it, with new optimisers.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from furcate.errors import BadFile, StorageFailed
from furcate.files import write_json
from furcate.heads.directory import whole_directory

__all__ = ["Checkpoint", "Position", "load", "save"]

STATE, PORTABLE, POSITION = "state.safetensors", "portable", "position.json"
_PLACE_KEY = "position"


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run is, and what it is.

    `parts` tells how each uninterrupted part of the run began: at which step, how, and where.
    """

    recipe: Mapping[str, Any]
    step: int = 0
    tokens: int = 0  # passed through the target
    taken: int = 0  # conversations handed out
    seconds: float = 0.0  # of training, over all parts
    parts: tuple[Mapping[str, Any], ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A position with weights by head and name; `memory` is what the optimisers remember."""

    position: Position
    weights: Mapping[str, Mapping[str, Tensor]]
    memory: Mapping[str, Mapping[str, Tensor]] | None  # None: not known


def save(path: Path, checkpoint: Checkpoint, working: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write a checkpoint into a folder; the one before stays until this one is whole.

    Args:
        working: the weights in the heads' own type, for the portable form.

    Raises:
        StorageFailed: the disk is full or the like; the last checkpoint is as it was.
    """
    position = json.dumps(asdict(checkpoint.position))
    tensors = {
        f"weights/{head}/{name}": tensor
        for head, weights in checkpoint.weights.items()
        for name, tensor in weights.items()
    }
    for head, memory in (checkpoint.memory or {}).items():
        tensors |= {f"memory/{head}/{name}": tensor for name, tensor in memory.items()}
    try:
        path.mkdir(parents=True, exist_ok=True)
        _write(path / STATE, tensors, position)
        _write_portable(path / PORTABLE, working, checkpoint.position)
    except (OSError, SafetensorError) as fault:
        raise _storage_failed(fault, path) from fault


def load(path: Path) -> Checkpoint:
    """The checkpoint in a folder: the exact one where it is there, else the portable one.

    Raises:
        BadFile: there is none, or it is damaged.
    """
    if (path / STATE).is_file():
        return _load_state(path / STATE)
    if (path / PORTABLE / POSITION).is_file():
        return _load_portable(path / PORTABLE)
    hint = "start the run without --resume"
    raise BadFile("no checkpoint is here", field=str(path), hint=hint)


def _load_state(path: Path) -> Checkpoint:
    try:
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            record = json.loads(file.metadata()[_PLACE_KEY])
        position = Position(**record)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as err:
        hint = "remove this file to go on from the portable weights beside it"
        raise BadFile(f"damaged: {err}", field=str(path), hint=hint) from None
    found: dict[str, dict[str, dict[str, Tensor]]] = {"weights": {}, "memory": {}}
    for name, tensor in tensors.items():
        kind, head, rest = name.split("/", 2)
        found[kind].setdefault(head, {})[rest] = tensor
    return Checkpoint(position, found["weights"], found["memory"])


def _load_portable(path: Path) -> Checkpoint:
    try:
        record = json.loads((path / POSITION).read_text(encoding="utf-8"))
        weights = {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))}
        return Checkpoint(Position(**record), weights, None)
    except (SafetensorError, OSError, ValueError, TypeError) as err:
        raise BadFile(f"damaged: {err}", field=str(path), hint="start anew") from None


def _write(path: Path, tensors: Mapping[str, Tensor], position: str) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    try:
        on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(on_cpu, temporary, {_PLACE_KEY: position})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError):
        temporary.unlink(missing_ok=True)
        raise


def _write_portable(
    path: Path, working: Mapping[str, Mapping[str, Tensor]], position: Position
) -> None:
    names = [POSITION, *(f"{head}.safetensors" for head in working)]
    with whole_directory(path, ours=lambda at: (at / POSITION).is_file(), names=names) as place:
        for head, weights in working.items():
            _write(place / f"{head}.safetensors", weights, json.dumps({"step": position.step}))
        write_json(place / POSITION, asdict(position))


def _storage_failed(fault: Exception, path: Path) -> StorageFailed:
    number = fault.errno if isinstance(fault, OSError) else None
    full = number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(fault)
    what = "no space left for a checkpoint" if full else f"cannot write a checkpoint: {fault}"
    hint = "the last checkpoint is as it was; free some space and go on with --resume"
    return StorageFailed(what, field=str(path), hint=hint)

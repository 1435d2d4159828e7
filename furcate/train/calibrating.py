"""Does what `furcate tune calibrate` asks: has answers written, fits a head, keeps the fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from furcate.config import DraftOptions
from furcate.drafters.manner import calibration_of
from furcate.engine.birth import commit, device_name
from furcate.errors import BadRequest
from furcate.files import write_json
from furcate.heads.desk import find
from furcate.heads.exchange import read_head
from furcate.heads.medusa import Medusa
from furcate.heads.packing import pack
from furcate.heads.places import Head
from furcate.heads.store import CALIBRATION, add_calibration, check_same_head, is_native, shipped
from furcate.train.held_away import HeldAway
from furcate.train.own_streams import StreamsAsked, own_streams
from furcate.train.prepare import Target, default_held_away
from furcate.tree.calibration import Calibration
from furcate.tree.origin import Origin
from furcate.tune.calibrate import Subject, calibrate

__all__ = ["Asked", "StreamsAsked", "run"]

DEPTH = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """One calibration.

    Attributes:
        drafter: the directory of a head, or the name of one.
        depth: levels that are fitted; None: 8, or as many as Medusa has heads.
        roots: positions of the answers at which trees are grown.
        out: the file; None: beside the head.
    """

    target: str
    dtype: str
    device: str
    drafter: str
    streams: StreamsAsked
    depth: int | None
    roots: int
    out: Path | None


def run(asked: Asked, tell: Callable[[str], None]) -> dict[str, Any]:
    """Calibrate a head, and write its calibration.json; what was found comes back for programs.

    Raises:
        BadRequest: an option is out of range, or the place holds another head.
        BadFile: target or head are damaged, or not made for each other.
        StorageFailed: the file could not be written.
    """
    tell("loading")
    target = Target.load(asked.target, asked.dtype, asked.device)
    fingerprint = target.tokenizer.fingerprint()
    folder = shipped(asked.drafter, fingerprint) or find(asked.drafter)
    out = asked.out or folder / CALIBRATION
    _check_place(out, folder)
    if target.decoder.can_pack:
        target.decoder.pack()
    head = read_head(folder, target.decoder, fingerprint=fingerprint)
    pack(head)
    tell("writing answers")
    held = HeldAway.read(default_held_away())
    streams = own_streams(target.decoder, target.tokenizer, asked.streams, held)
    found = calibrate(
        Subject(target.decoder, target.tokenizer, head, _draft(head, asked.depth)),
        streams,
        asked.roots,
        _born(target),
        now=calibration_of(folder),
        tell=tell,
    )
    _keep(found.calibration, out, folder)
    return {"path": str(out), "answers": len(streams), **found.to_json()}


def _draft(head: Head, depth: int | None) -> DraftOptions:
    return DraftOptions(depth=depth or (head.depth if isinstance(head, Medusa) else DEPTH))


def _born(target: Target) -> Origin:
    today = datetime.now(UTC).date().isoformat()
    return Origin(device_name(target.decoder.device), commit(), today, "fitted")


def _check_place(out: Path, folder: Path) -> None:
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        hint = f"name a file in a folder that exists, such as HEAD/{CALIBRATION}"
        raise BadRequest("cannot be written", field="--out", value=str(out), hint=hint)
    if is_native(out.parent):
        check_same_head(out.parent, folder)


def _keep(calibration: Calibration, out: Path, folder: Path) -> None:
    if out.name == CALIBRATION and is_native(out.parent):
        add_calibration(out.parent, calibration.to_dict(), folder)
    else:
        write_json(out, calibration.to_dict())

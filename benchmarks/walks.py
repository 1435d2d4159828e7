"""What the scripts about heads share: the target they ask, and the walks that are kept on disk."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from furcate.engine.build import device_of, dtype_of
from furcate.errors import BadFile
from furcate.models.decoder import Decoder
from furcate.models.load import load_decoder
from furcate.models.zoo import resolve
from furcate.text.tokenizer import Tokenizer, load_tokenizer
from furcate.tune.walk import Walk, walk

__all__ = ["Answer", "Answers", "Setup", "at_depths", "deepest", "record_of", "setup_of"]


@dataclass(frozen=True)
class Setup:
    """The target that is asked."""

    decoder: Decoder
    tokenizer: Tokenizer


def setup_of(asked: argparse.Namespace) -> Setup:
    """By `--target`, `--device` and `--dtype`."""
    device = device_of(asked.device)
    path = resolve(asked.target)
    decoder = load_decoder(path, dtype_of(asked.dtype, device), device)
    if decoder.can_pack:
        decoder.pack()
    return Setup(decoder, load_tokenizer(path))


@dataclass(frozen=True)
class Answer:
    """One answer's roots."""

    category: str
    tokens: list[int]
    ranks_TD: np.ndarray
    values_TK: np.ndarray | None  # of the best nodes, descending; 0 where there is none
    levels_TK: np.ndarray | None  # and where they stand


@dataclass(frozen=True)
class Answers:
    """All answers of one file at one depth."""

    each: list[Answer]

    def walked(self, nodes: int) -> dict[str, list[Walk]]:
        """With trees of so many nodes, by category."""
        return self.by_category([walk(answer.ranks_TD, nodes) for answer in self.each])

    def by_category(self, walks: Sequence[Walk]) -> dict[str, list[Walk]]:
        """One walk of each answer, in the same order."""
        found: dict[str, list[Walk]] = defaultdict(list)
        for answer, one in zip(self.each, walks, strict=True):
            found[answer.category].append(one)
        return found


def deepest(folder: Path, name: str) -> Answers:
    """The deepest trees of a file, e.g. "eagle3_t0"; raises as `at_depths`."""
    found = at_depths(folder, name)
    return found[max(found)]


def at_depths(folder: Path, name: str) -> dict[int, Answers]:
    """A file's answers by the depth of their trees.

    Raises BadFile where it, or the answers it was recorded on, is not there.
    """
    temperature = name.split("_t")[1].split("_")[0]
    file, streams = folder / f"{name}.npz", folder / f"t{temperature}_streams.json"
    for one in (file, streams):
        if not one.exists():
            raise BadFile("there is no such walk", field=str(one))
    stored, told = dict(np.load(file)), json.loads(streams.read_text())
    depths = sorted(int(key[5:]) for key in stored if key.startswith("depth"))
    return {depth: Answers(list(_cut(told, stored, f"depth{depth}"))) for depth in depths}


def record_of(folder: Path, what: str) -> dict[str, Any]:
    """What a result of these walks begins with. Raises BadFile for a folder without any."""
    births = [json.loads(file.read_text()) for file in sorted(folder.glob("birth*.json"))]
    if not births:
        raise BadFile("holds no walks", field=str(folder))
    return {
        "what": what,
        **births[0],
        "recorded_by": [birth["command"] for birth in births],
        "command": "python " + " ".join(sys.argv),
    }


def _cut(
    streams: list[dict[str, Any]], stored: dict[str, np.ndarray], depth: str
) -> Iterator[Answer]:
    values, levels = stored.get("values"), stored.get("levels")
    at = 0
    for stream in streams:
        here = slice(at, at + len(stream["answer"]))
        at = here.stop
        yield Answer(
            stream["category"],
            stream["answer"],
            stored[depth][here],
            None if values is None else values[here].astype(np.float32),
            None if levels is None else levels[here],
        )

"""Walks on disk, as `heads_walk.py` leaves them: ranks of roots, cut into answers by category."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from furcate.errors import BadFile
from furcate.tune.walk import Walk, walk

__all__ = ["Answers", "births", "read_answers"]

Cut = Callable[["Answer"], Walk]


@dataclass(frozen=True)
class Answer:
    """One answer's roots."""

    category: str
    tokens: list[int]
    ranks_TD: np.ndarray
    values_TK: np.ndarray | None  # of the best nodes, descending; 0 where there is none
    levels_TK: np.ndarray | None  # and where they stand

    def walked(self, nodes: int) -> Walk:
        """With trees of so many nodes."""
        return walk(self.ranks_TD, nodes)


@dataclass(frozen=True)
class Answers:
    """All answers of one file at one depth."""

    each: list[Answer]

    def walks(self, cut: Cut) -> dict[str, list[Walk]]:
        """Walked by `cut`, by category."""
        found: dict[str, list[Walk]] = defaultdict(list)
        for answer in self.each:
            found[answer.category].append(cut(answer))
        return found


def read_answers(folder: Path, name: str) -> Answers:
    """The deepest trees of a file, e.g. "eagle3_t0".

    Raises BadFile where it, or the answers it was recorded on, is not there.
    """
    file = folder / f"{name}.npz"
    if not file.exists():
        raise BadFile("there is no such walk", field=str(file))
    stored = dict(np.load(file))
    depth = max((n for n in stored if n.startswith("depth")), key=lambda n: int(n[5:]))
    return Answers(list(_cut(_streams(folder, name), stored, depth)))


def births(folder: Path) -> list[dict[str, Any]]:
    """Where the walks come from. Raises BadFile for a folder without any."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("birth*.json"))]
    if not found:
        raise BadFile("holds no walks", field=str(folder))
    return found


def _streams(folder: Path, name: str) -> list[dict[str, Any]]:
    temperature = name.split("_t")[1].split("_")[0]
    found: list[dict[str, Any]] = json.loads((folder / f"t{temperature}_streams.json").read_text())
    return found


def _cut(
    streams: list[dict[str, Any]], stored: dict[str, np.ndarray], depth: str
) -> Iterator[Answer]:
    at = 0
    values, levels = stored.get("values"), stored.get("levels")
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

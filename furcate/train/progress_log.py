"""The run's diary: one JSON object a line, cut back to a checkpoint when the run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from furcate.errors import StorageFailed
from furcate.files import write_text

__all__ = ["ProgressLog"]

METRICS = "metrics.jsonl"


class ProgressLog:
    """Entries with a `step`; what lies behind the step at which a run goes on is dropped.

    Args:
        folder: of the run.
        step: at which the run begins or goes on.

    Raises:
        StorageFailed: it cannot be written.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / METRICS
        self.entries = (
            [entry for entry in _read(self._path) if entry["step"] <= step] if step else []
        )
        write_text(self._path, "".join(_line(entry) for entry in self.entries))

    def add(self, entry: dict[str, Any]) -> None:
        """Append an entry; raises StorageFailed."""
        self.entries.append(entry)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(entry))
        except OSError as fault:
            hint = "free some space and go on with --resume"
            what = f"cannot write: {fault.strerror}"
            raise StorageFailed(what, field=str(self._path), hint=hint) from fault


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry) + "\n"


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines; an interruption may have left half of one."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)

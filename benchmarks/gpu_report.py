"""Rows of a measurement, written as they come: what ends a script early costs the rest alone.

Exit codes are those of `furcate` itself: 1 where a row is wrong or failed, 2 where the script could
not do what was asked, which one line on stderr explains.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from furcate.engine.birth import birth
from furcate.errors import FurcateError
from furcate.files import write_json

__all__ = ["CannotRun", "Report", "asked_of", "begin", "parser_of"]

Row = dict[str, Any]


class CannotRun(Exception):
    """Not here: a tool is missing or not allowed to work, or nothing can be written."""


@dataclass
class Report:
    """One JSON object, and its rows.

    `head` says what is measured; where a row fails, what went wrong stands in its place.
    """

    head: Mapping[str, Any]
    out: Path | None
    rows: list[Row] = field(default_factory=list)
    more: Row = field(default_factory=dict)
    seconds: float | None = None  # nothing is begun after so many
    left_out: list[Row] = field(default_factory=list)  # what there was no time for
    began: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, script: str, what: str, device: torch.device, asked: argparse.Namespace) -> Report:
        """With where the figures are born; `asked` has the options of `parser_of`."""
        command = " ".join(["python", f"benchmarks/{script}", *_asked_for(sys.argv[1:])])
        born = birth(device) | ({"commit": asked.commit} if asked.commit else {})
        head = {"what": what, "command": command, **born}
        return cls(head, asked.out, seconds=asked.seconds)

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return self.seconds is not None and time.perf_counter() - self.began > self.seconds

    def note(self, **figures: Any) -> None:
        """Put figures beside the rows."""
        self.more |= figures
        self._write()

    def run(self, name: Mapping[str, Any], make: Callable[[], Iterable[Row] | Row]) -> None:
        """Take one row, or several, and write what there is so far; nothing once it is late."""
        if self.late:
            self._leave_out(name)
        else:
            self._take(name, make)

    def run_side_by_side(
        self, jobs: Sequence[tuple[Mapping[str, Any], Callable[[], Row]]], at_once: int
    ) -> None:
        """Take rows that do not disturb each other, so many at once, as they get ready."""

        def in_time(make: Callable[[], Row]) -> Row | None:
            return None if self.late else make()

        with ThreadPoolExecutor(at_once) as pool:
            names = {pool.submit(in_time, make): name for name, make in jobs}
            try:
                for one in as_completed(names):
                    if one.exception() is None and one.result() is None:
                        self._leave_out(names[one])
                    else:
                        self._take(names[one], cast(Callable[[], Row], one.result))
            except CannotRun:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _take(self, name: Mapping[str, Any], make: Callable[[], Iterable[Row] | Row]) -> None:
        began = time.perf_counter()
        try:
            made = make()
            for row in [made] if isinstance(made, dict) else made:
                self._add({**name, **row})
                self._write()  # a script that is stopped has lost the row it was at, no more
                if self.late and isinstance(made, Iterator):  # the next one would take time
                    self._leave_out({**name, "behind_rows": len(self.rows)})
                    break
        except CannotRun:
            raise  # every other row would say the same
        except Exception as fault:  # noqa: BLE001  # a row that fails is a result too
            sys.stderr.write(traceback.format_exc())
            what = f"{type(fault).__name__}: {fault}".splitlines()[0]
            self._add({**name, "failed": what})
        if self.rows:
            self.rows[-1]["seconds_to_measure"] = round(time.perf_counter() - began, 2)
        self._write()

    def close(self) -> int:
        """Print all of it where no file takes it; the exit code: 1 if a row is wrong or failed."""
        self.note(seconds=round(time.perf_counter() - self.began, 1))
        if self.out is None:
            sys.stdout.write(json.dumps(self.record(), indent=2) + "\n")
        return 1 if any(row.get("sound") is False or "failed" in row for row in self.rows) else 0

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        sys.stderr.write(f"{time.perf_counter() - self.began:6.1f} s: {_line(row)}\n")

    def _leave_out(self, name: Mapping[str, Any]) -> None:
        self.left_out.append(dict(name))
        sys.stderr.write(f"no time left for {_line(dict(name))}\n")
        self._write()

    def record(self) -> Row:
        """All that there is so far."""
        late = {"left_out": self.left_out} if self.left_out else {}
        return {**self.head, **self.more, **late, "results": self.rows}

    def _write(self) -> None:
        if self.out is not None:
            write_json(self.out, self.record())


def begin(main: Callable[[], None]) -> None:
    """Run a script: what its user can mend is said in one line, and no traceback hides it."""
    try:
        main()
    except (FurcateError, CannotRun, OSError, json.JSONDecodeError) as fault:
        sys.stderr.write(f"{Path(sys.argv[0]).name}: {fault}\n")
        sys.exit(2)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """With the options that all scripts have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="on the CPU, to try the script")
    parser.add_argument("--out", type=Path, help="a JSON file, written anew after every row")
    parser.add_argument("--commit", help="of this code, for machines without git")
    parser.add_argument("--seconds", type=float, help="begin nothing after so many; it is named")
    return parser


def asked_of(
    parser: argparse.ArgumentParser, tiny: Mapping[str, Any]
) -> tuple[argparse.Namespace, torch.device]:
    """(options, device); with `--tiny` these options take its values unless they are given."""
    asked = parser.parse_args()
    if asked.out is not None:
        _check_writable(asked.out)  # now, and not when the first row is there
    if not asked.tiny:
        if not torch.cuda.is_available():
            parser.error("no CUDA device is there; --tiny tries the script on the CPU")
        torch.backends.cuda.matmul.allow_tf32 = False
        return asked, torch.device("cuda")
    for name, value in tiny.items():
        if getattr(asked, name) == parser.get_default(name):
            setattr(asked, name, value)
    return asked, torch.device("cpu")


def _check_writable(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise CannotRun(f"--out {path}: cannot be written; name a file in a folder that can be")


def _asked_for(words: Sequence[str]) -> list[str]:
    """What a command says of the measurement: not where its results go."""
    beside = ("--out", "--plot", "--commit")
    pairs = zip(["", *words], words, strict=False)
    return [word for before, word in pairs if word not in beside and before not in beside]


def _line(row: Row) -> str:
    """One row for a reader of the terminal: a few digits of each plain figure."""
    words = [f"{name}={_short(value)}" for name, value in row.items() if not _nested(value)]
    return " ".join(words)


def _nested(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, Sequence) and not isinstance(value, str)
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

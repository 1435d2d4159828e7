"""Takes all figures of a GPU, part by part, and says which goals they meet.

    python benchmarks/all_gpu.py --results gpu-results
    python benchmarks/all_gpu.py --only round_8b versus_1 --seconds 300
    python benchmarks/all_gpu.py --list

Every part is a process of its own with a time limit, and writes `NAME.json` and `NAME.log`. Parts
that take times run one after the other, alone; the others come behind them, several at once
(`--processes` in all). A part whose file is there, whole and of this commit, is not run again
without `--again`, so that a run that was cut short goes on where it stopped. Once `--seconds` are
over nothing is begun, and what runs is ended. `summary.json` holds what came of every part, and
each goal with its figure: met, fell short, or not there. The exit code is 1 unless all are met.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Any

import torch
from gpu_goals import judged
from gpu_plan import HOME, PARTS, Part
from gpu_report import begin

from furcate.engine.birth import birth, commit
from furcate.files import write_json

LEAST = 20.0  # seconds; with fewer left a part is not begun
MARGIN = 8.0  # seconds between the last thing a script begins and its end
LAST = 30.0  # seconds of the command that puts shares together
SAID = 6  # last lines of a log that a failure shows


@dataclass(frozen=True)
class Run:
    """One run over parts, and where its files go."""

    home: Path
    commit: str
    tiny: bool
    again: bool
    end: float  # by `time.monotonic`

    def file(self, part: Part) -> Path:
        """A part's JSON."""
        return self.home / f"{part.name}.json"

    def record(self, part: Part) -> dict[str, Any] | None:
        """What a part has written, whole or not; None: nothing, or of other code."""
        try:
            found: dict[str, Any] = json.loads(self.file(part).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if found.get("commit") == self.commit else None

    def whole(self, part: Part) -> bool:
        """Whether a part need not be run again."""
        record = self.record(part)
        if record is None or self.again or "seconds" not in record or "left_out" in record:
            return False
        failed = any("failed" in row for row in record.get("results", []))
        reached = not any("not reached" in one for one in record.get("shortcomings", []))
        return not failed and reached

    def played(self, part: Part) -> dict[str, Any]:
        """Run a part to its end, or to that of its time; what came of it."""
        if self.whole(part):
            return {"state": "was there"}
        most = min(part.seconds, self.end - time.monotonic())
        if most < min(LEAST, part.seconds):
            return {"state": "no time"}
        began = time.monotonic()
        log = self.home / f"{part.name}.log"
        _say(f"{part.name} begins, at most {most:.0f} s")
        with log.open("w", encoding="utf-8") as out:
            codes = self._commands(part, began + most, out)
        state = _state(codes)
        seconds = round(time.monotonic() - began, 1)
        _say(f"{part.name}: {state} after {seconds} s")
        if state in ("failed", "cannot run here"):
            for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-SAID:]:
                _say(f"    {line[:200]}")
        return {"state": state, "seconds": seconds, "exit_codes": codes}

    def _commands(self, part: Part, end: float, out: Any) -> list[int | None]:
        """Exit codes; None: stopped at its time."""
        kept = self.home / f"{part.name}.parts"
        names = {
            "out": str(self.file(part)),
            "kept": str(kept),
            "seconds": f"{max(0.0, end - time.monotonic() - MARGIN - LAST * bool(part.then)):.0f}",
        }
        commands = (part.tiny,) if self.tiny else part.commands
        told = [part.words(one, names, self.commit) for one in commands]
        if not part.then or self.tiny:
            return _side_by_side(told, end, out)
        codes = _side_by_side(told, end - LAST, out)
        last = part.words(part.then, names, self.commit)
        return codes + _side_by_side([last], max(end, time.monotonic() + LAST), out)


def _side_by_side(commands: Sequence[list[str]], end: float, out: Any) -> list[int | None]:
    """Start all, wait for all; whoever is not done by then is ended, with what it has started."""
    started = [
        subprocess.Popen(
            one, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=HOME.parent
        )
        for one in commands
    ]
    codes: list[int | None] = []
    for process in started:
        try:
            codes.append(process.wait(max(0.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            codes.append(None)
    return codes


def _state(codes: Sequence[int | None]) -> str:
    if None in codes:
        return "stopped"
    if not any(codes):
        return "done"
    return "cannot run here" if 2 in codes else "failed"


def _say(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()


def all_played(run: Run, parts: Sequence[Part], processes: int) -> dict[str, dict[str, Any]]:
    """First those that want the machine for themselves, then the others side by side."""
    found = {part.name: run.played(part) for part in parts if part.alone}
    others = [part for part in parts if not part.alone]
    room, free = Condition(), [processes]

    def in_turn(part: Part) -> dict[str, Any]:
        needs = min(processes, len(part.commands))
        with room:
            room.wait_for(lambda: free[0] >= needs)
            free[0] -= needs
        try:
            return run.played(part)
        finally:
            with room:
                free[0] += needs
                room.notify_all()

    with ThreadPoolExecutor(max(1, len(others))) as pool:
        played = pool.map(in_turn, others)
        return found | {part.name: one for part, one in zip(others, played, strict=True)}


def summed_up(run: Run, played: dict[str, dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """What came of all parts, those of earlier runs in this folder included."""
    goals = judged({part.name: run.record(part) for part in PARTS})
    parts = _before(run) | {name: one for name, one in played.items() if "seconds" in one}
    parts = {name: one for name, one in played.items() if name not in parts} | parts
    tests = parts.get("tests", {}).get("state")
    goals.append(
        {
            "goal": "tests on the GPU",
            "part": "tests",
            "figure": tests,
            "wanted": "done",
            "met": None if tests in (None, "no time") else tests == "done",
        }
    )
    return {
        "what": "all figures of a GPU, and the goals they are held against",
        "command": "python benchmarks/all_gpu.py",
        **birth(device),
        "commit": run.commit,
        "parts": parts,
        "goals": goals,
    }


def _before(run: Run) -> dict[str, dict[str, Any]]:
    """Parts that were run earlier, of this commit."""
    try:
        found = json.loads((run.home / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    parts: dict[str, dict[str, Any]] = found["parts"] if found["commit"] == run.commit else {}
    return {name: one for name, one in parts.items() if "seconds" in one}


def _show(goals: Sequence[dict[str, Any]]) -> None:
    words = {True: "met", False: "fell short", None: "not there"}
    for met in (True, False, None):
        for goal in [one for one in goals if one["met"] is met]:
            figure = goal["figure"]
            told = f"{figure:.4g}" if isinstance(figure, float) else str(figure)
            line = f"{words[met]:10} {goal['goal']}: {told} ({goal['wanted']}) [{goal['part']}]"
            sys.stdout.write(line + "\n")


def main() -> None:
    """Run the parts, and print the goals."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("gpu-results"), help="a folder")
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--skip", nargs="+", default=[], choices=names, metavar="NAME")
    parser.add_argument("--list", action="store_true", help="name the parts, and run none")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of all of it")
    parser.add_argument("--processes", type=int, default=8, help="side by side, untimed parts")
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--commit", default="", help="of this code, for machines without git")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, to try the scripts")
    asked = parser.parse_args()
    parts = [part for part in PARTS if part.name in asked.only and part.name not in asked.skip]
    if asked.list:
        for part in parts:
            side = "alone" if part.alone else f"{len(part.commands)} processes, beside others"
            sys.stdout.write(f"{part.name:16} at most {part.seconds:.0f} s, {side}\n")
        return
    if not (asked.tiny or torch.cuda.is_available()):
        parser.error("no CUDA device is there; --tiny tries the scripts on the CPU")
    home = asked.results.resolve()
    home.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu" if asked.tiny else "cuda")
    named = asked.commit or commit()
    run = Run(home, named, asked.tiny, asked.again, time.monotonic() + asked.seconds)
    played = all_played(run, parts, asked.processes)
    summary = summed_up(run, played, device)
    write_json(home / "summary.json", summary)
    _show(summary["goals"])
    sys.exit(0 if all(goal["met"] for goal in summary["goals"]) else 1)


if __name__ == "__main__":
    begin(main)

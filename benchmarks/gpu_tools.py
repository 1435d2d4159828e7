"""NVIDIA's tools around a command: where they are, why they refuse, and what ncu's table says."""

from __future__ import annotations

import csv
import io
import re
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpu_report import CannotRun

__all__ = ["Launch", "counted", "launches", "median_of", "refused", "tool"]

# said by a tool that may not, or cannot, look at this device: nothing in the command mends it
_REFUSALS = re.compile(
    r"ERR_NVGPUCTRPERM|Failed to initialize the profiler|LibraryNotLoaded|Device not supported"
    r"|Insufficient privileges|Unable to find injection library|Driver not supported",
    re.IGNORECASE,
)
_HINTS = {
    "ERR_NVGPUCTRPERM": "counters are for administrators only there: run as root, or set "
    "NVreg_RestrictProfilingToAdminUsers=0 for the driver"
}
_PREFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNIT = re.compile(r"([numKMGT]?)(second|sec|s|byte|B|hz)(?:/(second|sec|s))?", re.IGNORECASE)
_SECONDS = ("second", "sec", "s")


@dataclass(frozen=True)
class Launch:
    """One launch that ncu looked at; None: it has no such figure."""

    function: str
    figures: dict[str, float | None]


def tool(name: str) -> str:
    """Its path; raises CannotRun."""
    found = shutil.which(name)
    if found is None:
        raise CannotRun(f"{name} is not on the path; it comes with the CUDA toolkit")
    return found


def refused(name: str, said: str) -> None:
    """Raise CannotRun where a tool says that it may not work here."""
    lines = [line.strip(" =") for line in said.splitlines() if _REFUSALS.search(line)]
    if lines:
        hints = [f"; {hint}" for word, hint in _HINTS.items() if word in lines[0]]
        raise CannotRun(f"{name} cannot work here: {lines[0]}{''.join(hints)}")


def counted(
    command: Sequence[str], counters: Iterable[str], kernels: str, seconds: float
) -> list[Launch]:
    """Launches, while the profiler is on, of kernels whose names begin with this expression.

    Raises CannotRun where ncu may not count here, RuntimeError where it counted nothing.
    """
    told = [
        tool("ncu"),
        *("--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw"),
        *("--kernel-name", f"regex:^({kernels})"),
        *("--metrics", ",".join(counters)),
        *command,
    ]
    try:
        done = subprocess.run(told, check=False, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"ncu: not done after {seconds:.0f} seconds") from late
    said = done.stdout + "\n" + done.stderr
    refused("ncu", said)
    found = launches(done.stdout)
    if done.returncode or not found:
        lines = [line for line in said.splitlines() if line.strip()]
        why = [line for line in lines if "==ERROR==" in line or "Error" in line] or lines[-3:]
        raise RuntimeError(f"ncu: {' '.join(why) or 'it printed nothing'}")
    return found


def launches(printed: str) -> list[Launch]:
    """Rows of `--csv --page raw` among other lines; time in nanoseconds, the rest without prefix.

    The row below the names holds the units, which ncu chooses by the size of the figures.
    """
    lines = [line for line in printed.splitlines() if line.startswith('"')]
    starts = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
    if not starts:
        return []
    table = list(csv.DictReader(io.StringIO("\n".join(lines[starts[0] :]))))
    units = table.pop(0) if table and not table[0]["ID"] else {}
    return [
        Launch(row["Kernel Name"], {name: _figure(row[name], units.get(name)) for name in row})
        for row in table
        if row["ID"].isdigit()
    ]


def median_of(figures: Iterable[float | None]) -> float | None:
    """Of those that are there."""
    there = [one for one in figures if one is not None]
    return statistics.median(there) if there else None


def _figure(text: str | None, unit: str | None) -> float | None:
    """ncu writes thousands with a comma in some places, and n/a."""
    try:
        return float((text or "").replace(",", "")) * _scale(unit or "")
    except ValueError:
        return None


def _scale(unit: str) -> float:
    """What a figure is multiplied with; 1 for a unit without a prefix, such as % or inst."""
    found = _UNIT.fullmatch(unit)
    if found is None:
        return 1.0
    prefix, what, _ = found.groups()
    times = _PREFIXES[prefix if prefix in _PREFIXES else prefix.upper()]
    return round(times * 1e9, 6) if what.lower() in _SECONDS else times

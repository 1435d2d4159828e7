"""Where a measured number was born: device, commit, versions, date."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from furcate import __version__

__all__ = ["birth", "commit", "device_name"]


def birth(device: torch.device) -> dict[str, Any]:
    """What to write beside a measured number."""
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "furcate": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kind": "measured",
    }


def device_name(device: torch.device) -> str:
    """The device's own name for itself."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return _processor() or platform.processor() or platform.machine()


def commit(where: Path = Path(__file__).parent) -> str:
    """The commit of the source tree, with `+changes` if it has any; the version elsewhere."""
    head = _git(where, "rev-parse", "--verify", "HEAD")
    if head is None or _git(where, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return f"furcate {__version__}"
    return f"{head}+changes" if _git(where, "status", "--porcelain", "-uno") else head


def _git(where: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(where), *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str | None:
    """The name that Linux gives the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None)

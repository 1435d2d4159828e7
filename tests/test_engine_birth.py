"""Where a number was born is told wherever it was born."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import torch

from furcate import __version__
from furcate.engine.birth import birth, commit, device_name

CPU = torch.device("cpu")


def test_everything_is_told() -> None:
    told = birth(CPU)
    assert all(told[key] for key in ("device", "commit", "date", "furcate", "torch", "python"))
    assert told["kind"] == "measured"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", told["date"])
    assert device_name(CPU) == told["device"]


def test_outside_of_a_source_tree_the_version_stands_for_the_commit(tmp_path: Path) -> None:
    assert commit(tmp_path) == f"furcate {__version__}"


def test_another_projects_commit_is_not_ours(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    assert commit(tmp_path) == f"furcate {__version__}"

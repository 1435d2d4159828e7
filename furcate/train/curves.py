"""The run as curves: JSON always, a picture where matplotlib is installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from furcate.files import write_json

__all__ = ["write_curves"]

CURVES, PICTURE = "curves.json", "curves.png"
HELD_OUT, TRAIN = "held_out", "train"


def write_curves(folder: Path, entries: Sequence[dict[str, Any]]) -> str | None:
    """Write what the diary's entries say, by head; returns a note where something was left out.

    Raises:
        StorageFailed: it cannot be written.
    """
    curves = _curves(entries)
    write_json(folder / CURVES, curves)
    if find_spec("matplotlib") is None:
        return "no curves.png: matplotlib is not installed (pip install furcate[train])"
    _draw(folder / PICTURE, curves)
    return None


def _curves(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each head, lists over time: tokens, and each measure as [time][depth]."""
    found: dict[str, Any] = {}
    for entry in entries:
        for head, measures in entry["heads"].items():
            series = found.setdefault(head, {}).setdefault(entry["kind"], {"tokens": []})
            series["tokens"].append(entry["tokens"])
            for name, value in measures.items():
                series.setdefault(name, []).append(value)
    return found


def _draw(path: Path, curves: dict[str, Any]) -> None:
    """Above the loss of training, below the conditional acceptance on held-out text."""
    # drawn without pyplot, which would choose a window system and keep figures for ever
    figure = importlib.import_module("matplotlib.figure").Figure((5 * len(curves), 7))
    axes = figure.subplots(2, len(curves), squeeze=False)
    for (upper, lower), (head, kinds) in zip(axes.T, curves.items(), strict=True):
        upper.set_title(head)
        _lines(upper, kinds.get(TRAIN), "loss", "cross entropy, nats")
        _lines(lower, kinds.get(HELD_OUT), "conditional", "conditional acceptance, held out")
    figure.tight_layout()
    temporary = path.with_name(f".{path.name}.partial")
    figure.savefig(temporary, format="png", dpi=110)
    temporary.replace(path)


def _lines(axis: Any, series: dict[str, Any] | None, name: str, label: str) -> None:
    axis.set_ylabel(label)
    axis.set_xlabel("million tokens")
    axis.grid(alpha=0.3)
    if series is None:
        return
    million = [tokens / 1e6 for tokens in series["tokens"]]
    for depth, values in enumerate(zip(*series[name], strict=True), start=1):
        axis.plot(million, values, marker=".", label=f"depth {depth}")
    axis.legend(fontsize="small")

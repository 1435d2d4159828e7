"""The scripts that report on walks, on made-up ones whose figures are known."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from furcate.errors import BadFile
from furcate.tune.path_ranks import ABSENT

HOME = Path(__file__).parent.parent / "benchmarks"
TOKENS = 12  # of each answer


@pytest.fixture(autouse=True)
def _beside_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HOME))


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    """Four answers: the good drafter holds two levels at rank 3, the poor one none."""
    streams = [
        {"category": category, "answer": list(range(at, at + TOKENS))}
        for at, category in enumerate(("qa", "qa", "math", "math"))
    ]
    (tmp_path / "t0_streams.json").write_text(json.dumps(streams))
    (tmp_path / "birth_good-t0.json").write_text(
        json.dumps({"command": "one", "device": "made up"})
    )
    (tmp_path / "birth_poor-t0.json").write_text(
        json.dumps({"command": "two", "device": "made up"})
    )
    roots = 4 * TOKENS
    good = np.full((roots, 2), 3, np.int16)
    values = np.tile(np.array([0.5, 0.4, 0.3, 0.2, 0.01, 0.0], np.float16), (roots, 1))
    levels = np.tile(np.array([1, 1, 2, 2, 2, 0], np.int8), (roots, 1))
    np.savez(
        tmp_path / "good_t0.npz", depth2=good, depth1=good[:, :1], values=values, levels=levels
    )
    np.savez(tmp_path / "poor_t0.npz", depth2=np.full((roots, 2), ABSENT, np.int16))
    return tmp_path


def told(script: str, walks: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """The JSON object that a script writes."""
    out = walks / "out.json"
    monkeypatch.setattr(sys, "argv", [script, str(walks), *words, "--out", str(out)])
    import_module(script).main()
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["recorded_by"] == ["one", "two"] and found["device"] == "made up"
    return found


def test_a_report_has_every_file_at_every_depth(
    walks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = told("heads_report", walks, monkeypatch, "--nodes", "3", "4")
    assert set(found["settings"]) == {"good_t0_depth1", "good_t0_depth2", "poor_t0_depth2"}
    rate = {
        name: [setting[nodes]["tokens_per_round"]["value"] for nodes in ("3", "4")]
        for name, setting in found["settings"].items()
    }
    assert rate == {
        "good_t0_depth1": [1.0, 2.0],
        "good_t0_depth2": [1.0, 3.0],
        "poor_t0_depth2": [1.0, 1.0],
    }
    assert found["answers"] == 4


def test_a_comparison_is_with_the_better_of_the_others(
    walks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = ("--pair", "good_t0", "poor_t0", "good_t0", "--pair", "good_t0", "poor_t0")
    found = told("heads_compare", walks, monkeypatch, *pair, "--nodes", "4")
    itself, poor = (one["nodes"]["4"] for one in found["pairs"])
    assert set(itself) == {"qa", "math", "all"}
    assert {one["against"] for one in itself.values()} == {"good_t0"}
    assert {one["value"] for one in itself.values()} == {0.0}
    assert {one["low"] for one in poor.values()} == {2.0}, "three tokens a round and not one"


def test_pruning_counts_the_nodes_and_levels_that_are_left(
    walks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--names", "good_t0", "--nodes", "8", "--batch", "2")
    *pruned, shared = told("heads_pruning", walks, monkeypatch, *words)["results"]
    by = {one["value_threshold"]: one for one in pruned}
    assert by[0.0]["drafted_nodes_a_round"] == 5 and by[0.05]["drafted_nodes_a_round"] == 4
    assert by[0.0]["levels_a_round"] == by[0.05]["levels_a_round"] == 2
    assert by[0.05]["over_whole_trees"]["value"] == 0 and by[0.05]["tokens_per_round"] == 3
    assert shared["tokens_per_round"] == 3 and shared["batch_shares_its_budget"] == 2


def test_a_walk_that_is_not_there_is_named(walks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadFile, match="absent_t0"):
        told("heads_compare", walks, monkeypatch, "--pair", "good_t0", "absent_t0")
    (walks / "t0_streams.json").unlink()
    with pytest.raises(BadFile, match="t0_streams"):
        told("heads_report", walks, monkeypatch)

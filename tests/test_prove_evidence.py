"""The evidence is kept in parts, is of this code alone, and says what it falls short of."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from click.testing import Result
from tiny_engine import decoder, prompt_of, tokenizer
from typer.testing import CliRunner

from furcate.engine.compare import Parting
from furcate.prove import evidence
from furcate.prove.evidence import (
    ENOUGH,
    PER_STREAM,
    Part,
    Run,
    part_of,
    record_of,
    run_of,
    shortcomings,
)
from furcate.prove.grid import BATCHES, PROMPTS, SETTINGS
from furcate.prove.streams import GUESSERS, CellReport, Subject

CPU = torch.device("cpu")
TINY = Subject(decoder(), tokenizer(), [prompt_of(9)], 3, guessers=("ngram",))
SOUND = CellReport("greedy", "ngram", 1, ENOUGH, 9, 9, 9, 9)
WRONG = Parting(3, 5, None, math.inf, tie=False)
TIE = Parting(3, 5, 6, 1e-6, tie=True)


def run(**changes: str) -> Run:
    return replace(run_of("tiny", CPU, "float64", 3, "abc"), **changes)


def test_a_finished_part_is_taken_up_again(tmp_path: Path) -> None:
    part_of(run(), TINY, "greedy", tmp_path)
    (file,) = tmp_path.iterdir()
    told = Part(2.5, [replace(SOUND, partings=[WRONG, TIE])])
    cells = record_of(run(), CPU, [told])["cells_by_drafter"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"seconds": 2.5, "cells": cells}))
    assert part_of(run(), TINY, "greedy", tmp_path) == told


@pytest.mark.parametrize("field", ["target", "device", "dtype", "commit", "grid", "code"])
def test_a_part_of_another_run_is_not(field: str, tmp_path: Path) -> None:
    old = part_of(run(**{field: "another"}), TINY, "greedy", tmp_path)
    assert part_of(run(), TINY, "greedy", tmp_path).seconds != old.seconds


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"run": 1}', "cells", "tokens"])
def test_a_damaged_part_is_done_again(damage: str, tmp_path: Path) -> None:
    part = part_of(run(), TINY, "greedy", tmp_path)
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    file.write_text(text.replace(damage, "x") if damage in ("cells", "tokens") else damage)
    again = part_of(run(), TINY, "greedy", tmp_path)
    assert again.cells == part.cells
    assert json.loads(file.read_text())["seconds"] == again.seconds


def test_a_record_sums_its_parts_and_is_strict_json() -> None:
    parts = [Part(1.5, [SOUND]), Part(2.0, [replace(SOUND, drafter="any", partings=[WRONG])])]
    record = record_of(run(), CPU, parts)
    json.dumps(record, allow_nan=False)
    assert record["seconds"] == 3.5
    assert record["commit"] == "abc"
    assert record["largest_gap"] is None
    assert record["tokens"] == 2 * ENOUGH
    assert [cell["drafter"] for cell in record["cells"]] == ["all"]
    assert [cell["drafter"] for cell in record["cells_by_drafter"]] == ["ngram", "any"]


def test_sound_cells_fall_short_of_nothing() -> None:
    assert shortcomings([SOUND]) == []
    assert shortcomings([replace(SOUND, partings=[TIE] * 3)]) == []


@pytest.mark.parametrize(
    "cell",
    [
        replace(SOUND, accepted=0),
        replace(SOUND, rejected=0),
        replace(SOUND, off_likeliest_path=0),
        replace(SOUND, tokens=ENOUGH - 1),
        replace(SOUND, partings=[WRONG]),
        replace(SOUND, partings=[TIE] * 4),
    ],
)
def test_every_shortcoming_is_named(cell: CellReport) -> None:
    assert len(shortcomings([cell])) == 1


def test_a_drafter_that_never_hits_is_no_shortcoming_beside_one_that_does() -> None:
    assert shortcomings([SOUND, replace(SOUND, drafter="wrong", accepted=0)]) == []


def test_the_whole_grid_has_enough_tokens() -> None:
    streams = len(BATCHES) * len(GUESSERS) * len(PROMPTS)
    least = [
        law["min_tokens"] + 1 if "min_tokens" in law else PER_STREAM for law in SETTINGS.values()
    ]
    assert streams * sum(least) >= ENOUGH


def invoked(*words: str) -> Result:
    app = typer.Typer()
    app.command()(evidence.main)
    return CliRunner().invoke(app, list(words))


def test_a_short_run_says_that_it_is_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "SETTINGS", {"greedy": SETTINGS["greedy"]})
    monkeypatch.setattr(evidence, "_subject", lambda *_: TINY)
    out = tmp_path / "out.json"
    told = invoked("--device=cpu", f"--out={out}", f"--parts={tmp_path}", "--commit=f00")
    assert told.exit_code == 1
    record = json.loads(out.read_text())
    assert record["commit"] == record["run"]["commit"] == "f00"
    assert "no evidence" in record["shortcomings"][-1]
    assert "short of evidence" in told.output


@pytest.mark.parametrize("flag", ["--target=no-such-model", "--device=abacus"])
def test_a_mistake_is_one_line_and_no_traceback(flag: str, tmp_path: Path) -> None:
    told = invoked(flag, f"--out={tmp_path / 'out.json'}")
    assert told.exit_code == 2
    assert told.output.startswith("error: ")
    assert told.output.count("\n") == 1
    assert "Traceback" not in told.output

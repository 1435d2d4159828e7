"""The evidence is kept in parts, is of this code alone, and says what it falls short of."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from tiny_engine import decoder, prompt_of, tokenizer
from typer.testing import CliRunner, Result

from furcate.engine.compare import Parting
from furcate.errors import BadRequest
from furcate.prove import evidence
from furcate.prove.evidence import (
    ENOUGH,
    PER_STREAM,
    Part,
    Run,
    gaps,
    laws_of,
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
    part_of(run(**{field: "another"}), TINY, "greedy", tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"cells": []}))
    assert part_of(run(), TINY, "greedy", tmp_path).cells != []


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


def test_a_record_counts_differences_on_chains_and_for_each_token_that_was_compared() -> None:
    chain = replace(SOUND, drafter="chain", partings=[TIE], compared=6000)
    tree = replace(SOUND, drafter="bushy", partings=[TIE, WRONG], compared=4000)
    record = record_of(run(), CPU, [Part(1.0, [chain, tree])])
    assert record["differences_on_chains"] == 1
    assert record["compared"] == 10_000
    assert record["differences_in_10000_tokens"] == 3
    assert record["gaps"]["below 1e-05"] == 2
    assert record["gaps"]["above"] == 1


def test_every_gap_is_in_one_bin() -> None:
    partings = [replace(TIE, gap=gap) for gap in (0.0, 1e-6, 5e-4, 0.3, 7.0, math.inf)]
    assert sum(gaps(partings).values()) == 6
    assert gaps(partings)["above"] == 2


def test_streams_are_compared_up_to_their_first_difference(tmp_path: Path) -> None:
    cells = part_of(run(), TINY, "greedy", tmp_path).cells
    assert [cell.compared for cell in cells] == [3] * len(cells)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_shares_together_are_all_laws_once(count: int) -> None:
    shares = [law for k in range(1, count + 1) for law in laws_of(f"{k}/{count}")]
    assert sorted(shares) == sorted(SETTINGS)
    assert laws_of("") == list(SETTINGS)


@pytest.mark.parametrize("share", ["0/2", "3/2", "1", "a/b", "1/", "/2", "-1/2"])
def test_a_share_that_is_none_is_refused(share: str) -> None:
    with pytest.raises(BadRequest):
        laws_of(share)


def test_a_share_leaves_its_parts_and_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "_subject", lambda *_: TINY)
    out, parts = tmp_path / "out.json", tmp_path / "parts"
    told = invoked(f"--out={out}", f"--parts={parts}", "--device=cpu", "--share=1/14")
    assert told.exit_code == 0
    assert [file.stem for file in parts.iterdir()] == ["greedy"]
    assert not out.exists()


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


def test_in_half_precision_partings_are_the_result_and_no_shortcoming() -> None:
    cells = [replace(SOUND, tokens=20_000, compared=10_000, partings=[WRONG] * 9)]
    assert shortcomings(cells, exact=False) == []
    assert len(shortcomings([replace(cells[0], compared=9_999)], exact=False)) == 1
    every = [replace(cells[0], law=law) for law in SETTINGS]
    record = record_of(run(dtype="bfloat16"), CPU, [Part(1.0, every)])
    assert record["wrong"] is None
    assert record["shortcomings"] == []


def test_laws_that_there_was_no_time_for_are_a_shortcoming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "_subject", lambda *_: TINY)
    where = ["--device=cpu", f"--out={tmp_path / 'out.json'}", f"--parts={tmp_path / 'parts'}"]
    assert invoked(*where, "--share=1/14").exit_code == 0
    assert invoked(*where, "--seconds=0").exit_code == 1
    record = json.loads((tmp_path / "out.json").read_text())
    assert [cell["law"] for cell in record["cells"]] == ["greedy"] * 2
    assert record["shortcomings"][-1].startswith("13 laws were not reached: T 0.3; ")


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


def test_auto_is_judged_as_the_dtype_that_it_stands_for() -> None:
    assert run_of("smollm2-135m", torch.device("cpu"), "auto", 8, "c").dtype == "float32"


def test_a_word_that_is_no_dtype_is_refused() -> None:
    with pytest.raises(BadRequest, match="unknown dtype"):
        run_of("smollm2-135m", torch.device("cpu"), "float", 8, "c")

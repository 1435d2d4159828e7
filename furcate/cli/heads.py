"""`furcate heads`: which draft heads are here, what is wrong with one, and how to bring it over."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from furcate.cli.lazy import heads_module
from furcate.cli.options import EMBEDDED, Json
from furcate.cli.show import err, out, print_json
from furcate.errors import BadRequest

__all__ = ["app"]

app = typer.Typer(
    help="Draft heads: list, check, describe, import, export.", invoke_without_command=True
)

Head = Annotated[
    str,
    typer.Argument(metavar="HEAD", help="A directory in any known format, or a name listed here."),
]
Of = Annotated[
    str,
    typer.Option("--target", "-t", help="The target: a known name, a folder, or a GGUF file."),
]
Layers = Annotated[
    str | None,
    typer.Option(
        metavar="K,K,K",
        help="EAGLE-3: the target's states it reads, where its files leave that open. State k is "
        "what enters layer k.",
    ),
]


@app.callback()
def _list_by_default(context: typer.Context, as_json: Json = False) -> None:
    if context.invoked_subcommand is None:
        _show_list(as_json)


@app.command("list")
def list_heads(as_json: Json = False) -> None:
    """Heads that come with furcate, and those in your cache."""
    _show_list(as_json)


@app.command()
def info(head: Head, target: Of = EMBEDDED, as_json: Json = False) -> None:
    """What a head is, in numbers and flags."""
    desk = heads_module()
    found = desk.describe(head, lambda: desk.target_of(target))
    if as_json:
        print_json(found)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in _flat(found):
        table.add_row(name, str(value))
    out().print(table)


@app.command()
def lint(head: Head, target: Of = EMBEDDED, layers: Layers = None, as_json: Json = False) -> None:
    """Tell everything that is wrong with a head; fails where there is an error."""
    desk = heads_module()
    found = desk.lint(head, desk.target_of(target), _layers(layers))
    errors = sum(each.level == "error" for each in found)
    if as_json:
        findings = [{"level": f.level, "field": f.field, "text": f.text} for f in found]
        print_json({"errors": errors, "warnings": len(found) - errors, "findings": findings})
    else:
        for each in found:
            place = f"{each.field}: " if each.field and not each.text.startswith(each.field) else ""
            out().print(f"{each.level}: {place}{each.text}", markup=False)
        out().print(f"{errors} errors, {len(found) - errors} warnings")
    if errors:
        raise typer.Exit(1)


@app.command("import")
def import_head(
    head: Head,
    place: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="A new directory; else in your cache.")
    ] = None,
    target: Of = EMBEDDED,
    layers: Layers = None,
    as_json: Json = False,
) -> None:
    """Write a head as furcate's own, every flag explicit."""
    desk = heads_module()
    done = desk.import_(head, place, desk.target_of(target), _layers(layers))
    if as_json:
        print_json(done)
        return
    for remark in done["remarks"]:
        err().print(f"note: {remark}", markup=False)
    out().print(f"{done['kind']} from {done['imported_from']}: {done['path']}", markup=False)


@app.command("export")
def export_head(
    head: Head,
    place: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory.")],
    to: Annotated[str, typer.Option("--format", "-f", help="original, sglang or speculators.")],
    target: Of = EMBEDDED,
    draft_vocab: Annotated[
        int | None,
        typer.Option(help="Most frequent tokens that it scores.", show_default="as stored"),
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option(help="The target's name on the hub, which speculators' config holds."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a head as another engine reads it; refuses what that engine cannot compute."""
    desk = heads_module()
    done = desk.export(head, place, to, desk.target_of(target, verifier), draft_vocab)
    if as_json:
        print_json(done)
        return
    out().print(f"{done['format']}: {done['path']}/{done['file']}", markup=False)


def _show_list(as_json: bool) -> None:
    rows = heads_module().list_heads()
    if as_json:
        print_json({"heads": rows})
        return
    table = Table("name", "target", "kind", "parameters", "size", "where", box=None, pad_edge=False)
    for row in rows:
        parameters, size = f"{row['parameters'] / 1e6:.1f}M", f"{row['bytes'] / 1e6:.1f} MB"
        kind = row["kind"] or "damaged"
        table.add_row(row["name"], row["target"], kind, parameters, size, row["where"])
    out().print(table if rows else "no heads are here; `furcate train` makes them")


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        hint = "as in --layers 2,15,29"
        raise BadRequest("must list numbers", field="--layers", value=text, hint=hint) from None


def _flat(record: dict[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    lines: list[tuple[str, object]] = []
    for name, value in record.items():
        if isinstance(value, dict):
            lines += _flat(value, f"{prefix}{name}.")
        else:
            lines.append((prefix + name, value))
    return lines

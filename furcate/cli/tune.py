"""`furcate tune`: fit what a drafter's scores are worth to what the target says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from furcate.cli.lazy import tune_module
from furcate.cli.options import EMBEDDED, Json
from furcate.cli.show import err, out, print_json

__all__ = ["app"]

app = typer.Typer(help="Fit drafters to a target.", no_args_is_help=True)

TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
SEED = 20261202  # `furcate train` starts at 0: other conversations than those


@app.callback()
def _needs_a_subcommand() -> None:
    """Without this the only subcommand would be the command itself."""


@app.command()
def calibrate(
    drafter: Annotated[
        str, typer.Option("--drafter", "-d", help="A head: its folder, or a name as in heads list.")
    ],
    target: Annotated[
        str,
        typer.Option("--target", "-t", help="The target: a known name, a folder, or a GGUF file."),
    ] = EMBEDDED,
    prompts: Annotated[
        str,
        typer.Option(
            metavar="self|FILE",
            help="self: the target asks itself. FILE: a JSON object a line, with `prompt`, "
            "`messages` or `turns`. Prompts of the evaluation are left out.",
        ),
    ] = "self",
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0, help="Of the answers; may be given again.", show_default="0 .3 .7 1"),
    ] = None,
    conversations: Annotated[int, typer.Option(min=1, help="At each temperature.")] = 40,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 160,
    depth: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Levels.", show_default="8, or Medusa's heads"),
    ] = None,
    roots: Annotated[int, typer.Option(min=1, help="Positions at which trees are grown.")] = 2048,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of all that is drawn.")] = SEED,
    write_batch: Annotated[
        int, typer.Option(min=1, max=4096, help="Answers that the target writes at once.")
    ] = 40,
    file: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The file.", show_default="calibration.json, in its folder"
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float64, float32, bfloat16, float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Json = False,
) -> None:
    """Fit by likelihood how a head's scores predict the target, and what its nodes are worth."""
    tune = tune_module()
    asked = tune.Asked(
        target=target,
        dtype=dtype,
        device=device,
        drafter=drafter,
        streams=tune.StreamsAsked(
            prompts=prompts,
            temperatures=tuple(temperature or TEMPERATURES),
            conversations=conversations,
            answer_tokens=answer_tokens,
            seed=seed,
            batch=write_batch,
        ),
        depth=depth,
        roots=roots,
        out=file,
    )
    with err().status("loading ...") as status:
        done = tune.run(asked, lambda what: status.update(f"{what} ..."))
    if as_json:
        print_json(done)
    else:
        _show(done)


def _show(done: dict[str, Any]) -> None:
    scales = Table("depth", "beta", "sigma", "floor", "nats", "before", "outside", box=None)
    for number, level in enumerate(done["depths"], start=1):
        nats = [level[name] for name in ("nll_after", "nll_before")]
        scales.add_row(
            str(number),
            *(f"{level[name]:.3f}" for name in ("beta", "sigma", "floor")),
            *("-" if each is None else f"{each:.3f}" for each in nats),
            f"{level['outside']:.1%}",
        )
    trees = Table("temperature", "nodes", "expected", "accepted", box=None)
    for row in done["agreement"]:
        figures = (f"{row[name]:.2f}" for name in ("expected", "accepted"))
        trees.add_row(f"{row['temperature']:g}", str(row["nodes"]), *figures)
    out().print(scales)
    out().print(trees)
    out().print(f"{done['answers']} answers, {done['roots']} roots: {done['path']}", markup=False)

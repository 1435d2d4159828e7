"""`make evidence`: the whole grid on a real model, resumable, written as one JSON.

Each law's cells are kept as soon as they are done; a run that was interrupted goes on from there.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track

from furcate.engine.birth import birth
from furcate.engine.build import device_of, dtype_of
from furcate.engine.compare import TIE
from furcate.files import write_json
from furcate.models.load import load_decoder
from furcate.models.zoo import resolve
from furcate.prove.grid import PROMPTS, SETTINGS
from furcate.prove.streams import CellReport, Subject, run_setting
from furcate.text.tokenizer import load_tokenizer

__all__ = ["main", "summary"]

ALLOWED = 1 / 20_000  # differences a token, all of them rounding ties


@dataclass(frozen=True, slots=True)
class Run:
    """What identifies a run, so that only its own parts are taken up again."""

    target: str
    device: str
    dtype: str
    max_tokens: int


def main(
    target: Annotated[str, typer.Option(help="Name, directory or GGUF file.")] = "smollm2-135m",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Rounding ties are rare in float32.")] = "float32",
    max_tokens: Annotated[int, typer.Option(help="Tokens of each stream.")] = 64,
    out: Annotated[Path, typer.Option(help="Where the evidence is written.")] = Path(
        "benchmarks/results/stream_equality.json"
    ),
    parts: Annotated[Path, typer.Option(help="Where finished cells wait.")] = Path(
        "evidence-partial"
    ),
) -> None:
    """Compare the streams of every drafter with plain decoding over the whole grid."""
    where = device_of(device)
    run = Run(target, where.type, dtype, max_tokens)
    subject = _subject(run, where)
    began = time.perf_counter()
    reports: list[dict[str, Any]] = []
    for setting in track(list(SETTINGS), "stream equality", console=Console(stderr=True)):
        reports += _kept_or_run(run, subject, setting, parts)
    record = {
        "what": "streams of tree speculation against plain decoding, token for token",
        "command": f"python -m furcate.prove.evidence --target {target} --device {where.type} "
        f"--dtype {dtype} --max-tokens {max_tokens}",
        **birth(where),
        "run": asdict(run),
        "seconds": round(time.perf_counter() - began, 1),
        **summary(reports),
        "cells": reports,
    }
    write_json(out, record)
    _tell(record, out)
    if record["wrong"] or record["differences"] > ALLOWED * record["tokens"]:
        raise typer.Exit(1)


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Totals over the cells, and whether every cell put something to the proof."""
    partings = [part for report in reports for part in report["partings"]]
    return {
        "tokens": sum(report["tokens"] for report in reports),
        "differences": len(partings),
        "ties": sum(part["tie"] for part in partings),
        "wrong": sum(not part["tie"] for part in partings),
        "tie_below": TIE,
        "largest_gap": max((part["gap"] for part in partings), default=0.0),
        "every_cell_accepted_and_rejected": all(r["accepted"] and r["rejected"] for r in reports),
        "every_cell_left_the_likeliest_path": all(r["off_likeliest_path"] for r in reports),
    }


def _subject(run: Run, device: torch.device) -> Subject:
    path = resolve(run.target)
    tokenizer = load_tokenizer(path)
    decoder = load_decoder(path, dtype_of(run.dtype, device), device)
    if decoder.can_pack:
        decoder.pack()
    prompts = [tokenizer.chat_ids([{"role": "user", "content": text}]) for text in PROMPTS]
    return Subject(decoder, tokenizer, prompts, run.max_tokens)


def _kept_or_run(run: Run, subject: Subject, setting: str, parts: Path) -> list[dict[str, Any]]:
    """The cells of one law, from an earlier run of the same kind if they are there."""
    part = parts / f"{setting.replace(' ', '_').replace(',', '')}.json"
    if part.exists():
        kept = json.loads(part.read_text(encoding="utf-8"))
        if kept["run"] == asdict(run):
            cells: list[dict[str, Any]] = kept["cells"]
            return cells
    cells = [_as_record(report) for report in run_setting(subject, setting)]
    write_json(part, {"run": asdict(run), "cells": cells})
    return cells


def _as_record(report: CellReport) -> dict[str, Any]:
    return asdict(report)


def _tell(record: dict[str, Any], out: Path) -> None:
    say = Console().print
    say(f"{record['tokens']} tokens compared, {record['differences']} streams part")
    say(f"{record['ties']} of these at rounding ties, {record['wrong']} wrong; written to {out}")


if __name__ == "__main__":
    typer.run(main)

"""`make evidence`: the whole grid on a real model, resumable, written as one JSON.

Each law's cells are kept as soon as they are done; a run that was interrupted goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pydantic import TypeAdapter
from rich.console import Console

import furcate
from furcate.engine.birth import birth, commit
from furcate.engine.build import device_of, dtype_of
from furcate.engine.compare import TIE, Parting
from furcate.errors import BadRequest, FurcateError
from furcate.files import write_json
from furcate.models.load import load_decoder
from furcate.models.zoo import resolve
from furcate.prove.grid import BATCHES, PROMPTS, SETTINGS
from furcate.prove.streams import (
    CHAINS,
    GUESSERS,
    NODES,
    CellReport,
    Subject,
    pooled,
    run_setting,
)
from furcate.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "ENOUGH",
    "FREQUENT",
    "Part",
    "Run",
    "gaps",
    "laws_of",
    "main",
    "part_of",
    "record_of",
    "run_of",
    "shortcomings",
]

ALLOWED = 1 / 20_000  # differences a token, all of them rounding ties
ENOUGH = 60_000  # tokens; fewer are no evidence
ENOUGH_FOR_A_RATE = 10_000  # compared tokens; of fewer nobody can say how often streams part
PER_STREAM = 32  # tokens; the whole grid has ENOUGH even if laws with stop ids end early
EXACT = ("float32", "float64")  # dtypes in which TIE is what rounding can do
GAPS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)  # bounds of a histogram
FREQUENT = (",", ".", " the", " a", "\n")  # texts whose tokens end the streams with min_tokens


@dataclass(frozen=True, slots=True)
class Run:
    """What identifies a run, so that only its own parts are taken up again."""

    target: str
    device: str
    dtype: str
    max_tokens: int
    commit: str
    grid: str  # hash of laws, drafters, batches, prompts
    code: str  # hash of the package, which tells uncommitted changes apart
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """The cells of one law, and how long they took."""

    seconds: float
    cells: list[CellReport]


def main(  # noqa: PLR0913  # a command's parameters are its flags
    target: Annotated[str, typer.Option(help="Name, directory or GGUF file.")] = "smollm2-135m",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Rounding ties are rare in float32.")] = "float32",
    max_tokens: Annotated[int, typer.Option(help="Tokens of each stream.")] = PER_STREAM,
    batch_invariant: Annotated[
        bool, typer.Option(help="Decode with kernels that treat every row by itself (a GPU only).")
    ] = False,
    share: Annotated[
        str, typer.Option(help="K/N: every N-th law from the K-th on, and no evidence is written.")
    ] = "",
    seconds: Annotated[
        float, typer.Option(help="Begin no law after so many; 0: take finished ones alone.")
    ] = math.inf,
    commit: Annotated[str, typer.Option(help="Of this code, for machines without git.")] = "",
    out: Annotated[Path, typer.Option(help="Where the evidence is written.")] = Path(
        "benchmarks/results/stream_equality.json"
    ),
    parts: Annotated[Path, typer.Option(help="Where finished cells wait.")] = Path(
        "evidence-partial"
    ),
) -> None:
    """Compare the streams of every drafter with plain decoding over the whole grid.

    The exit code is 1 where they differ by more than rare rounding ties, where a cell put nothing
    to the proof, or where too few tokens were compared. Several processes may do a share of the
    laws each; a last one without a share puts together what they left in `parts`. Laws that there
    was no time for are named as a shortcoming.
    """
    end = time.monotonic() + seconds
    try:
        where, laws = device_of(device), laws_of(share)
        run = run_of(target, where, dtype, max_tokens, commit)
        run = replace(run, batch_invariant=batch_invariant)
        done = _all_parts(run, _subject(run, where), laws, (parts, end))
        if share:
            return
        record = record_of(run, where, done)
        write_json(out, record)
    except FurcateError as err:
        typer.echo(f"error: {err}", err=True)
        raise typer.Exit(err.exit_code) from None
    _tell(record, out)
    if record["shortcomings"]:
        raise typer.Exit(1)


def laws_of(share: str) -> list[str]:
    """The laws of a share "K/N"; all of them for "". Raises BadRequest for any other text."""
    every = list(SETTINGS)
    if not share:
        return every
    first, slash, count = share.partition("/")
    numbers = first.isdecimal() and count.isdecimal() and bool(slash)
    if not numbers or not 1 <= int(first) <= int(count):
        raise BadRequest("not a share", field="share", value=share, hint="1/4 to 4/4, say")
    return every[int(first) - 1 :: int(count)]


def run_of(
    target: str, device: torch.device, dtype: str, max_tokens: int, named_commit: str = ""
) -> Run:
    """The run of this code; `named_commit` "" asks git."""
    grid = json.dumps([SETTINGS, GUESSERS, BATCHES, PROMPTS, FREQUENT, NODES], sort_keys=True)
    package = Path(furcate.__file__).parent
    code = b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))
    return Run(
        target=target,
        device=device.type,
        dtype=str(dtype_of(dtype, device)).removeprefix("torch."),
        max_tokens=max_tokens,
        commit=named_commit or commit(),
        grid=_hash(grid.encode()),
        code=_hash(code),
    )


def record_of(run: Run, device: torch.device, parts: Sequence[Part]) -> dict[str, Any]:
    """What is written: totals, what the run falls short of, and every cell."""
    cells = [cell for part in parts for cell in part.cells]
    partings = [parting for cell in cells for parting in cell.partings]
    pools, compared = pooled(cells), sum(cell.compared for cell in cells)
    exact = run.dtype in EXACT
    return {
        "what": "streams of tree speculation against plain decoding, token for token",
        "command": f"python -m furcate.prove.evidence --target {run.target} --device {run.device} "
        f"--dtype {run.dtype} --max-tokens {run.max_tokens}"
        + " --batch-invariant"
        * run.batch_invariant,
        **birth(device),
        "commit": run.commit,
        "run": asdict(run),
        "seconds": round(sum(part.seconds for part in parts), 1),
        "tokens": sum(cell.tokens for cell in cells),
        "differences": len(partings),
        "ties": sum(parting.tie for parting in partings),
        "wrong": sum(not parting.tie for parting in partings) if exact else None,
        "tie_below": TIE if exact else None,  # each parting has its own
        "largest_gap": _finite(max((parting.gap for parting in partings), default=0.0)),
        "differences_on_chains": sum(
            len(cell.partings) for cell in cells if cell.drafter in CHAINS
        ),
        "compared": compared,
        "differences_in_10000_tokens": 1e4 * len(partings) / compared if compared else None,
        "gaps": gaps(partings),
        "shortcomings": shortcomings(cells, exact=exact) + _missing(cells),
        "cells": [_as_record(cell) for cell in pools],
        "cells_by_drafter": [_as_record(cell) for cell in cells],
    }


def gaps(partings: Sequence[Parting]) -> dict[str, int]:
    """How many streams parted at a gap below each bound, and at none below the one before."""
    counts = dict.fromkeys([*(f"below {bound:g}" for bound in GAPS), "above"], 0)
    for parting in partings:
        found = next((f"below {bound:g}" for bound in GAPS if parting.gap < bound), "above")
        counts[found] += 1
    return counts


def shortcomings(cells: Sequence[CellReport], *, exact: bool = True) -> list[str]:
    """Why these cells are no evidence of equal streams; empty if they are.

    In half precision how wide a gap rounding explains is a rule of thumb (`tie_width`): how often
    streams part, and how close the calls were, is then the result and no shortcoming.
    """
    pools = pooled(cells)
    tokens = sum(cell.tokens for cell in pools)
    wrong = sum(cell.wrong for cell in pools)
    differences = sum(len(cell.partings) for cell in pools)
    found = [f"{cell.cell}: {what}" for cell in pools for what in cell.idle]
    if exact and wrong:
        found.append(f"{wrong} streams part where no rounding explains it")
    if exact and differences > ALLOWED * tokens:
        found.append(f"{differences} streams part, more than one in {1 / ALLOWED:.0f} tokens")
    if exact and tokens < ENOUGH:
        found.append(f"{tokens} tokens were compared, which is no evidence: {ENOUGH} are needed")
    compared = sum(cell.compared for cell in pools)
    if not exact and compared < ENOUGH_FOR_A_RATE:
        found.append(f"{compared} tokens are too few for a rate: {ENOUGH_FOR_A_RATE} are needed")
    return found


def _missing(cells: Sequence[CellReport]) -> list[str]:
    """Laws that there was no time for."""
    done = {cell.law for cell in cells}
    left = [law for law in SETTINGS if law not in done]
    return [f"{len(left)} laws were not reached: {'; '.join(left)}"] if left else []


def part_of(run: Run, subject: Subject, setting: str, folder: Path) -> Part:
    """The cells of one law, from an earlier run of the same kind if they are there, else run."""
    path = _file(folder, setting)
    kept = _kept(run, path)
    if kept is not None:
        return kept
    began = time.perf_counter()
    cells = run_setting(subject, setting)
    part = Part(time.perf_counter() - began, cells)
    rows = [_as_record(cell) for cell in cells]
    write_json(path, {"run": asdict(run), "seconds": part.seconds, "cells": rows})
    return part


def _all_parts(
    run: Run, subject: Subject, laws: Sequence[str], place: tuple[Path, float]
) -> list[Part]:
    """Parts of these laws; `place` is where they are kept, and when the last one may begin."""
    folder, end = place
    found = []
    for law in laws:
        late = time.monotonic() >= end
        part = _kept(run, _file(folder, law)) if late else part_of(run, subject, law, folder)
        told = "no time left" if part is None else _said(part)
        typer.echo(f"{law}: {told}", err=True)
        found += [] if part is None else [part]
    return found


def _said(part: Part) -> str:
    tokens = sum(cell.tokens for cell in part.cells)
    partings = sum(len(cell.partings) for cell in part.cells)
    return f"{tokens} tokens, {partings} streams part, {part.seconds:.1f} s"


def _file(folder: Path, law: str) -> Path:
    """Where a law's part is kept."""
    return folder / f"{law.replace(' ', '_').replace(',', '')}.json"


def _kept(run: Run, path: Path) -> Part | None:
    """The part that is written there; None if there is none, or another run's, or a damaged one."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["run"] != asdict(run):
            return None
        for parting in (parting for cell in kept["cells"] for parting in cell["partings"]):
            parting["gap"] = math.inf if parting["gap"] is None else parting["gap"]
        fields = {"seconds": kept["seconds"], "cells": kept["cells"]}
        return TypeAdapter(Part).validate_python(fields)
    except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged: it is done again
        return None


def _subject(run: Run, device: torch.device) -> Subject:
    path = resolve(run.target)
    tokenizer = load_tokenizer(path)
    decoder = load_decoder(path, dtype_of(run.dtype, device), device)
    if decoder.can_pack:
        decoder.pack()
    prompts = [tokenizer.chat_ids([{"role": "user", "content": text}]) for text in PROMPTS]
    ends = _frequent(tokenizer)
    return Subject(
        decoder,
        tokenizer,
        prompts,
        run.max_tokens,
        stop_ids=ends,
        batch_invariant=run.batch_invariant,
    )


def _frequent(tokenizer: Tokenizer) -> list[int]:
    ids = [tokenizer.encode(text, special=False)[-1] for text in FREQUENT]
    return list(dict.fromkeys(ids))


def _as_record(report: CellReport) -> dict[str, Any]:
    record = asdict(report)
    for parting in record["partings"]:
        parting["gap"] = _finite(parting["gap"])
    return record


def _finite(gap: float) -> float | None:
    """JSON has no infinity."""
    return gap if math.isfinite(gap) else None


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _tell(record: dict[str, Any], out: Path) -> None:
    say = Console().print
    say(f"{record['tokens']} tokens compared, {record['differences']} streams part")
    wrong = "" if record["wrong"] is None else f", {record['wrong']} wrong"
    width = record["tie_below"]
    ties = f"as {record['run']['dtype']} rounds" if width is None else f"of {width:g} or less"
    say(f"{record['ties']} of these at ties {ties}{wrong}; written to {out}")
    for shortcoming in record["shortcomings"]:
        say(f"short of evidence: {shortcoming}")


if __name__ == "__main__":
    typer.run(main)

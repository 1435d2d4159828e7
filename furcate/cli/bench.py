"""`furcate bench`: tokens per round, acceptance by depth and speed, beside plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer import Context, Exit, Option

from furcate.cli.drafting import DraftFlags
from furcate.cli.fallbacks import fallbacks
from furcate.cli.lazy import bench_module, compare_module, drafter_json, load_engine
from furcate.cli.options import SamplingFlags, TargetFlags
from furcate.cli.show import check_writable, err, out, print_json, why_parted
from furcate.config import SamplingParams
from furcate.engine.prompts import PromptLine, read_prompts
from furcate.files import write_json

if TYPE_CHECKING:
    from furcate.engine.bench import Answered
    from furcate.engine.engine import Engine

__all__ = ["bench"]


class Baseline(StrEnum):
    """What the engine under test is set beside."""

    PLAIN = "plain"
    NONE = "none"


class Turns(StrEnum):
    """Which turns of a conversation are asked."""

    FIRST = "first"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class BenchFlags:
    """What is measured, and where the figures go."""

    prompts: Annotated[
        Path,
        Option(help="A JSON object a line, with `prompt`, `messages` or `turns`."),
    ]
    limit: Annotated[int | None, Option(min=1, help="Only the first prompts.")] = None
    category: Annotated[
        list[str] | None, Option(help="Only prompts of this category; may be repeated.")
    ] = None
    turns: Annotated[Turns, Option(help="The first turn alone, or all of them.")] = Turns.FIRST
    batch: Annotated[int, Option(min=1, max=1024, help="Prompts decoded together.")] = 1
    baseline: Annotated[
        Baseline, Option(help="Decode plainly too, in the same run, and compare tokens.")
    ] = Baseline.PLAIN
    as_json: Annotated[
        str | None,
        Option("--json", metavar="FILE", help="Write the figures to a file; - prints them."),
    ] = None


def bench(
    ctx: Context,
    flags: BenchFlags,
    sampling: SamplingFlags,
    draft: DraftFlags,
    target: TargetFlags,
) -> None:
    """Measure tokens per round (bonus included), acceptance and speed on a file of prompts.

    The exit code is 1 if an answer differs from plain decoding by more than a rounding tie.
    """
    params = sampling.lone_params()
    if params.seed is None:  # both ways of decoding need the same one
        params = params.model_copy(update={"seed": 0})
    all_turns = flags.turns is Turns.ALL
    prompts = read_prompts(
        flags.prompts,
        limit=flags.limit,
        all_turns=all_turns,
        categories=flags.category or (),
    )
    if flags.as_json not in (None, "-"):
        check_writable(Path(str(flags.as_json)))
    engines = 2 if flags.baseline is Baseline.PLAIN else 1
    with load_engine(target, draft, max_batch=flags.batch, engines=engines) as engine:
        answers = _measured(engine, prompts, params, flags)
        asked = {"command": ctx.obj, **_asked(flags, params, draft, target)}
        asked["drafter_details"] = drafter_json(engine)
        report = bench_module().report(engine, answers, asked)
    if flags.as_json == "-":
        print_json(report)
    else:
        _show(report)
        for line in fallbacks(report):
            err().print(line, style="dim")
        if flags.as_json is not None:
            write_json(Path(flags.as_json), report)
    if not all(part["tie"] for part in report["differences"] or ()):
        raise Exit(1)


def _measured(
    engine: Engine, prompts: Sequence[PromptLine], params: SamplingParams, flags: BenchFlags
) -> list[Answered]:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err(),
        transient=True,
    )
    plain = compare_module().plain_twin(engine) if flags.baseline is Baseline.PLAIN else None
    run = bench_module().Bench(engine, plain, params)
    answers: list[Answered] = []
    with bar:
        task = bar.add_task("decoding", total=sum(1 + len(p.later) for p in prompts))
        run.warm_up(prompts[0])
        for answer in run.run(prompts, flags.batch):
            answers.append(answer)
            bar.advance(task)
    return answers


def _asked(
    flags: BenchFlags, params: SamplingParams, draft: DraftFlags, target: TargetFlags
) -> dict[str, Any]:
    """What was asked, so that the figures can be taken again."""
    return {
        "target": target.target,
        "drafter": draft.chosen_drafter(),
        "draft": draft.draft_options().model_dump(),
        "sampling": params.model_dump(exclude_defaults=True) | {"temperature": params.temperature},
        "prompt_file": flags.prompts.name,
        "turns": flags.turns.value,
        "batch": flags.batch,
    }


def _show(report: dict[str, Any]) -> None:
    for line in _lines(report):
        out().print(line)
    if len(report["by_category"]) > 1:
        out().print(_by_category(report["by_category"]))


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [
        f"{report['prompts']} answers, {report['tokens']} tokens, {report['rounds']} rounds, "
        f"on {report['device']}",
        f"tokens per round (bonus included): {report['tokens_per_round']:.3f}",
        f"levels drafted for a round, in the mean: {report['mean_levels']:.2f}",
        "accepted by depth, of those that reached it: "
        + _shares(report["conditional_acceptance_by_depth"]),
        f"accepted by depth, of all rounds: {_shares(report['marginal_acceptance_by_depth'])}",
        f"tokens/s: {report['tokens_per_second']:.1f}",
    ]
    if report["identical"] is None:
        return lines
    lines.append(f"tokens/s, plain: {report['baseline_tokens_per_second']:.1f}")
    if report["speedup"] is not None:
        lines.append(f"speedup: {report['speedup']:.3f}")
    lines.append(f"identical to plain decoding: {'yes' if report['identical'] else 'no'}")
    for part in report["differences"]:
        gap = "unbounded" if part["gap"] is None else f"{part['gap']:.1e}"
        lines.append(
            f"  line {part['line']}, turn {part['turn'] + 1}: parts at token {part['index']}, "
            f"gap {gap}, {why_parted(part)}"
        )
    return lines


def _by_category(groups: dict[str, dict[str, Any]]) -> Table:
    table = Table(
        "category", "answers", "tokens", "per round*", "tokens/s", "speedup", "identical", box=None
    )
    for name, group in groups.items():
        speedup, same = group["speedup"], group["identical"]
        table.add_row(
            name,
            str(group["prompts"]),
            str(group["tokens"]),
            f"{group['tokens_per_round']:.3f}",
            f"{group['tokens_per_second']:.1f}",
            "-" if speedup is None else f"{speedup:.3f}",
            "-" if same is None else "yes" if same else "no",
        )
    table.caption = "* tokens per round, bonus included"
    return table


def _shares(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.3f}" for share in shares) or "none was drafted"

"""How `furcate train` shows its progress and its results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from furcate.cli.show import err

if TYPE_CHECKING:
    from furcate.train.prepare import Progress
    from furcate.train.run import Report

__all__ = ["TextBar", "TrainingBar", "head_lines", "text_line"]


class _Bar:
    """One bar with a line of figures, on standard error."""

    def __init__(self, what: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"))
        self._bars = Bars(*columns, TimeRemainingColumn(), console=err(), transient=True)
        self._task = self._bars.add_task(what, total=None, told="", visible=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def _show(self, done: float, total: float | None, told: str) -> None:
        self._bars.update(self._task, completed=done, total=total, told=told, visible=True)

    def _print(self, line: str) -> None:
        self._bars.console.print(line, markup=False)


class TextBar(_Bar):
    """Tokens of text, and tokens per second of this run."""

    def __init__(self) -> None:
        super().__init__("text")
        self._began = time.perf_counter()

    def told(self, progress: Progress) -> None:
        """Show how far the text is."""
        speed = (progress.tokens - progress.before) / (time.perf_counter() - self._began)
        told = f"{progress.tokens:,} tokens, {speed:,.0f} tokens/s"
        self._show(progress.tokens, progress.wanted, told)


class TrainingBar(_Bar):
    """Loss at the first depth; what held-out text says stays on the screen."""

    def __init__(self) -> None:
        super().__init__("training")

    def told(self, report: Report) -> None:
        """Show how far the run is."""
        if report.held_out is not None:
            for name, depths in report.held_out.items():
                self._print(
                    _held_out(f"step {report.step}, {name}", depths.conditional, depths.chain)
                )
            return
        losses = ", ".join(f"{name} {steps.loss[0]:.3f}" for name, steps in report.heads.items())
        told = f"loss {losses}, {report.tokens_per_second:,.0f} tokens/s"
        self._show(report.done, 1.0, told)


def text_line(figures: dict[str, Any]) -> str:
    """What the text is."""
    parts = [
        f"text: {figures['conversations']:,} conversations, {figures['tokens']:,} tokens, "
        f"{figures['answer_tokens']:,} of them in answers"
    ]
    if figures["tokens_per_second"] is not None:
        speed = f"{figures['tokens_per_second']:,.0f} tokens/s"
        parts.append(f"{figures['new_tokens']:,} tokens are new, at {speed}")
    if figures["held_away"]:
        parts.append(f"{figures['held_away']:,} conversations with evaluation prompts left out")
    if figures["too_long"]:
        parts.append(f"{figures['too_long']:,} left out whose first answer lies beyond the context")
    return "; ".join(parts)


def head_lines(figures: dict[str, Any]) -> list[str]:
    """What came of a training."""
    lines = [f"{figures['steps']} steps, {figures['tokens']:,} tokens, {figures['seconds']:.0f} s"]
    for name, head in figures["heads"].items():
        held_out = head["held_out"]
        lines.append(_held_out(name, held_out["conditional"], held_out["chain"]))
        if head["path"] is not None:
            lines.append(f"  {head['path']}")
    return [*lines, *figures["notes"]]


def _held_out(name: str, conditional: Sequence[float], chain: float) -> str:
    shares = " ".join(f"{share:.3f}" for share in conditional)
    return (
        f"{name}: conditional acceptance by depth {shares}, a chain gives {chain:.2f} tokens per "
        "round (bonus included), held-out text at temperature 0"
    )

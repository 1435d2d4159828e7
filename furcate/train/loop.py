"""Trains heads together on one frozen target: steps, reports, checkpoints, and the end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace

import torch

from furcate.errors import BadRequest
from furcate.models.decoder import Decoder
from furcate.train.batches import lay_out
from furcate.train.corpus import Corpus
from furcate.train.curves import HELD_OUT, TRAIN, write_curves
from furcate.train.finish import write_heads
from furcate.train.held_out import Depths
from furcate.train.interrupt import Stop, heeding_signals
from furcate.train.pace import Pace
from furcate.train.progress_log import ProgressLog
from furcate.train.recipe import Recipe
from furcate.train.run import OnReport, Outcome, Report, Run, Steps
from furcate.train.schedule import progress, rate
from furcate.train.session import Session, begin
from furcate.train.step import Learned

__all__ = ["train"]


def train(
    target: Decoder, corpus: Corpus, recipe: Recipe, run: Run, on_report: OnReport
) -> Outcome:
    """Train all heads of a recipe; Ctrl-C and SIGTERM end it early with a checkpoint.

    Written to `run.out`: a folder for each head at the end, `checkpoint/`, `metrics.jsonl`,
    `curves.json`, and `curves.png` where matplotlib is installed.

    Raises:
        BadRequest: a setting does not suit the run that is there, the device or the loss.
        BadFile: too little text, a head that does not fit the target, a damaged checkpoint.
        Unsupported: the target is of a type that gradients do not fit into.
        StorageFailed: the disk is full or the like; the last checkpoint stays.
    """
    with _memory_named(recipe), heeding_signals() as stop:
        session = begin(target, corpus, recipe, run)
        return _Loop(session, on_report).go(stop)


class _Loop:
    """Counts and clocks of this part of a run."""

    def __init__(self, session: Session, on_report: OnReport) -> None:
        self._session = session
        self._on_report = on_report
        self._position = session.position
        self._log = ProgressLog(session.run.out, session.position.step)
        self._pace = Pace(session.target.device)
        self._window = _Window()
        self._clock = session.run.clock
        self._began = self._clock()
        self._reported_at = self._began
        self._saved_at = self._measured_at = self._began

    def go(self, stop: Stop) -> Outcome:
        """Steps until the run is done or somebody asks to stop."""
        recipe = self._session.recipe
        while self._done < 1 and not stop.asked:
            self._step()
            if self._position.step % recipe.log_steps == 0:
                self._report()
            if self._clock() - self._measured_at >= recipe.held_out_seconds:
                self._measure()
            if self._clock() - self._saved_at >= recipe.checkpoint_seconds:
                self._save()
        if self._window.steps:
            self._report()
        self._save()
        held_out = self._measure()
        note = write_curves(self._session.run.out, self._log.entries)
        heads = write_heads(self._session, self._position, held_out) if self._done >= 1 else {}
        return Outcome(
            self._done >= 1, self._position, heads, held_out, () if note is None else (note,)
        )

    @property
    def _done(self) -> float:
        return progress(self._session.recipe, self._position.tokens, self._position.seconds)

    def _step(self) -> None:
        session, at = self._session, self._position
        recipe = session.recipe
        talks = list(session.order.fill(session.corpus, recipe.batch_tokens))
        batch = lay_out(talks, recipe.lookahead, session.target.device)
        speed = rate(recipe, self._done, at.step - session.fresh_from)
        self._window.add(session.lessons.step(batch, at.step, speed), recipe.batch_tokens, speed)
        self._pace.step()
        self._position = replace(
            at,
            step=at.step + 1,
            tokens=at.tokens + recipe.batch_tokens,
            taken=session.order.taken,
            seconds=session.position.seconds + self._clock() - self._began,
        )

    def _report(self) -> None:
        """Tell and write down how the last steps went; the host waits for the device here."""
        report = self._now(self._window.means(), None)
        self._window = _Window()
        self._reported_at = self._clock()
        heads = {name: asdict(steps) for name, steps in report.heads.items()}
        self._write_down(TRAIN, heads, {"rate": report.rate, "speed": report.tokens_per_second})
        self._on_report(report)

    def _measure(self) -> Mapping[str, Depths]:
        held_out = self._session.held_out.measure(self._session.lessons.learners)
        self._measured_at = self._clock()
        self._write_down(HELD_OUT, {name: asdict(depths) for name, depths in held_out.items()}, {})
        self._on_report(self._now({}, held_out))
        return held_out

    def _save(self) -> None:
        self._window.check()
        self._session.save(self._position)
        self._saved_at = self._clock()

    def _now(self, heads: Mapping[str, Steps], held_out: Mapping[str, Depths] | None) -> Report:
        at, seconds = self._position, self._clock() - self._reported_at
        speed = self._window.tokens / seconds if seconds > 0 else 0.0
        return Report(
            self._done, at.step, at.tokens, at.seconds, speed, self._window.rate, heads, held_out
        )

    def _write_down(
        self, kind: str, heads: Mapping[str, object], more: Mapping[str, float]
    ) -> None:
        at = self._position
        numbers = {"step": at.step, "tokens": at.tokens, "seconds": at.seconds, **more}
        self._log.add({"kind": kind, **numbers, "heads": dict(heads)})


class _Window:
    """Sums over the steps since the last report, on the device."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.rate = 0.0
        self._sums: Learned = {}

    def add(self, learned: Learned, tokens: int, rate: float) -> None:
        """One step more."""
        for name, found in learned.items():
            self._sums[name] = self._sums[name] + found if name in self._sums else found
        self.steps += 1
        self.tokens += tokens
        self.rate = rate

    def means(self) -> dict[str, Steps]:
        """By head; waits for the device. Raises BadRequest as `check`."""
        self.check()
        means = {}
        for name, sums in self._sums.items():
            *table, gradient = (sums / self.steps).tolist()
            loss, overlap, agreement = (tuple(table[k::3]) for k in range(3))
            means[name] = Steps(loss, overlap, agreement, gradient)
        return means

    def check(self) -> None:
        """Raises BadRequest where a loss or a gradient is no number any more."""
        for name, sums in self._sums.items():
            if not math.isfinite(float(sums.sum())):
                hint = "give a lower rate or a longer warm-up and start anew"
                what = f"the loss of {name} is no longer a number"
                raise BadRequest(what, field="rate", value=self.rate, hint=hint)


@contextmanager
def _memory_named(recipe: Recipe) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as err:
        what = "the device has no memory left for a batch"
        hint = f"lower it, or loss_rows = {recipe.loss_rows}"
        raise BadRequest(what, field="batch_tokens", value=recipe.batch_tokens, hint=hint) from err

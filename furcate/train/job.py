"""One training as it is asked for on a command line: what is left open is chosen here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from furcate.engine.birth import birth
from furcate.errors import BadRequest
from furcate.kernels.soft_cross_entropy import Objective
from furcate.models import zoo
from furcate.train.loop import train
from furcate.train.prepare import (
    CONTEXT,
    Target,
    Text,
    TextAsked,
    default_held_away,
    prepare,
)
from furcate.train.recipe import HeadPlan, Recipe
from furcate.train.run import OnReport, Outcome, Run
from furcate.train.session import CHECKPOINT
from furcate.train.shapes import Shape, plans

__all__ = [
    "CONTEXT",
    "Shape",
    "Target",
    "Text",
    "TextAsked",
    "TrainingAsked",
    "default_held_away",
    "outcome_json",
    "prepare",
    "trained",
]

EPOCHS = 3  # passes over the text where neither tokens nor minutes are given
GPU_BATCH_TOKENS, CPU_BATCH_TOKENS = 32_768, 2_048


@dataclass(frozen=True, slots=True)
class TrainingAsked:
    """A training; None leaves a choice to furcate.

    `mlp` are sizes of MLPs by kind; `shape` is what else may be chosen about heads.
    """

    kinds: tuple[str, ...]
    out: Path
    resume: bool
    seed: int
    command: str
    shape: Shape
    mlp: Mapping[str, int]
    tokens: int | None = None
    minutes: float | None = None
    batch_tokens: int | None = None
    loss: Literal["soft_ce", "lk"] = "soft_ce"
    optimizer: Literal["adamw", "muon"] = "adamw"
    rate: float | None = None


def trained(target: Target, text: Text, asked: TrainingAsked, on_report: OnReport) -> Outcome:
    """Train heads on a text.

    Raises:
        BadRequest: an option is out of range, or does not suit the run that is there.
        BadFile, Unsupported, StorageFailed: as `loop.train`.
    """
    run = Run(
        asked.out,
        # an interruption before the first step leaves text and no checkpoint
        resume=asked.resume and (asked.out / CHECKPOINT).exists(),
        provenance=_provenance(target, asked),
        fingerprint=target.tokenizer.fingerprint(),
    )
    try:
        return train(target.decoder, text.corpus, _recipe(target, text, asked), run, on_report)
    except BadRequest as err:
        flag = _flag(err.field)
        raise BadRequest(err.what, field=flag, value=err.value, hint=err.hint) from err


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """The figures of a training."""
    at = outcome.position
    return {
        "finished": outcome.finished,
        "steps": at.step,
        "tokens": at.tokens,
        "seconds": at.seconds,
        "heads": {
            name: {
                "path": str(outcome.heads[name]) if name in outcome.heads else None,
                "held_out": asdict(depths),
            }
            for name, depths in outcome.held_out.items()
        },
        "notes": list(outcome.notes),
    }


def _recipe(target: Target, text: Text, asked: TrainingAsked) -> Recipe:
    on_gpu = target.decoder.device.type == "cuda"
    tokens = asked.tokens
    if tokens is None and asked.minutes is None:
        tokens = EPOCHS * len(text.corpus.tokens)
    chosen: dict[str, Any] = {} if asked.rate is None else {"rate": asked.rate}
    return Recipe(
        heads=_plans(target, asked),
        tokens=tokens,
        minutes=asked.minutes,
        seed=asked.seed,
        batch_tokens=asked.batch_tokens or (GPU_BATCH_TOKENS if on_gpu else CPU_BATCH_TOKENS),
        optimizer=asked.optimizer,
        objective=Objective(asked.loss),
        **chosen,
    )


def _plans(target: Target, asked: TrainingAsked) -> tuple[HeadPlan, ...]:
    spec = target.decoder.spec
    sized = {
        kind: replace(asked.shape, intermediate_size=asked.mlp.get(kind)) for kind in asked.kinds
    }
    return tuple(plan for kind in asked.kinds for plan in plans([kind], spec, sized[kind]))


def _flag(field: str | None) -> str | None:
    """The flag for a setting; what is none stays as it is."""
    flags = {"rate": "--lr", "steps": "--unroll", "batch_tokens": "--batch-tokens"}
    return flags.get(field or "", field)


def _provenance(target: Target, asked: TrainingAsked) -> dict[str, Any]:
    """What the run itself cannot know; a licence is named where furcate knows the target's."""
    known = {info.path: info.record for info in zoo.known_models()}
    record = known.get(target.path)
    return {
        "command": asked.command,
        "target": target.name if record is None else record.source,
        "licence": None if record is None else record.licence,
        "kinds": list(asked.kinds),
        "begun": birth(target.decoder.device),
    }

"""From drafting options to the shape of a network's trees and what its scores are worth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from furcate.config import DraftOptions
from furcate.drafters.chosen_tree import chosen_tree, json_of
from furcate.drafters.expand import Manner
from furcate.drafters.plan import Plan, dynamic, static
from furcate.drafters.plausible import PRIOR
from furcate.drafters.prune import Pruning
from furcate.errors import BadRequest
from furcate.tree.calibration import Calibration

__all__ = ["Habit", "calibration_of", "manner_of"]

CALIBRATION = "calibration.json"


@dataclass(frozen=True, slots=True)
class Habit:
    """What a drafter does where nothing is asked of it."""

    depth: int
    width: int  # rows that go on at each level, and children of each
    deepest: int | None = None  # no level below has anything to say; None: any depth does
    calibration: Calibration = PRIOR
    words: int = 1 << 30  # tokens it can propose
    longest: int | None = None  # most nodes that a round may accept; None: as deep as it drafts


def manner_of(options: DraftOptions, habit: Habit, device: torch.device) -> Manner:
    """Raises BadRequest for a tree that the drafter cannot grow, BadFile for an unreadable one."""
    return Manner(
        plan=_plan(options, habit, device),
        calibration=_calibration(options, habit.calibration),
        pruning=Pruning(
            kappa=options.entropy_children,
            gamma=options.entropy_gate,
            least=options.value_threshold,
        ),
        longest=habit.longest,
        coupled=options.coupled,
    )


def calibration_of(folder: Path) -> Calibration:
    """What was fitted for the head in this folder, or what fits most heads."""
    file = folder / CALIBRATION
    return Calibration.from_dict(json_of(file)) if file.exists() else PRIOR


def _plan(options: DraftOptions, habit: Habit, device: torch.device) -> Plan:
    if options.tree != "dynamic":
        plan = static(chosen_tree(options.tree), device)
        field = "tree"
    else:
        deepest = habit.depth if habit.deepest is None else min(habit.depth, habit.deepest)
        depth = deepest if options.depth is None else options.depth
        width = min(habit.width if options.topk is None else options.topk, habit.words)
        plan = dynamic(depth, width, width)
        field = "depth"
    if habit.deepest is not None and len(plan) > habit.deepest:
        what = f"these heads see {habit.deepest} levels ahead"
        raise BadRequest(what, field=field, value=len(plan), hint="ask for a shallower tree")
    if max(step.children for step in plan) > habit.words:
        what = f"the drafter proposes only {habit.words} tokens"
        raise BadRequest(what, field=field, value=options.tree, hint="use lower ranks")
    return plan


def _calibration(options: DraftOptions, fitted: Calibration) -> Calibration:
    asked = {name: getattr(options, name) for name in ("beta", "sigma")}
    changes = {name: value for name, value in asked.items() if value is not None}
    return replace(fitted, scales=tuple(replace(scale, **changes) for scale in fitted.scales))

"""Builds what a run needs, new or from a checkpoint, and refuses to go on with something else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from furcate.errors import BadRequest, Unsupported
from furcate.heads.build import new_head
from furcate.heads.places import Head
from furcate.models.decoder import Decoder
from furcate.train.batches import Order, Split, lay_out, split
from furcate.train.checkpoint import Checkpoint, Position, load, save
from furcate.train.corpus import Corpus
from furcate.train.counts import answer_counts, frequent
from furcate.train.held_out import HeldOut
from furcate.train.learner import Learner
from furcate.train.recipe import Recipe
from furcate.train.run import Run
from furcate.train.start import start
from furcate.train.step import Lessons, Watched

__all__ = ["CHECKPOINT", "Session", "begin"]

CHECKPOINT = "checkpoint"
_MAY_CHANGE = {
    *("tokens", "minutes", "held_out_seconds", "checkpoint_seconds", "log_steps"),
    *("batch_tokens", "loss_rows", "compile"),  # which another machine may not have the room for
}
_TEXT = "text"  # may be another where the first was lost with its machine
_EXACT, _NEW, _WEIGHTS = "exact", "start", "weights only"


@dataclass(frozen=True, slots=True)
class Session:
    """A run that can take steps from `position` on."""

    target: Decoder
    corpus: Corpus
    recipe: Recipe
    run: Run
    lessons: Lessons
    held_out: HeldOut
    order: Order
    position: Position
    frequent_V: torch.Tensor

    @property
    def fresh_from(self) -> int:
        """The step at which the optimisers began."""
        return max(int(part["step"]) for part in self.position.parts if part["how"] != _EXACT)

    def save(self, position: Position) -> None:
        """Write a checkpoint; raises StorageFailed and keeps the last one."""
        learners = self.lessons.learners
        checkpoint = Checkpoint(
            position,
            {one.plan.name: one.masters.weights() for one in learners},
            {one.plan.name: one.masters.state() for one in learners},
        )
        working = {one.plan.name: one.masters.working() for one in learners}
        save(self.run.out / CHECKPOINT, checkpoint, working)


def begin(target: Decoder, corpus: Corpus, recipe: Recipe, run: Run) -> Session:
    """A new session, or with `run.resume` one that goes on.

    Raises:
        BadRequest: the folder holds a run that is not to be resumed, or one of another recipe.
        BadFile: there is too little text, a head does not fit the target, no sound checkpoint.
        Unsupported: the target's weights are of a type that gradients do not fit into.
    """
    if target.dtype == torch.float16:
        hint = "load the target as bfloat16 or float32"
        raise Unsupported("gradients underflow in float16", field="dtype", hint=hint)
    checkpoint = load(run.out / CHECKPOINT) if run.resume else None
    described = _described(recipe, corpus)
    if checkpoint is None:
        _refuse_older(run)
    else:
        _check_same(checkpoint.position.recipe, described, _may_change(checkpoint))
    target.requires_grad_(False)
    parts = split(corpus, recipe.held_out, recipe.seed)
    heads = [new_head(plan.spec, target, None) for plan in recipe.heads]
    if checkpoint is None:
        _start(heads, target, corpus, recipe, parts)
    pairs = zip(recipe.heads, heads, strict=True)
    learners = [Learner(plan, head, recipe) for plan, head in pairs]
    if checkpoint is not None:
        _fill(learners, checkpoint)
    position = _position(checkpoint, described, target)
    frequent_V = frequent(answer_counts(corpus))
    rows = min(recipe.loss_rows, recipe.batch_tokens)
    return Session(
        target,
        corpus,
        recipe,
        run,
        Lessons(target, learners, recipe, frequent_V),
        HeldOut(target, corpus, parts.held_out_I, rows),
        Order(parts.train_I, recipe.seed, position.taken),
        position,
        torch.from_numpy(frequent_V),
    )


def _start(
    heads: Sequence[Head], target: Decoder, corpus: Corpus, recipe: Recipe, parts: Split
) -> None:
    """Fill new heads; the first batch tells how large features are."""
    talks = Order(parts.train_I, recipe.seed).fill(corpus, recipe.batch_tokens)
    batch = lay_out(list(talks), recipe.lookahead, target.device)
    watched = Watched(target, batch, [layer for head in heads for layer in head.layers])
    for plan, head in zip(recipe.heads, heads, strict=True):
        start(plan, head, target, watched.features(head.layers), recipe.seed)


def _fill(learners: Sequence[Learner], checkpoint: Checkpoint) -> None:
    for learner in learners:
        name = learner.plan.name
        memory = None if checkpoint.memory is None else checkpoint.memory[name]
        learner.masters.load(checkpoint.weights[name], memory)


def _position(
    checkpoint: Checkpoint | None, described: dict[str, Any], target: Decoder
) -> Position:
    """Where the run stands, with a note on how this part of it begins."""
    how = _NEW if checkpoint is None else _EXACT
    if checkpoint is not None and checkpoint.memory is None:
        how = _WEIGHTS
    before = Position(described) if checkpoint is None else checkpoint.position
    free = _MAY_CHANGE if checkpoint is None else _may_change(checkpoint)
    part: dict[str, Any] = {"step": before.step, "how": how}
    part |= {"device": _device_name(target.device), "torch": torch.__version__}
    part["changed"] = {k: described[k] for k in sorted(free) if described[k] != before.recipe[k]}
    return replace(before, recipe=described, parts=(*before.parts, part))


def _described(recipe: Recipe, corpus: Corpus) -> dict[str, Any]:
    """What must stay the same for a run to go on, as JSON has it."""
    text = {"conversations": len(corpus), "tokens": len(corpus.tokens)}
    described: dict[str, Any] = json.loads(json.dumps({**recipe.to_json(), _TEXT: text}))
    return described


def _may_change(checkpoint: Checkpoint) -> set[str]:
    """Settings that may be others from here on; provenance tells those that are."""
    return _MAY_CHANGE if checkpoint.memory is not None else _MAY_CHANGE | {_TEXT}


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], free: set[str]) -> None:
    hint = "give the same settings as before, or start anew in another folder"
    for key in sorted({*before, *now} - free):
        if before.get(key) != now.get(key):
            what = f"the run began with {before.get(key)}"
            raise BadRequest(what, field=key, value=now.get(key), hint=hint)


def _refuse_older(run: Run) -> None:
    if (run.out / CHECKPOINT).exists():
        hint = "go on with --resume, or name another folder"
        raise BadRequest("holds a run already", field="--out", value=str(run.out), hint=hint)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

"""Writes what came of a run: every head with its provenance, and the curves."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import furcate
from furcate.heads.store import save_head
from furcate.train.checkpoint import Position
from furcate.train.held_out import Depths
from furcate.train.learner import Learner
from furcate.train.session import Session

__all__ = ["write_heads"]


def write_heads(
    session: Session, position: Position, held_out: Mapping[str, Depths]
) -> dict[str, Path]:
    """Where each head was written, by name.

    Raises:
        StorageFailed: the disk is full or the like.
    """
    return {
        learner.plan.name: _write(session, position, learner, held_out)
        for learner in session.lessons.learners
    }


def _write(
    session: Session, position: Position, learner: Learner, held_out: Mapping[str, Depths]
) -> Path:
    name = learner.plan.name
    path = session.run.out / name
    about = session.corpus.about
    provenance: dict[str, Any] = {
        **session.run.provenance,
        "steps_deep": learner.plan.steps,
        "recipe": position.recipe,
        "text": {"written_by": about.target, "recipe": dict(about.recipe)},
        "steps": position.step,
        "tokens": position.tokens,
        "epochs": session.order.epochs,
        "seconds": position.seconds,
        "parts": list(position.parts),
        "held_out": asdict(held_out[name]),
        "versions": {
            "furcate": furcate.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    save_head(
        path,
        learner.head,
        frequent_N=session.frequent_V,
        provenance=provenance,
        draft_vocab=learner.plan.spec.draft_vocab_size,
        fingerprint=session.run.fingerprint,
    )
    return path

"""Loads what needs torch only when a command really decodes, so that help and errors come at once.

The one place of the package with imports inside functions.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from furcate.cli.drafting import DraftFlags
from furcate.cli.options import TargetFlags
from furcate.cli.show import err

if TYPE_CHECKING:
    from furcate.engine.engine import Engine

__all__ = [
    "bench_module",
    "compare_module",
    "drafter_json",
    "heads_module",
    "load_engine",
    "train_module",
    "tune_module",
]


def load_engine(target: TargetFlags, draft: DraftFlags, **options: Any) -> Engine:
    """An engine as the flags ask; flags are judged before anything is loaded.

    Raises BadRequest where the drafter is not of the kind that another engine's options name.
    """
    asked = target.engine_options(**options)
    drafting, drafter = draft.draft_options(), draft.chosen_drafter()
    with err().status(f"loading {target.target} ..."):
        from furcate.engine.engine import Engine

        engine = Engine.load(target.target, drafter, draft=drafting, **asked.model_dump())
    draft.check_kind(drafter_json(engine)["kind"])
    return engine


def drafter_json(engine: Engine) -> dict[str, Any]:
    """The engine's drafter in kind and numbers."""
    from furcate.drafters.described import described

    return described(engine.built.round.drafter)


def compare_module() -> ModuleType:
    """The module that sets an answer beside plain decoding."""
    from furcate.engine import compare

    return compare


def bench_module() -> ModuleType:
    """The module that measures."""
    from furcate.engine import bench

    return bench


def heads_module() -> ModuleType:
    """The module that reads, checks and writes draft heads."""
    from furcate.heads import desk

    return desk


def train_module() -> ModuleType:
    """The module that trains, the text included."""
    from furcate.train import job

    return job


def tune_module() -> ModuleType:
    """The module that calibrates heads."""
    from furcate.train import calibrating

    return calibrating

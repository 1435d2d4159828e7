"""Loads what needs torch only when a command really decodes, so that help and errors come at once.

The one place of the package with imports inside functions.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from furcate.cli.options import DraftFlags, TargetFlags
from furcate.cli.show import err

if TYPE_CHECKING:
    from furcate.engine.engine import Engine

__all__ = ["bench_module", "compare_module", "heads_module", "load_engine", "train_module"]


def load_engine(target: TargetFlags, draft: DraftFlags, **options: Any) -> Engine:
    """An engine as the flags ask; flags are judged before anything is loaded."""
    asked = target.engine_options(**options)
    drafting, drafter = draft.draft_options(), draft.chosen_drafter()
    with err().status(f"loading {target.target} ..."):
        from furcate.engine.engine import Engine

        return Engine.load(target.target, drafter, draft=drafting, **asked.model_dump())


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

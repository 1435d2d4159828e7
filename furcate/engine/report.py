"""What an engine's rounds run on, for `--json`: kernels, and rounds recorded or refused."""

from __future__ import annotations

from typing import Any

from furcate.drafters.make import join_why, kernels_in
from furcate.engine.build import Built

__all__ = ["backend_json"]


def backend_json(built: Built) -> dict[str, Any]:
    """`kernels` is "triton" or "torch"; where a GPU has to do with torch's, `_why` says why;
    `put_` and `join_kernels_why` do where pools are too wide for a kernel of their own.

    `graphs` lists the kinds of rounds that were recorded and those that could not be, with the
    reason, and counts as `given_up` recordings that gave way to other kinds; None where every
    kernel is launched anew. `rounds_ahead` is how many rounds are launched
    before the one ahead of them is read; 0: one after the other. `memory` is what the engine holds
    of a GPU at most, in bytes; None on a CPU. `batch_invariant` is whether a token's scores are the
    same bit for bit whatever is scored beside it.
    """
    own, drafter = built.round.kernels, kernels_in(built.round.drafter)
    return {
        "kernels": own.name,
        "kernels_why": own.why,
        "draft_kernels": None if drafter is None else drafter.name,
        "draft_kernels_why": None if drafter is None else drafter.why,
        "put_kernels_why": built.round.put_why,
        "join_kernels_why": join_why(built.round.drafter),
        "batch_invariant": built.options.batch_invariant,
        "memory": None if built.memory is None else built.memory.as_json(),
        "rounds_ahead": built.player.ahead,
        "graphs": built.player.played.as_json() if built.player.records else None,
    }

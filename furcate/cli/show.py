"""How commands print: text as it streams, one JSON object, one line of statistics."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from furcate.errors import BadRequest

if TYPE_CHECKING:
    from furcate.engine.outputs import Stats, TokenLogprob

__all__ = [
    "check_writable",
    "err",
    "logprob_json",
    "out",
    "print_json",
    "print_text",
    "stats_json",
    "stats_line",
    "why_parted",
]


def out() -> Console:
    """Standard output: answers and results."""
    return Console(highlight=False, soft_wrap=True)


def err() -> Console:
    """Standard error: progress and remarks, so that a pipe carries answers only."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_text(text: str) -> None:
    """Write a piece of an answer as it is, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(record: dict[str, Any]) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(record, ensure_ascii=False, indent=2) + "\n")


def check_writable(path: Path) -> None:
    """Find out before the work, not after it, that a file could not be written.

    Raises:
        BadRequest: its folder is not there or not writable, or it is a folder itself.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        hint = "name a file in a folder that exists and may be written to"
        raise BadRequest("cannot be written", field="--json", value=str(path), hint=hint)


def logprob_json(entry: TokenLogprob) -> dict[str, Any]:
    """A token's logprob and its rivals'; null stands for minus infinity, which JSON cannot say."""

    def pair(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token_id": token_id, "logprob": logprob if math.isfinite(logprob) else None}

    return pair(entry.token_id, entry.logprob) | {"top": [pair(*rival) for rival in entry.top]}


def why_parted(part: Mapping[str, Any]) -> str:
    """Whether rounding explains where two answers part; `parting_json` says what `part` holds."""
    if not part["tie"]:
        return "not a rounding tie: please report this"
    if part["dtype"] in ("bfloat16", "float16"):
        return f"a tie as {part['dtype']} rounds (below {part['tie_below']:.1e})"
    return "a rounding tie"


def stats_line(stats: Stats) -> str:
    """What a request's rounds did, in one line."""
    parts = [
        f"{stats.tokens} tokens",
        f"{stats.tokens_per_second:.1f} tokens/s",
        f"{stats.tokens_per_round:.2f} tokens per round (bonus included)",
        f"{stats.accepted} of {stats.drafted} drafted accepted",
        f"prompt {stats.prompt_tokens} tokens, {stats.reused_tokens} reused, "
        f"{stats.prefill_seconds:.2f} s",
    ]
    return " · ".join(parts)


def stats_json(stats: Stats) -> dict[str, Any]:
    """The same for programs."""
    return {
        "tokens": stats.tokens,
        "rounds": stats.rounds,
        "tokens_per_round": stats.tokens_per_round,
        "mean_levels": stats.mean_levels,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "conditional_acceptance_by_depth": stats.conditional_acceptance_by_depth,
        "marginal_acceptance_by_depth": stats.marginal_acceptance_by_depth,
        "prompt_tokens": stats.prompt_tokens,
        "reused_tokens": stats.reused_tokens,
        "preemptions": stats.preemptions,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "tokens_per_second": stats.tokens_per_second,
    }

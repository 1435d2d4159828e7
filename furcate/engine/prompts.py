"""Reads prompt files: one JSON object a line with `prompt`, `messages` or `turns`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from furcate.errors import BadFile, BadRequest

__all__ = ["PromptLine", "read_prompts"]

Message = dict[str, str]
_KINDS = ("prompt", "messages", "turns")


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of a prompt file.

    `opening` is all that stands before the first answer; each of `later` is a user's turn that
    follows an answer.
    """

    line: int  # counted from 1
    opening: tuple[Message, ...]
    later: tuple[str, ...] = ()
    category: str | None = None


def read_prompts(
    path: Path,
    *,
    limit: int | None = None,
    all_turns: bool = False,
    categories: Collection[str] = (),
) -> list[PromptLine]:
    """The prompts of a file, at most `limit`; the first turn alone unless `all_turns`.

    `categories`: only prompts of these; empty: all.

    Raises:
        BadFile: the file is not there, holds no prompt, or a line is not one; the line is named.
        BadRequest: no prompt is of a category that was asked for.
    """
    found: list[PromptLine] = []
    for number, text in _lines(path):
        if limit is not None and len(found) == limit:
            break
        prompt = _parsed(number, text, path, all_turns)
        if not categories or prompt.category in categories:
            found.append(prompt)
    if not found and categories:
        raise BadRequest("no prompt is of it", field="category", value=", ".join(categories))
    if not found:
        raise BadFile("holds no prompts", field="prompts", value=str(path))
    return found


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as err:
        reason = err.strerror or "cannot be read"
        raise BadFile(reason, field="prompts", value=str(path)) from None
    except UnicodeDecodeError as err:
        raise BadFile(f"not UTF-8 at byte {err.start}", field="prompts", value=str(path)) from None
    # only newlines part lines: JSON strings may hold U+2028 and its like
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def _parsed(number: int, text: str, path: Path, all_turns: bool) -> PromptLine:
    where = f"{path.name} line {number}"
    try:
        entry = json.loads(text)
    except json.JSONDecodeError as err:
        raise BadFile(f"not JSON: {err.msg}", field=where, value=text) from None
    if not isinstance(entry, dict):
        raise BadFile("must be a JSON object", field=where, value=entry)
    kinds = [kind for kind in _KINDS if kind in entry]
    if len(kinds) != 1:
        hint = f"give exactly one of {', '.join(_KINDS)}"
        raise BadFile("no single kind of prompt", field=where, value=list(entry), hint=hint)
    category = entry.get("category")
    if category is not None and not isinstance(category, str):
        raise BadFile("category must be a string", field=where, value=category)
    turns = _turns(entry[kinds[0]], kinds[0], where)
    opening, later = (turns, ()) if kinds[0] == "messages" else (turns[:1], turns[1:])
    asked = tuple(turn["content"] for turn in later) if all_turns else ()
    return PromptLine(number, opening, asked, category)


def _turns(value: object, kind: str, where: str) -> tuple[Message, ...]:
    if kind == "prompt":
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadFile(f"{kind} must be a list of at least one", field=where, value=value)
    return tuple(_message(turn, kind, where) for turn in value)


def _message(turn: object, kind: str, where: str) -> Message:
    if kind != "messages":
        turn = {"role": "user", "content": turn}
    if not isinstance(turn, dict) or set(turn) != {"role", "content"}:
        raise BadFile("a message has role and content", field=where, value=turn)
    if not all(isinstance(part, str) and part for part in turn.values()):
        raise BadFile(f"{kind} must hold text that is not empty", field=where, value=turn)
    return turn

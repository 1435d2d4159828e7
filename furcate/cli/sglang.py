"""Reads SGLang's `--speculative-...` flags off a command line and puts furcate's in their place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from furcate.aliases import SGLANG_SWITCHES, Drafting, from_sglang
from furcate.errors import BadRequest, UserError

__all__ = ["own_words"]

_PREFIX = "--speculative-"
_OURS = "--speculative-config"
_FLAG = {
    "num_draft_tokens": "--nodes",
    "depth": "--depth",
    "topk": "--topk",
    "prompt_lookup_max": "--prompt-lookup-max",
    "prompt_lookup_min": "--prompt-lookup-min",
}
_SHORT = {"--drafter": "-d", "--nodes": "-n"}
_WHO = ("--drafter", _OURS)  # both can name the drafter


def own_words(words: Sequence[str]) -> list[str]:
    """The command line without SGLang's flags; what they ask for stands at its end, before `--`.

    Raises:
        BadRequest: a flag has no value, is unknown, or stands beside furcate's own.
        Unsupported: a flag of SGLang's that furcate does not honour.
    """
    end = words.index("--") if "--" in words else len(words)
    kept, given = _sorted_out(words[:end])
    if not given:
        return list(words)
    added = _flags(_understood(given))
    _refuse_twice(added, kept)
    filled = [word for pair in added.items() for word in pair if word is not None]
    return [*kept, *filled, *words[end:]]


def _refuse_twice(added: Mapping[str, str | None], kept: Sequence[str]) -> None:
    named = [*added, *(_WHO if any(flag in added for flag in _WHO) else ())]
    for flag in named:
        if any(_is(word, flag) for word in kept):
            hint = "leave one of them out"
            raise BadRequest("given under SGLang's name too", field=flag, hint=hint)


def _is(word: str, flag: str) -> bool:
    short = _SHORT.get(flag)
    return word.split("=")[0] == flag or (short is not None and word.startswith(short))


def _sorted_out(words: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    kept: list[str] = []
    given: dict[str, object] = {}
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if not flag.startswith(_PREFIX) or flag == _OURS:
            kept.append(word)
            continue
        key = flag[2:].replace("-", "_")
        if not equals and key in SGLANG_SWITCHES:
            given[key] = True
            continue
        given[key] = value if equals else next(rest, "")
        if given[key] == "" or str(given[key]).startswith("--"):
            raise BadRequest("needs a value", field=flag)
    return kept, given


def _understood(given: dict[str, object]) -> Drafting:
    """The flags' meaning; errors name the flag as it was typed."""
    try:
        return from_sglang(given)
    except UserError as err:
        flag = f"--{(err.field or '').replace('_', '-')}" if err.field in given else err.field
        raise type(err)(err.what, field=flag, value=err.value, hint=err.hint) from None


def _flags(asked: Drafting) -> dict[str, str | None]:
    """Flag -> its value, None for a switch.

    A draft model of a kind that was named goes as vLLM's options, which can say the kind.
    """
    named: dict[str, str | None] = {"--drafter": asked.drafter} if asked.drafter else {}
    if asked.kind is not None:
        named = {_OURS: json.dumps(asked.who())}
    for name, flag in _FLAG.items():
        if name in asked.options:
            named[flag] = str(asked.options[name])
    if "adaptive" in asked.options:
        named["--adaptive" if asked.options["adaptive"] else "--fixed"] = None
    return named

"""Reads files of given conversations, one JSON object a line, into tokens and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from furcate.errors import BadFile, Unsupported
from furcate.text.tokenizer import Tokenizer
from furcate.train.corpus import Kind, Part
from furcate.train.wrap import rendered

__all__ = ["Encoded", "Given", "encoded", "read_conversations"]

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_SHAPE = 'for example {"messages": [{"role": "user", "content": "Hello"}, ...]}'
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Given:
    """One conversation of a file; its last message is an answer."""

    line: int  # counted from 1
    messages: tuple[Message, ...]

    @property
    def asked(self) -> list[str]:
        """The users' turns."""
        return [m["content"] for m in self.messages if m["role"] == "user"]


def read_conversations(path: Path) -> Iterator[Given]:
    """The conversations of a file, in order.

    A line holds `messages` or `conversations`, a list of {role, content} or, as ShareGPT has it,
    of {from, value}; other keys beside the list are about the conversation and are left alone.
    What comes after the last answer teaches nothing and is left out.

    Raises:
        BadFile: the file cannot be read or a line is not a conversation; the line is named.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield Given(number, _parsed(text, f"{path.name} line {number}"))
    except OSError as err:
        raise BadFile(err.strerror or "cannot be read", field="--data", value=str(path)) from None
    except UnicodeDecodeError as err:
        raise BadFile(f"not UTF-8: {err.reason}", field="--data", value=str(path)) from None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A conversation as ids, and its answers."""

    tokens: list[int]
    parts: list[Part]


def encoded(tokenizer: Tokenizer, messages: Sequence[Message], most: int) -> Encoded:
    """The ids of a conversation under the target's template, and its answers.

    Text is cut before each answer and encoded by the piece, as when the target writes it. An
    answer runs up to and with its end token. At most the first `most` tokens are kept.

    Raises:
        BadRequest: the template refuses the conversation.
        Unsupported: the template changes what stands before an answer once that answer is there.
    """
    text = rendered(tokenizer, messages, to_answer=False)
    cuts = [*_answer_starts(tokenizer, messages, text), len(text)]
    ids = tokenizer.encode(text[: cuts[0]], special=False)
    answers = []
    for start, end in pairwise(cuts):
        piece = tokenizer.encode(text[start:end], special=False)
        answers.append((len(ids), len(ids) + _up_to_end(piece, tokenizer.eos_ids)))
        ids += piece
    parts = [Part(a, min(b, most), Kind.ANSWER) for a, b in answers if a < min(b, most)]
    return Encoded(ids[:most], parts)


def _answer_starts(tokenizer: Tokenizer, messages: Sequence[Message], text: str) -> Iterator[int]:
    for k, message in enumerate(messages):
        if message["role"] == "assistant":
            before = rendered(tokenizer, messages[:k])
            if not text.startswith(before):
                what = "the chat template writes what stands before an answer in another way later"
                raise Unsupported(what, field=f"message {k}")
            yield len(before)


def _up_to_end(ids: Sequence[int], eos_ids: Sequence[int]) -> int:
    """How many ids are the answer: with its end token; all of them where there is none."""
    return next((i + 1 for i, token in enumerate(ids) if token in eos_ids), len(ids))


def _parsed(text: str, where: str) -> tuple[Message, ...]:
    try:
        entry = json.loads(text)
    except json.JSONDecodeError as err:
        hint = "one JSON object a line"
        raise BadFile(f"not JSON: {err.msg}", field=where, value=text, hint=hint) from None
    if not isinstance(entry, dict):
        raise BadFile("must be a JSON object", field=where, value=entry, hint=_SHAPE)
    keys = [key for key in ("messages", "conversations") if key in entry]
    if len(keys) != 1:
        what = "must have either messages or conversations"
        raise BadFile(what, field=where, value=list(entry), hint=_SHAPE)
    listed = entry[keys[0]]
    if not isinstance(listed, list) or not listed:
        what = f"{keys[0]} must be a list of messages"
        raise BadFile(what, field=where, value=listed, hint=_SHAPE)
    messages = [_message(item, f"{where}, {keys[0]}[{k}]") for k, item in enumerate(listed)]
    return _up_to_answer(messages, where)


def _message(item: object, where: str) -> Message:
    if not isinstance(item, dict):
        raise BadFile("must be an object with role and content", field=where, value=item)
    told = {key: value for key, value in item.items() if value is not None}
    for role, content in (("role", "content"), ("from", "value")):
        if set(told) == {role, content}:
            return _checked(told[role], told[content], where)
    hint = "give role and content, or from and value; null stands for nothing"
    raise BadFile(
        "must hold these two keys and no other", field=where, value=sorted(told), hint=hint
    )


def _checked(role: object, content: object, where: str) -> Message:
    if not isinstance(role, str) or role not in _ROLES:
        hint = f"known: {', '.join(_ROLES)}"
        raise BadFile("unknown role", field=where, value=role, hint=hint)
    if not isinstance(content, str):
        raise BadFile("the content must be text", field=where, value=content)
    return {"role": _ROLES[role], "content": content}


def _up_to_answer(messages: Sequence[Message], where: str) -> tuple[Message, ...]:
    if messages[0]["role"] == "assistant":
        what = "begins with an answer that nobody asked for"
        raise BadFile(what, field=where, hint="begin with a system or user message")
    answers = [k for k, m in enumerate(messages) if m["role"] == "assistant" and m["content"]]
    if not answers:
        hint = "leave the line out, or add what the assistant says"
        raise BadFile("no answer to learn from", field=where, hint=hint)
    return tuple(messages[: answers[-1] + 1])

"""Chat templates: a conversation as the one text that its model was trained to continue."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from furcate.errors import BadFile, BadRequest

__all__ = ["ROLES", "ChatTemplate", "check_messages"]

ROLES = ("system", "user", "assistant")
_KEYS = ("role", "content")

# what an expression in a template may raise; anything else would be our own mistake
_RENDER_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)


class ChatTemplate:
    """A model's chat template, run in jinja2's immutable sandbox with what Hugging Face promises.

    Promised there: `messages`, `add_generation_prompt`, the named tokens, `tools` and `documents`
    (none here), `raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop controls and
    `generation` blocks.

    Args:
        source: the template's text.
        named: bos_token, eos_token and the like, by name.
        now: the clock that `strftime_now` reads.
    """

    def __init__(self, source: str, named: Mapping[str, str], now: Callable[[], datetime]) -> None:
        self._source = source
        self._named = named
        self._now = now

    def render(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text.

        Raises:
            BadRequest: a message is not {role, content}, or the template refuses the conversation.
            BadFile: the template is not a template.
        """
        check_messages(messages)
        try:
            return self._compiled.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._named,
            )
        except _RENDER_ERRORS as err:
            what = f"the model's chat template refuses this conversation: {err}"
            raise BadRequest(what, field="messages") from err

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: self._now().strftime(form)
        try:
            return environment.from_string(self._source)
        except jinja2.TemplateSyntaxError as err:
            what = f"the model's chat template is broken at line {err.lineno}: {err.message}"
            raise BadFile(what, field="chat_template") from err


def check_messages(messages: object) -> None:
    """Refuse, by field, everything that is not a list of {role, content}.

    Raises:
        BadRequest: an empty list, an unknown or missing key, an unknown role, content not text.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        hint = 'for example [{"role": "user", "content": "Hello"}]'
        what = "must be a list of at least one message"
        raise BadRequest(what, field="messages", value=messages, hint=hint)
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)


def _check_message(where: str, message: object) -> None:
    if not isinstance(message, Mapping):
        raise BadRequest("must be an object with role and content", field=where, value=message)
    for key, value in message.items():
        if key not in _KEYS:
            hint = "known: role, content"
            raise BadRequest("unknown key", field=f"{where}.{key}", value=value, hint=hint)
    for key in _KEYS:
        if not isinstance(message.get(key), str):
            raise BadRequest("must be text", field=f"{where}.{key}", value=message.get(key))
    if message["role"] not in ROLES:
        hint = f"known: {', '.join(ROLES)}"
        raise BadRequest("unknown role", field=f"{where}.role", value=message["role"], hint=hint)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here its text just stays."""

    tags = {"generation"}  # noqa: RUF012  (the type that jinja2 declares)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

"""Chat templates: what Hugging Face promises them, and nothing beyond the sandbox."""

from __future__ import annotations

from datetime import datetime

import pytest

from furcate.errors import BadFile, BadRequest
from furcate.text.template import ChatTemplate

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: object = HELLO, **options: bool) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, lambda: datetime(2026, 3, 9, 12))
    return template.render(messages, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>Hello"),
        ("{{ strftime_now('%d %B %Y') }}", "09 March 2026"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ {'b': 2, 'a': 1} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 1,\n "b": 2\n}'),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{{ 'tools' if tools else 'none' }}{{ documents is none }}", "noneTrue"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}", "3"),
    ],
)
def test_what_a_template_may_count_on(source: str, text: str) -> None:
    assert render(source) == text


def test_the_generation_prompt_is_asked_for_by_default() -> None:
    source = "{{ 'more' if add_generation_prompt else 'end' }}"
    assert render(source) == "more"
    assert render(source, add_generation_prompt=False) == "end"


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(BadRequest, match="roles must alternate") as err:
        render("{{ raise_exception('roles must alternate') }}")
    assert err.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ range(10**9) | length }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ nothing.at.all }}",
        "{{ messages[7].content.x }}",
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequest) as err:
        render(source)
    assert err.value.field == "messages"


def test_a_template_does_not_change_the_callers_messages() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    render("{% set m = messages[0] %}{{ m.content }}", messages)
    assert messages == HELLO


def test_a_broken_template_is_a_bad_file_and_names_the_line() -> None:
    with pytest.raises(BadFile, match="line 2") as err:
        render("x\n{% if %}")
    assert err.value.field == "chat_template"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("Hello", "messages"),
        (None, "messages"),
        (["Hello"], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": "user", "content": 7}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "name": "Bo"}], "messages[0].name"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
    ],
)
def test_a_message_that_is_not_role_and_content_is_refused_by_field(
    messages: object, field: str
) -> None:
    with pytest.raises(BadRequest) as err:
        render("x", messages)
    assert err.value.field == field

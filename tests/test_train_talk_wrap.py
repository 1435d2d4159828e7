"""What templates write around turns, and conversations as tokens under them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_vocab import TEMPLATE, write_folder

from furcate.errors import BadFile, BadRequest, Unsupported
from furcate.text.tokenizer import Tokenizer, load_tokenizer
from furcate.train.conversations import encoded, read_conversations
from furcate.train.wrap import Wrap, rendered

DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none here') }}{% endif %}"
IGNORES_SYSTEM = TEMPLATE.replace(
    "{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}"
)
SPACED = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
TALK = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello world"},
    {"role": "user", "content": "well"},
    {"role": "assistant", "content": "é"},
]


def _tokenizer(folder: Path, template: str | None = TEMPLATE) -> Tokenizer:
    return load_tokenizer(write_folder(folder, chat_template=template))


def test_a_plain_wrap_is_found(tmp_path: Path) -> None:
    wrap = Wrap.of(_tokenizer(tmp_path, DEFAULT + TEMPLATE))
    assert wrap == Wrap(
        opening="<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\n",
        before_system="<|im_start|>system\n",
        after_system="<|im_end|>\n<|im_start|>user\n",
        to_answer="<|im_end|>\n<|im_start|>assistant\n",
        to_user="<|im_end|>\n<|im_start|>user\n",
    )
    assert wrap.before(None) == wrap.opening
    assert wrap.before("Hm") == "<|im_start|>system\nHm<|im_end|>\n<|im_start|>user\n"


@pytest.mark.parametrize("template", [TEMPLATE, DEFAULT + TEMPLATE, NO_SYSTEM + TEMPLATE])
def test_the_pieces_put_together_are_what_the_template_writes(
    tmp_path: Path, template: str
) -> None:
    tokenizer = _tokenizer(tmp_path, template)
    wrap = Wrap.of(tokenizer)
    pieces = [wrap.opening, "hello", wrap.to_answer, "hello world", wrap.to_user, "well"]
    assert rendered(tokenizer, TALK[:3]) == "".join([*pieces, wrap.to_answer])
    assert wrap.turn_before("".join(pieces[:3])) == "hello"
    assert wrap.turn_before("".join([*pieces, wrap.to_answer])) == "well"


def test_a_space_that_the_model_writes_itself_is_not_fed(tmp_path: Path) -> None:
    wrap = Wrap.of(_tokenizer(tmp_path, SPACED))
    assert (wrap.to_answer, wrap.to_user) == (" [/INST]", "<|im_end|>[INST] ")


@pytest.mark.parametrize("template", [NO_SYSTEM + TEMPLATE, IGNORES_SYSTEM])
def test_a_template_without_system_messages_is_used_without_them(
    tmp_path: Path, template: str
) -> None:
    assert not Wrap.of(_tokenizer(tmp_path, template)).takes_system


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] | upper }}"), "as it is"),
        (TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] * 2 }}"), "as it is"),
        ("{{ messages | length }}" + TEMPLATE, "later turns"),
    ],
)
def test_a_template_that_does_more_is_refused(tmp_path: Path, template: str, said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        Wrap.of(_tokenizer(tmp_path, template))


def test_a_target_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no chat template"):
        Wrap.of(_tokenizer(tmp_path, None))


def test_given_answers_are_marked_up_to_their_end_token(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path)
    text = encoded(tokenizer, TALK, 512)
    assert tokenizer.decode(text.tokens, skip_special=False) == rendered(
        tokenizer, TALK, to_answer=False
    )
    said = [tokenizer.decode(text.tokens[p.start : p.end], skip_special=False) for p in text.parts]
    assert said == ["hello world<|im_end|>", "é<|im_end|>"]
    before = text.tokens[: text.parts[1].start]
    assert before == tokenizer.chat_ids(TALK[:3])


def test_what_reaches_beyond_the_context_is_cut(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path)
    whole = encoded(tokenizer, TALK, 512)
    first, second = whole.parts
    text = encoded(tokenizer, TALK, first.end - 1)
    assert text.tokens == whole.tokens[: first.end - 1]
    assert [(p.start, p.end) for p in text.parts] == [(first.start, first.end - 1)]
    assert encoded(tokenizer, TALK, second.start).parts == [first]
    assert encoded(tokenizer, TALK, first.start).parts == []


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, "{{ messages | length }}" + TEMPLATE)
    with pytest.raises(Unsupported, match="message 1"):
        encoded(tokenizer, TALK, 512)


def _file(path: Path, *lines: object) -> Path:
    told = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(told), encoding="utf-8")
    return path


SHAREGPT = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hello world"}]


@pytest.mark.parametrize(
    "line",
    [
        {"messages": TALK[:2], "id": 3},
        {"conversations": TALK[:2]},
        {"conversations": SHAREGPT, "source": "x"},
        {"messages": [{**TALK[0], "name": None}, TALK[1]]},
        {"messages": [*TALK[:3]]},
    ],
)
def test_known_shapes_are_read(tmp_path: Path, line: object) -> None:
    given = list(read_conversations(_file(tmp_path / "a.jsonl", "", line, "")))
    assert [(g.line, list(g.messages)) for g in given] == [(2, TALK[:2])]
    assert given[0].asked == ["hello"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "one JSON object a line"),
        ([1], "must be a JSON object"),
        ({"prompt": "a"}, "either messages or conversations"),
        ({"messages": TALK, "conversations": TALK}, "either messages or conversations"),
        ({"messages": []}, "must be a list"),
        ({"messages": "hello"}, "must be a list"),
        ({"messages": ["hello"]}, r"messages\[0\]: must be an object"),
        ({"messages": [{"role": "user"}]}, "these two keys"),
        ({"messages": [{**TALK[0], "weight": 0}]}, "these two keys"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "known: system, user"),
        ({"messages": [{"role": 3, "content": "a"}]}, "known: system, user"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "must be text"),
        ({"messages": TALK[:1]}, "no answer to learn from"),
        ({"messages": [TALK[0], {"role": "assistant", "content": ""}]}, "no answer to learn from"),
        ({"messages": TALK[1:]}, "nobody asked for"),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path: Path, line: object, said: str) -> None:
    path = _file(tmp_path / "a.jsonl", {"messages": TALK}, line)
    with pytest.raises(BadFile, match=f"a.jsonl line 2.*{said}"):
        list(read_conversations(path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="No such file"):
        list(read_conversations(tmp_path / "a.jsonl"))
    (tmp_path / "b.jsonl").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(BadFile, match="not UTF-8"):
        list(read_conversations(tmp_path / "b.jsonl"))

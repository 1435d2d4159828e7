"""Scripts of conversations: what is fed, what is sampled, and that a number says all of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tiny_vocab import TEMPLATE, write_folder

from furcate.engine.bulk import Stage
from furcate.errors import Unsupported
from furcate.text.tokenizer import Tokenizer, load_tokenizer
from furcate.train.corpus import Kind
from furcate.train.openers import OPENERS
from furcate.train.talk import Scripts, TalkRecipe

COUNT = 2000
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}"
ENDLESS = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant]"


def _tokenizer(folder: Path, template: str = TEMPLATE) -> Tokenizer:
    return load_tokenizer(write_folder(folder, chat_template=template))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return _tokenizer(tmp_path)


def _fed(tokenizer: Tokenizer, stage: Stage) -> str:
    return tokenizer.decode(stage.feed, skip_special=False)


def test_a_script_depends_on_its_number_and_the_seed_alone(tokenizer: Tokenizer) -> None:
    one, same = Scripts(tokenizer, TalkRecipe(3)), Scripts(tokenizer, TalkRecipe(3))
    forwards = [one[i] for i in range(50)]
    backwards = [same[i] for i in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert len({talk.script.seed for talk in forwards}) == 50
    assert Scripts(tokenizer, TalkRecipe(4))[7] != one[7]


def test_turns_follow_one_another_as_the_template_writes_them(tokenizer: Tokenizer) -> None:
    scripts = Scripts(tokenizer, TalkRecipe(opened=0.0, other_system=0.0, follow_up=1.0))
    talk = scripts[0]
    assert talk.kinds == (Kind.USER, Kind.ANSWER) * 2
    fed = [_fed(tokenizer, stage) for stage in talk.script.stages]
    assert fed == [
        "<|im_start|>user\n",
        "\n<|im_start|>assistant\n",  # the end token is sampled, or put there where it is not
        "\n<|im_start|>user\n",
        "\n<|im_start|>assistant\n",
    ]
    assert [stage.most for stage in talk.script.stages] == [160, 400, 160, 400]
    assert tokenizer.decode(scripts.stop_ids, skip_special=False) == "<|im_end|>"


def test_shares_are_those_of_the_recipe(tokenizer: Tokenizer) -> None:
    """Each share is a mean of 2,000 draws: six standard errors are 1 alarm in 10^8 or fewer."""
    scripts = Scripts(tokenizer, TalkRecipe(1))
    talks = [scripts[i] for i in range(COUNT)]
    first = [_fed(tokenizer, talk.script.stages[0]) for talk in talks]
    plain = "<|im_start|>user\n"
    answers = [
        stage.temperature
        for talk in talks
        for stage, kind in zip(talk.script.stages, talk.kinds, strict=True)
        if kind is Kind.ANSWER
    ]
    temperatures = Counter(answers)
    shares = {
        0.4: sum(not text.endswith(plain) for text in first) / COUNT,
        0.2: sum("system" in text for text in first) / COUNT,
        0.5: sum(len(talk.kinds) == 4 for talk in talks) / COUNT,
        0.3: temperatures[1.0] / len(answers),
    }
    for wanted, got in shares.items():
        assert abs(got - wanted) < 6 * (wanted * (1 - wanted) / COUNT) ** 0.5
    assert set(temperatures) == {0.0, 0.7, 1.0}
    assert {talk.script.stages[0].temperature for talk in talks} == {0.8, 1.0}
    assert {talk.script.stages[0].most for talk in talks} == {160, 500}


def test_every_opener_is_used(tokenizer: Tokenizer) -> None:
    """An opener is missed by 2,000 scripts, a fifth of which draw of 60, once in 600 runs each."""
    scripts = Scripts(tokenizer, TalkRecipe(opened=1.0, other_system=0.0))
    first = {_fed(tokenizer, scripts[i].script.stages[0]) for i in range(COUNT)}
    assert first == {"<|im_start|>user\n" + opener.text for opener in OPENERS}


def test_openers_are_many_and_end_where_a_word_may_begin() -> None:
    texts = [opener.text for opener in OPENERS]
    assert len(set(texts)) == len(texts) >= 60
    assert sum(opener.passage for opener in OPENERS) >= 20
    assert not any(text.endswith(" ") or text != text.lstrip() for text in texts)


def test_a_template_without_system_messages_gets_none(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, NO_SYSTEM + TEMPLATE)
    scripts = Scripts(tokenizer, TalkRecipe(other_system=1.0))
    assert _fed(tokenizer, scripts[0].script.stages[0]).startswith("<|im_start|>user\n")


def test_a_template_whose_turns_never_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="end token"):
        Scripts(_tokenizer(tmp_path, ENDLESS), TalkRecipe())

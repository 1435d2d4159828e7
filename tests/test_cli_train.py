"""`furcate train`: text first, then heads; what it refuses, and how it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import Ran, furcate

from furcate.cli import train as command
from furcate.heads.spec import EagleSpec
from furcate.heads.store import load_head
from furcate.train import gather, job
from furcate.train.corpus import Corpus
from furcate.train.prepare import Target

Capsys = pytest.CaptureFixture[str]
TALK = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello world, hello world"},
]
SMALL = ["--batch-tokens", "128", "--tokens", "512", "--unroll", "2"]


@pytest.fixture
def words(tiny_model: Path, tmp_path: Path) -> list[str]:
    made = ["--target", str(tiny_model), "--out", str(tmp_path / "out"), "--device", "cpu"]
    return ["train", "eagle3", *made, "--dtype", "float32"]


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    line = json.dumps({"messages": TALK})
    path.write_text("\n".join([line] * 30), encoding="utf-8")
    return path


OWN = ["--data-tokens", "3000", "--data-context", "400", "--write-batch", "4"]


def _json(ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_the_target_writes_its_text_first(capsys: Capsys, words: list[str], tmp_path: Path) -> None:
    text = _json(furcate(capsys, *words, *OWN, "--only-data", "--json"))["text"]
    corpus = Corpus.open(tmp_path / "out" / "text")
    assert text["tokens"] == text["new_tokens"] == len(corpus.tokens) >= 3000
    assert text["answer_tokens"] == corpus.answer_tokens
    assert (text["complete"], text["bytes_per_token"]) == (True, 2)
    assert corpus.about.recipe["held_away"] == ["spec_bench_dev.jsonl"]
    assert os.listdir(tmp_path / "out") == ["text"]


def test_text_that_is_there_is_not_written_again(capsys: Capsys, words: list[str]) -> None:
    first = _json(furcate(capsys, *words, *OWN, "--only-data", "--json"))["text"]
    again = _json(furcate(capsys, *words, *OWN, "--only-data", "--json"))["text"]
    assert again["tokens"] == first["tokens"]
    assert (again["new_tokens"], again["tokens_per_second"]) == (0, None)


def test_more_text_is_written_on_request_only(capsys: Capsys, words: list[str]) -> None:
    furcate(capsys, *words, *OWN, "--only-data")
    more = [*words, "--data-tokens", "6000", *OWN[2:], "--only-data", "--json"]
    refused = furcate(capsys, *more)
    assert refused.code == 2
    assert "--resume" in refused.err
    assert _json(furcate(capsys, *more, "--resume"))["text"]["tokens"] >= 6000


def test_other_settings_do_not_go_on_in_the_same_folder(capsys: Capsys, words: list[str]) -> None:
    furcate(capsys, *words, *OWN, "--only-data")
    ran = furcate(capsys, *words, *OWN, "--only-data", "--seed", "1", "--resume")
    assert ran.code == 2
    assert "'seed': 0" in ran.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_writing_says_how_to_go_on(
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    write = gather.write

    def stopping(*args: Any, **kwargs: Any) -> Any:
        for written, text in enumerate(write(*args, **kwargs)):
            if written == 1:
                signal.raise_signal(number)
            yield text

    with monkeypatch.context() as patch:
        patch.setattr(gather, "write", stopping)
        ran = furcate(capsys, *words, *OWN, "--only-data")
    assert ran.code == 130
    assert "go on with the same command and --resume" in ran.err
    kept = len(Corpus.open(tmp_path / "out" / "text"))
    assert kept >= 1
    assert furcate(capsys, *words, *OWN, "--only-data").code == 2
    assert furcate(capsys, *words, *OWN, "--only-data", "--resume").code == 0
    assert len(Corpus.open(tmp_path / "out" / "text")) > kept


def test_heads_are_trained_on_given_conversations(
    capsys: Capsys, words: list[str], conversations: Path, tiny_model: Path, tmp_path: Path
) -> None:
    kinds = ["medusa", "--medusa-heads", "2", "--mlp", "eagle3=48", "--layers", "0,1,2"]
    data = ["--data", str(conversations), "--draft-vocab", "100"]
    ran = furcate(capsys, *words, *kinds, *data, *SMALL, "--json")
    training = _json(ran)["training"]
    assert training["finished"] is True
    assert set(training["heads"]) == {"eagle3", "medusa"}
    target = Target.load(str(tiny_model), "float32", "cpu").decoder
    for kind, head in training["heads"].items():
        path = Path(head["path"])
        assert path == tmp_path / "out" / kind
        assert len(head["held_out"]["conditional"]) == 2
        loaded = load_head(path, target)
        assert loaded.spec.kind == kind
        provenance = json.loads((path / "provenance.json").read_text(encoding="utf-8"))
        assert provenance["command"].startswith("furcate train eagle3 ")
        assert provenance["text"]["recipe"]["file"] == "talks.jsonl"
    spec = load_head(tmp_path / "out" / "eagle3", target).spec
    assert isinstance(spec, EagleSpec)
    assert (spec.layers, spec.block.intermediate_size) == ((0, 1, 2), 48)


def test_a_person_reads_acceptance_by_depth(
    capsys: Capsys, words: list[str], conversations: Path
) -> None:
    ran = furcate(capsys, *words, "--data", str(conversations), *SMALL)
    assert ran.code == 0
    assert "text: 30 conversations" in ran.out
    assert "eagle3: conditional acceptance by depth" in ran.out
    assert "tokens per round (bonus included)" in ran.out


def test_an_interrupted_training_says_how_to_go_on(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, words: list[str], conversations: Path
) -> None:
    asked = [*words, "--data", str(conversations), *SMALL]

    def stopped(target: Any, text: Any, asked: Any, on_report: Any) -> Any:
        outcome = trained(target, text, asked, on_report)
        return type(outcome)(False, outcome.position, {}, outcome.held_out)

    trained = job.trained
    with monkeypatch.context() as patch:
        patch.setattr(job, "trained", stopped)
        ran = furcate(capsys, *asked)
    assert ran.code == 130
    assert "--resume" in ran.err
    refused = furcate(capsys, *asked)
    assert refused.code == 2
    assert "--resume" in refused.err
    assert furcate(capsys, *asked, "--resume").code == 0


def test_the_text_of_an_earlier_run_serves_again(
    capsys: Capsys, words: list[str], conversations: Path, tmp_path: Path
) -> None:
    furcate(capsys, *words, "--data", str(conversations), "--only-data")
    here = tmp_path / "out" / "text"
    again = [*words[:5], str(tmp_path / "other"), *words[6:], "--data", str(here), "--json"]
    record = _json(furcate(capsys, *again, *SMALL))
    assert record["text"]["path"] == str(here)
    assert record["training"]["finished"] is True


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--data", "/no/such.jsonl"], "--data"),
        (["--held-away", "/no/such.jsonl"], "such.jsonl"),
        (["--mlp", "medusa=3"], "--mlp"),
        (["--mlp", "eagle3"], "--mlp"),
        (["--mlp", "mtp=3", "--mlp", "mtp=4"], "--mlp"),
        (["--layers", "a"], "--layers"),
        (["--tokens", "3", "--minutes", "4"], "--minutes"),
        (["eagle3"], "named twice"),
        (["eagle4"], "eagle4"),
        (["--loss", "mse"], "mse"),
        (["--data-tokens", "0"], "--data-tokens"),
        (["--target", "smollm9"], "smollm9"),
    ],
    ids=" ".join,
)
def test_a_mistake_costs_no_run(
    capsys: Capsys, words: list[str], more: list[str], said: str, tmp_path: Path
) -> None:
    ran = furcate(capsys, *words, *OWN, *more)
    assert ran.code == 2
    assert said in ran.err
    assert "Traceback" not in ran.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "more", [["--write-batch", "3"], ["--data-tokens", "5"], ["--data-context", "99"]], ids=" ".join
)
def test_flags_that_change_nothing_are_refused(
    capsys: Capsys, words: list[str], more: list[str], tmp_path: Path
) -> None:
    (tmp_path / "text").mkdir()
    ran = furcate(capsys, *words, "--data", str(tmp_path / "text"), *more)
    assert ran.code == 2
    assert f"{more[0]}: changes nothing" in ran.err


def test_a_malformed_line_leaves_the_lines_before_it(
    capsys: Capsys, words: list[str], conversations: Path
) -> None:
    with conversations.open("a", encoding="utf-8") as file:
        file.write('\n{"messages": []}')
    ran = furcate(capsys, *words, "--data", str(conversations))
    assert ran.code == 2
    assert "talks.jsonl line 31" in ran.err


def test_too_little_text_is_said(capsys: Capsys, words: list[str], conversations: Path) -> None:
    conversations.write_text(json.dumps({"messages": TALK}), encoding="utf-8")
    ran = furcate(capsys, *words, "--data", str(conversations), *SMALL)
    assert ran.code == 2
    assert "too little text" in ran.err


def test_a_mistake_in_training_is_named_by_its_flag(
    capsys: Capsys, words: list[str], conversations: Path
) -> None:
    ran = furcate(capsys, *words, "--data", str(conversations), *SMALL, "--lr", "-1")
    assert ran.code == 2
    assert "--lr" in ran.err


def test_a_model_without_a_template_is_refused(
    capsys: Capsys, words: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    bare = shutil.copytree(tiny_model, tmp_path / "bare")
    config = json.loads((bare / "tokenizer_config.json").read_text(encoding="utf-8"))
    del config["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    ran = furcate(capsys, *words, "--target", str(bare), "--only-data")
    assert ran.code == 2
    assert "no chat template" in ran.err


def test_the_command_has_one_set_of_kinds() -> None:
    from furcate.train.shapes import KINDS

    assert {kind.value for kind in command.Head} == set(KINDS)


def test_help_does_not_load_torch() -> None:
    script = (
        "import sys; from furcate.cli.main import run; "
        "code = run(['train', '--help']); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

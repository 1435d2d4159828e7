"""`furcate bench`: its figures, where they go, and prompt files that are wrong."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from cli_runs import furcate

from furcate.engine import bench as measuring
from furcate.engine.compare import Parting

Capsys = pytest.CaptureFixture[str]
KEYS = {
    "tokens_per_round",
    "conditional_acceptance_by_depth",
    "marginal_acceptance_by_depth",
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "identical",
    "differences",
    "by_category",
    "device",
    "commit",
    "date",
    "command",
    "target",
    "drafter",
    "draft",
    "sampling",
}
PROMPTS = [
    {"prompt": "hello hello hello hello", "category": "echo"},
    {"messages": [{"role": "user", "content": "hello world"}], "category": "talk"},
    {"turns": ["hello", "hello again"], "category": "talk"},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(entry) for entry in PROMPTS) + "\n\n", encoding="utf-8")
    return path


@pytest.fixture
def words(tiny_model: Path, prompts: Path) -> list[str]:
    asked = ["--target", str(tiny_model), "--prompts", str(prompts), "--dtype", "float64"]
    return ["bench", *asked, "--max-tokens", "24", "--ignore-eos"]


@pytest.mark.parametrize("more", [[], ["--batch", "3"], ["--temperature", "0.7", "--seed", "5"]])
def test_the_figures_have_their_agreed_names(
    capsys: Capsys, words: list[str], more: list[str]
) -> None:
    ran = furcate(capsys, *words, "--fixed", "--nodes", "7", "--json", "-", *more)
    report = json.loads(ran.out)
    assert ran.code == 0
    assert set(report) >= KEYS
    assert report["identical"] is True
    assert report["command"].startswith("furcate bench --target ")
    assert report["drafter_details"]["kind"] == report["drafter"] == "ngram"
    assert report["tokens"] == 3 * 24
    assert report["tokens_per_round"] == report["tokens"] / report["rounds"] >= 1
    assert report["speedup"] == pytest.approx(
        report["tokens_per_second"] / report["baseline_tokens_per_second"]
    )
    assert set(report["by_category"]) == {"echo", "talk"}
    assert sum(group["tokens"] for group in report["by_category"].values()) == report["tokens"]


def test_the_figures_say_what_they_were_made_with(capsys: Capsys, words: list[str]) -> None:
    """The same names on every device; what a GPU has to do without stands beside its reason."""
    report = json.loads(furcate(capsys, *words, "--limit", "1", "--json", "-").out)
    told = {"device", "kernels_why", "draft_kernels", "draft_kernels_why", "memory", "graphs"}
    assert told <= set(report) and report["device"]
    assert (report["kernels"], report["batch_invariant"]) == ("torch", False)
    assert (report["graphs"], report["rounds_ahead"]) == (None, 0), "a CPU records nothing"


def test_marginal_acceptance_is_at_most_conditional(capsys: Capsys, words: list[str]) -> None:
    ran = furcate(capsys, *words, "--fixed", "--nodes", "7", "--json", "-")
    report = json.loads(ran.out)
    marginal = report["marginal_acceptance_by_depth"]
    conditional = report["conditional_acceptance_by_depth"]
    assert len(marginal) == len(conditional) > 0
    assert all(m <= c for m, c in zip(marginal, conditional, strict=True))
    assert all(a >= b for a, b in pairwise(marginal))


def test_a_person_reads_the_same_figures(capsys: Capsys, words: list[str]) -> None:
    ran = furcate(capsys, *words)
    assert ran.code == 0
    for part in (
        "tokens per round (bonus included): ",
        "accepted by depth, of those that reached it: ",
        "accepted by depth, of all rounds: ",
        "tokens/s, plain: ",
        "identical to plain decoding: yes",
        "echo",
        "talk",
    ):
        assert part in ran.out


def test_a_file_is_written_whole(capsys: Capsys, words: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    folder.mkdir()
    assert furcate(capsys, *words, "--limit", "1", "--json", str(folder / "a.json")).code == 0
    assert json.loads((folder / "a.json").read_text())["prompts"] == 1
    assert os.listdir(folder) == ["a.json"]


def test_without_a_baseline_nothing_is_claimed(capsys: Capsys, words: list[str]) -> None:
    ran = furcate(capsys, *words, "--baseline", "none", "--json", "-")
    report = json.loads(ran.out)
    assert report["identical"] is report["speedup"] is report["baseline_tokens_per_second"] is None


def test_only_the_categories_asked_for_are_measured(capsys: Capsys, words: list[str]) -> None:
    ran = furcate(capsys, *words, "--category", "talk", "--json", "-")
    report = json.loads(ran.out)
    assert (report["prompts"], list(report["by_category"])) == (2, ["talk"])
    ran = furcate(capsys, *words, "--category", "poems")
    assert ran.code == 2
    assert "category" in ran.err
    assert "poems" in ran.err


def test_later_turns_follow_the_answers(capsys: Capsys, words: list[str]) -> None:
    ran = furcate(capsys, *words, "--turns", "all", "--json", "-")
    report = json.loads(ran.out)
    assert (ran.code, report["prompts"], report["identical"]) == (0, 4, True)


def test_drafting_nothing_makes_one_token_a_round(capsys: Capsys, words: list[str]) -> None:
    report = json.loads(furcate(capsys, *words, "--drafter", "off", "--json", "-").out)
    assert report["tokens_per_round"] == 1
    assert report["marginal_acceptance_by_depth"] == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"{}", "no single kind of prompt"),
        (b'{"prompt": "a", "turns": ["b"]}', "no single kind of prompt"),
        (b'{"prompt": ""}', "not empty"),
        (b'{"prompt": 3}', "not empty"),
        (b'{"turns": []}', "at least one"),
        (b'{"turns": "hello"}', "at least one"),
        (b'{"messages": ["hello"]}', "role and content"),
        (b'{"messages": [{"role": "user"}]}', "role and content"),
        (b'{"messages": [{"role": "user", "content": null}]}', "not empty"),
        (b'{"prompt": "a", "category": 3}', "category must be a string"),
    ],
)
def test_a_bad_line_is_named_by_its_number(
    capsys: Capsys, words: list[str], prompts: Path, line: bytes, said: str
) -> None:
    prompts.write_bytes(b'{"prompt": "hello"}\n\n' + line + b"\n")
    ran = furcate(capsys, *words)
    assert ran.code == 2
    assert "prompts.jsonl line 3" in ran.err
    assert said in ran.err


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe"])
def test_a_file_without_prompts_is_refused(
    capsys: Capsys, words: list[str], prompts: Path, content: bytes
) -> None:
    prompts.write_bytes(content)
    ran = furcate(capsys, *words)
    assert ran.code == 2
    assert "prompts" in ran.err


@pytest.mark.parametrize(
    "more",
    [
        ["--prompts", "/no/such.jsonl"],
        ["--limit", "0"],
        ["--batch", "0"],
        ["--baseline", "fast"],
        ["--n", "2"],
        ["--logprobs"],
        ["--json", "/no/such/folder/a.json"],
        ["--json", "/"],
    ],
    ids=" ".join,
)
def test_a_mistake_costs_no_run(capsys: Capsys, words: list[str], more: list[str]) -> None:
    ran = furcate(capsys, *words, *more)
    assert ran.code == 2
    assert ran.out == ""


@pytest.mark.parametrize("more", [[], ["--json", "-"]], ids=["text", "json"])
@pytest.mark.parametrize(("tie", "code"), [(True, 0), (False, 1)])
def test_a_difference_that_rounding_does_not_explain_fails_the_run(
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    more: list[str],
    tie: bool,
    code: int,
) -> None:
    monkeypatch.setattr(measuring, "parting", lambda *_: Parting(3, 1, 2, 0.5, tie))
    ran = furcate(capsys, *words, "--limit", "1", *more)
    assert ran.code == code
    assert "identical" in ran.out

"""`furcate chat`: turns, commands, and what is left when an answer is stopped."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from cli_runs import Ran, furcate

from furcate.engine.engine import Engine
from furcate.engine.outputs import Piece

Capsys = pytest.CaptureFixture[str]


def _chat(capsys: Capsys, model: Path, typed: str, *more: str) -> Ran:
    words = ["chat", "--target", str(model), "--max-tokens", "12", "--ignore-eos", *more]
    return furcate(capsys, *words, stdin=typed.encode())


def test_each_line_is_a_turn_and_history_is_reused(capsys: Capsys, tiny_model: Path) -> None:
    record = json.loads(_chat(capsys, tiny_model, "hello\nhello again\n", "--json").out)
    assert [m["role"] for m in record["messages"]] == ["user", "assistant"] * 2
    assert (record["drafter"], record["drafter_details"]["kind"]) == ("ngram", "ngram")
    first, second = (answer["stats"] for answer in record["answers"])
    assert first["reused_tokens"] == 0
    assert second["prompt_tokens"] > first["prompt_tokens"]
    assert second["reused_tokens"] > 0


def test_answers_and_figures_go_to_different_places(capsys: Capsys, tiny_model: Path) -> None:
    ran = _chat(capsys, tiny_model, "hello\n/stats\n/exit\nnever asked\n")
    assert ran.code == 0
    assert ran.err.count("(bonus included)") == 2
    assert "bonus" not in ran.out


def test_reset_forgets_all_but_the_system_message(capsys: Capsys, tiny_model: Path) -> None:
    ran = _chat(capsys, tiny_model, "hello\n/reset\nworld\n", "--json", "--system", "be kind")
    messages = json.loads(ran.out)["messages"]
    assert [m["content"] for m in messages[:2]] == ["be kind", "world"]
    assert len(messages) == 3


def test_commands_answer_and_unknown_ones_are_named(capsys: Capsys, tiny_model: Path) -> None:
    ran = _chat(capsys, tiny_model, "/help\n/stats\n/sing\n\n")
    assert ran.code == 0
    for part in ("/reset", "nothing is answered yet", "no such command: /sing"):
        assert part in ran.err


def test_a_turn_beyond_the_context_leaves_the_conversation_alone(
    capsys: Capsys, tiny_model: Path
) -> None:
    ran = _chat(capsys, tiny_model, f"hello\n{'world ' * 600}\nagain\n", "--json")
    assert ran.code == 0
    assert "error: prompt" in ran.err
    asked = [m["content"] for m in json.loads(ran.out)["messages"] if m["role"] == "user"]
    assert asked == ["hello", "again"]


def test_an_interrupt_stops_the_answer_and_not_the_program(
    capsys: Capsys, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, pieces = Engine.next_piece, []

    def interrupted(self: Engine, request_id: str) -> Piece | None:
        pieces.append(whole(self, request_id))
        if len(pieces) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return pieces[-1]

    monkeypatch.setattr(Engine, "next_piece", interrupted)
    before = signal.getsignal(signal.SIGINT)
    ran = _chat(capsys, tiny_model, "hello\nagain\n", "--nodes", "0")
    assert ran.code == 0
    assert "(stopped)" in ran.err
    assert ran.err.count("12 tokens") == 1  # the second turn is answered in full
    assert signal.getsignal(signal.SIGINT) is before


def test_input_that_is_not_utf8_is_refused(capsys: Capsys, tiny_model: Path) -> None:
    ran = furcate(capsys, "chat", "--target", str(tiny_model), stdin=b"ab\xff\n")
    assert ran.code == 2
    assert "not UTF-8" in ran.err

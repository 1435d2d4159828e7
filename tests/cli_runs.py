"""Runs the `furcate` command inside the test process, on a tiny random model."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_models import Small, save_hf
from tiny_vocab import tokens, write_folder

from furcate.cli.main import run

__all__ = ["Ran", "furcate", "tiny_model_in"]


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str


def furcate(capsys: pytest.CaptureFixture[str], *words: str, stdin: bytes = b"") -> Ran:
    """Run one command line as the console script does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        patch.setenv("COLUMNS", "200")
        code = run(words)
    captured = capsys.readouterr()
    return Ran(code, captured.out, captured.err)


def tiny_model_in(folder: Path) -> Path:
    """A llama with random weights and a tokenizer with a chat template, as a folder."""
    sizes = {"vocab_size": len(tokens()), "max_position_embeddings": 512, "num_hidden_layers": 2}
    write_folder(folder)  # its config.json is a stub, which the model's own replaces
    save_hf(Small("tiny", "llama", sizes), folder)
    return folder

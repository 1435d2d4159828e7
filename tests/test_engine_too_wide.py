"""Pools that are too wide for a kernel go to torch, and the engine says so when it is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_engine_memory import drafter_named
from tiny_engine import decoder, judged, prompt_of, tokenizer

from furcate.cli.fallbacks import fallbacks
from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.engine import build as building
from furcate.engine.engine import Engine
from furcate.kernels.backend import TORCH

GREEDY = SamplingParams(temperature=0, max_tokens=8, seed=1, ignore_eos=True)


def unfit(*given: Any) -> Any:
    raise AssertionError("the pools are too wide for this kernel")


def test_an_engine_whose_pools_are_too_wide_uses_torch_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = replace(TORCH, put=unfit, most_put=8, join=unfit, most_joined=8)
    monkeypatch.setattr(building, "kernels_of", lambda *_, **__: narrow)
    options = EngineOptions(device="cpu", max_batch=2, max_context=256)
    which = drafter_named("ngram+eagle3", tmp_path)
    with Engine(building.build(decoder(), tokenizer(), which, options, DraftOptions())) as engine:
        told = engine.backend()
        output = engine.collect(engine.submit(prompt_of(12, 1), GREEDY))
    assert list(output.token_ids) == judged(prompt_of(12, 1), GREEDY)
    assert "one program sorts 8" in told["put_kernels_why"]
    assert "one program compares 8" in told["join_kernels_why"]
    lines = [line for line in fallbacks(told) if "torch's own" in line]
    assert [line.split(":")[0] for line in lines] == ["put kernels", "join kernels"]


def test_pools_at_the_width_of_a_program_are_the_kernels_own() -> None:
    kernels = replace(TORCH, most_put=8, most_joined=64)
    assert kernels.put_why(8) is None and kernels.put_why(9) is not None
    assert kernels.join_why(5, 8) is None, "padded to 8 times 8"
    assert kernels.join_why(5, 9) is not None
    assert TORCH.put_why(1 << 20) is None and TORCH.join_why(1 << 10, 1 << 10) is None

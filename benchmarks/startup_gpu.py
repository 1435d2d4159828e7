"""Seconds from a new process to its first token: with no kernel compiled before, and with all.

    python benchmarks/startup_gpu.py --out startup.json
    python benchmarks/startup_gpu.py --drafters default hybrid --out startup.json

Every row is a process of its own, which loads the embedded model and answers one prompt as a
user's program does. A "cold" one finds an empty Triton cache, a "warm" one what the cold one before
it has left there; files of the model and of Python may be in the machine's memory in both.
`seconds` are counted from before the process was started: until furcate was imported, the engine
loaded, the first token there, and all of them. "default" is the drafter that is taken where none is
named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_report import Report, asked_of, begin, parser_of
from targets import OWN

from furcate.config import SamplingParams
from furcate.engine.engine import Engine

IMPORTED = time.time()
WANTED = 60.0  # seconds to the first token, cold
TOKENS = 32
PROMPT = "Explain to a child why the moon changes its shape."
MARK = "seconds: "


def answer(target: str, drafter: str, device: str, began: float) -> dict[str, Any]:
    """In the new process: when what was there, and what was recorded by then."""
    marks = {"imported": IMPORTED - began}
    named = () if drafter == "default" else (drafter,)
    with Engine.load(target, *named, device=device) as engine:
        marks["loaded"] = time.time() - began
        law = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, seed=0)
        recorded = None
        for piece in engine.stream(PROMPT, law):
            if piece.token_ids and "first_token" not in marks:
                marks["first_token"] = time.time() - began
                recorded = len(engine.built.player.played.recorded)
        marks["all_tokens"] = time.time() - began
        backend = engine.backend()
    seconds = {name: round(value, 2) for name, value in marks.items()}
    return {"seconds": seconds, "recorded_by_the_first_token": recorded, "backend": backend}


def started(target: str, drafter: str, device: torch.device, most: float) -> Iterator[Any]:
    """A cold process, and a warm one behind it."""
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm"):
            env = {**os.environ, "TRITON_CACHE_DIR": cache}
            words = [sys.executable, __file__, "--answer", target, drafter, device.type]
            done = subprocess.run(
                [*words, repr(time.time())],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                env=env,
                timeout=most,
            )
            told = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
            row = json.loads(told[-1].removeprefix(MARK))
            kernels = sum(1 for _ in Path(cache).glob("*/*.cubin"))
            cold = state == "cold"
            within = {"within": row["seconds"]["first_token"] <= WANTED} if cold else {}
            first = row["seconds"]["first_token"]
            yield {"state": state, "first_token": first, "kernels": kernels, **within, **row}


def main() -> None:
    """Print one JSON object."""
    if sys.argv[1:2] == ["--answer"]:
        target, drafter, kind, began = sys.argv[2:]
        told = answer(target, drafter, kind, float(began))
        sys.stdout.write(MARK + json.dumps(told) + "\n")
        return
    parser = parser_of(__doc__)
    parser.add_argument("--target", default=OWN)
    parser.add_argument("--drafters", nargs="+", default=["default"])
    parser.add_argument("--most", type=float, default=240, help="seconds of one process")
    asked, device = asked_of(parser, {})
    what = "seconds from a new process to its first token"
    report = Report.of("startup_gpu.py", what, device, asked)
    report.note(target=asked.target, tokens=TOKENS, wanted_cold=WANTED)
    for drafter in asked.drafters:
        report.run(
            {"drafter": drafter},
            lambda d=drafter: started(asked.target, d, device, asked.most),
        )
    sys.exit(report.close())


if __name__ == "__main__":
    begin(main)

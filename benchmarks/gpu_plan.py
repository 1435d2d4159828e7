"""What `all_gpu.py` runs: each part, how long it may take, and whether anything may run beside it.

A part that takes times has the machine for itself. Seconds are the most that a part gets, about
twice what it is expected to take where kernels are compiled already.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PARTS", "Part"]

Words = tuple[str, ...]
HOME = Path(__file__).resolve().parent
GPU_TESTS = sorted(
    str(file)
    for file in (HOME.parent / "tests").glob("test_*.py")
    if re.search(r"MARKS|mark\.gpu", file.read_text(encoding="utf-8"))
    and not file.name.startswith("test_benchmarks")  # those try the scripts, on a CPU too
)
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-m", "gpu")
_EVIDENCE = ("-m", "furcate.prove.evidence", "--device", "cuda")


@dataclass(frozen=True)
class Part:
    """Some commands that run side by side, and one behind them.

    Words may hold {out}, the JSON file of the part; {kept}, a folder of its own; and {seconds},
    after which nothing new should begin.
    """

    name: str
    commands: tuple[Words, ...]
    seconds: float
    alone: bool = True
    then: Words = ()
    tiny: Words = ()  # instead of all of them, to try the part on a CPU
    tells: bool = True  # whether it writes {out}

    def words(self, command: Words, names: dict[str, str], commit: str) -> list[str]:
        """A command as it is started."""
        said = [word.format(**names) for word in command]
        if commit and self.tells:
            said += ["--commit", commit]
        return [sys.executable, *said]


def _script(name: str, script: str, words: str, seconds: float, *, alone: bool = True) -> Part:
    file, written = str(HOME / script), ("--out", "{out}", "--seconds", "{seconds}")
    command, tiny = (file, *words.split(), *written), (file, "--tiny", *written)
    return Part(name, (command,), seconds, alone, tiny=tiny)


def _streams(name: str, words: str, shares: int, seconds: float) -> Part:
    """Evidence in shares that run side by side; the last command puts them together."""
    asked = (*_EVIDENCE, *words.split(), "--parts", "{kept}", "--out", "{out}")
    timed = tuple(
        (*asked, "--share", f"{k}/{shares}", "--seconds", "{seconds}") for k in range(1, shares + 1)
    )
    cpu = ("-m", "furcate.prove.evidence", "--device", "cpu", "--seconds", "0")
    tiny = (*cpu, "--parts", "{kept}", "--out", "{out}")
    return Part(name, timed, seconds, False, (*asked, "--seconds", "0"), tiny)


def _tests(shares: int) -> Part:
    commands = tuple((*_PYTEST, *GPU_TESTS[k::shares]) for k in range(shares))
    tiny = ("-m", "pytest", "-q", "--collect-only", "-o", "addopts=", GPU_TESTS[0])
    return Part("tests", commands, 240, False, tiny=tiny, tells=False)


def _bench() -> Part:
    """The command that users have."""
    prompts = str(HOME / "data" / "spec_bench_dev_20.jsonl")
    asked = ("-m", "furcate.cli.main", "bench", "--prompts", prompts, "--temperature", "0")
    cuda = ("--device", "cuda", "--drafter", "hybrid", "--max-tokens", "128", "--json", "{out}")
    cpu = ("--device", "cpu", "--limit", "1", "--max-tokens", "4", "--json", "{out}")
    return Part("bench", ((*asked, *cuda),), 90, tiny=(*asked, *cpu), tells=False)


def _versus(batch: int, words: str, seconds: float) -> Part:
    ways = "--ways off ngram eagle3 eagle3@4 hybrid mtp medusa"
    return _script(f"versus_{batch}", "versus_gpu.py", f"{ways} --batches {batch} {words}", seconds)


PARTS: Sequence[Part] = (
    _script("compile", "compile_ahead.py", "", 240),
    _script(
        "round_8b",
        "round_gpu.py",
        "--shapes llama-8b --batches 1 --drafters off eagle3@5 --prompt 2048 --nodes 63",
        100,
    ),
    _script(
        "round_smollm2",
        "round_gpu.py",
        "--shapes smollm2-135m --batches 1 --drafters off eagle3 eagle3@4 hybrid ngram --nodes 31",
        120,
    ),
    _versus(1, "--groups 10 --peer-groups 3 --peers eager static vllm", 180),
    _versus(8, "--groups 3 --tokens 256 --peers vllm", 180),
    _versus(32, "--groups 2 --tokens 256 --peers vllm", 240),
    _bench(),
    _script("growth_nodes", "growth_gpu.py", "--only nodes", 70),
    _script("growth_small", "growth_gpu.py", "--shape smollm2-135m --only nodes", 60),
    _script("peers", "kernels_gpu.py", "--only peers --shapes llama-8b", 60),
    _script("attention", "kernels_gpu.py", "--only attention --shapes llama-8b", 60),
    _script("bookkeeping", "kernels_gpu.py", "--only round --shapes llama-8b", 60),
    _script("growth_context", "growth_gpu.py", "--only context", 90),
    _script("growth_batch", "growth_gpu.py", "--only batch", 120),
    _script("lanes", "lanes_gpu.py", "", 90),
    _script("startup", "startup_gpu.py", "", 150),
    _script("layer", "kernels_gpu.py", "--only layer", 60),
    _script("vocabulary", "kernels_gpu.py", "--only draft vocabulary", 60),
    _streams("streams", "--dtype float32 --batch-invariant --max-tokens 56", 4, 420),
    _script(
        "memory",
        "soak_gpu.py",
        "--only memory --memory-seconds {seconds}",
        180,
        alone=False,
    ),
    _tests(4),
    _script(
        "sanitize",
        "sanitize_gpu.py",
        "--broken --every 4 --at-once 3 --most 150",
        420,
        alone=False,
    ),
    _streams("flips", "--dtype bfloat16 --max-tokens 24", 2, 240),
    _streams("flips_invariant", "--dtype bfloat16 --batch-invariant --max-tokens 24", 2, 240),
    _script("waits", "soak_gpu.py", "--only waits moves", 120, alone=False),
    _script("law", "sampler_law_gpu.py", "", 160, alone=False),
)

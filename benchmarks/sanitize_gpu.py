"""Runs the kernel tests below compute-sanitizer: memory out of bounds, and races in shared memory.

    python benchmarks/sanitize_gpu.py --out sanitize.json
    python benchmarks/sanitize_gpu.py --tools memcheck --tests tests/test_kernels_wipe_triton.py

Tensors are allocated one by one meanwhile, so that a byte behind one is nobody's. A row is sound if
the tool found nothing, pytest passed, and tests ran at all. `--broken` shows that memcheck finds a
kernel that writes behind its tensor. Where the tool is missing, or may not look at the device, the
script says so and leaves with code 2. Needs pytest and hypothesis.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from gpu_report import CannotRun, Report, asked_of, begin, parser_of
from gpu_tools import refused
from gpu_tools import tool as find

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")
TESTS = (
    "tests/test_kernels_accept_triton.py",
    "tests/test_kernels_select_triton.py",
    "tests/test_kernels_kv_move_triton.py",
    "tests/test_kernels_kv_write_triton.py",
    "tests/test_kernels_turn_write_triton.py",
    "tests/test_kernels_wipe_triton.py",
    "tests/test_kernels_draft_head_triton.py",
    "tests/test_kernels_grow_triton.py",
    "tests/test_kernels_tally_triton.py",
    "tests/test_kernels_sample_triton.py",
    "tests/test_kernels_lawful_triton.py",
    "tests/test_kernels_attention_turn_triton.py",
    "tests/test_kernels_tree_attention_triton.py",
    "tests/test_models_product_triton.py",
)
SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:errors?|hazards?)")
PASSED = re.compile(r"(\d+) passed")


def checked(tool: str, command: list[str], seconds: float) -> dict[str, Any]:
    """What a tool says of a command."""
    told = [find("compute-sanitizer"), "--tool", tool, "--print-limit", "20", *command]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            told, check=False, capture_output=True, text=True, timeout=seconds, cwd=ROOT, env=env
        )
    except subprocess.TimeoutExpired:
        return {"stopped_after_seconds": seconds, "sound": False}
    said = done.stdout + done.stderr
    refused("compute-sanitizer", said)
    return verdict(said, done.returncode) | {"seconds": round(time.perf_counter() - began, 1)}


def verdict(said: str, code: int) -> dict[str, Any]:
    """From what was printed."""
    summary, passed = SUMMARY.search(said), PASSED.search(said)
    found = None if summary is None else int(summary[1])
    tests = 0 if passed is None else int(passed[1])
    sound = found == 0 and tests > 0 and code == 0
    row: dict[str, Any] = {"found": found, "passed": tests, "exit_code": code, "sound": sound}
    if not sound:
        lines = [line for line in said.splitlines() if line.strip()]
        row["said"] = [*[line for line in lines if "=========" in line][:12], *lines[-6:]]
    return row


def write_behind() -> None:
    """Zeroes a page that the pool does not have."""
    wipe = import_module("furcate.kernels.wipe_triton").wipe
    pool_LSD = torch.ones(1, 16, 8, device="cuda")
    wipe([pool_LSD], torch.tensor([10_000], device="cuda"), 16)
    torch.cuda.synchronize()


def broken(seconds: float) -> dict[str, Any]:
    """The check can fail: memcheck must find what `write_behind` does."""
    row = checked("memcheck", [sys.executable, __file__, "--write-behind"], seconds)
    found = row.get("found")
    return {"found": found, "sound": found is not None and found > 0}


def main() -> None:
    """Print one JSON object; exit with 1 if anything was found."""
    parser = parser_of(__doc__)
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    parser.add_argument("--select", default="", help="pytest's -k, to run fewer tests")
    parser.add_argument("--seconds", type=float, default=240, help="most of one file and tool")
    parser.add_argument("--broken", action="store_true", help="show that memcheck finds something")
    parser.add_argument("--write-behind", action="store_true", help="what it is shown with")
    tiny = {"tests": ["tests/test_kernels_wipe_triton.py"], "tools": ["memcheck"]}
    asked, device = asked_of(parser, tiny)
    if asked.write_behind:
        write_behind()
        return
    what = "kernel tests below compute-sanitizer"
    report = Report.of("sanitize_gpu.py", what, device, asked)
    if asked.broken:
        report.run({"tool": "memcheck", "tests": "broken"}, lambda: broken(asked.seconds))
    marked = "not gpu" if asked.tiny else "gpu"
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    pytest += ["-o", "addopts=", "-m", marked]  # plugins that the settings name need not be there
    pytest += ["-k", asked.select] if asked.select else []
    for tool in asked.tools:
        for file in asked.tests:
            if not (ROOT / file.partition("::")[0]).exists():
                raise CannotRun(f"--tests {file}: there is no such file")
            report.run(
                {"tool": tool, "tests": file},
                lambda t=tool, f=file: checked(t, [*pytest, f], asked.seconds),
            )
    sys.exit(report.close())


if __name__ == "__main__":
    begin(main)

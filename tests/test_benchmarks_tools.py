"""What NVIDIA's tools print is read as it is meant, and what they refuse is said in a line."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmark_scripts import HOME, scripts_find_each_other  # noqa: F401 (a fixture)
from triton_device import MARKS

pytestmark = [*MARKS, pytest.mark.usefixtures("scripts_find_each_other")]

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="the real tools are for --broken")
COUNTERS = (
    ("smsp__thread_inst_executed_pred_on_per_inst_executed.ratio", ""),
    ("smsp__thread_inst_executed_per_inst_executed.ratio", ""),
    ("sm__warps_active.avg.pct_of_peak_sustained_active", "%"),
    ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "%"),
    ("gpu__time_duration.sum", "us"),
)
KEPT = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
KEPT += ["Block Size", "Grid Size", "Device", "CC"]


def quoted(words: list[str]) -> str:
    return ",".join(f'"{word}"' for word in words)


def printed(launches: list[tuple[str, str]]) -> str:
    """As ncu 2025.3 prints `--csv --page raw`: (kernel, its microseconds)."""
    lines = ["==PROF== Connected to process 4711 (/usr/bin/python3.11)", "a line of the program"]
    lines += ["==PROF== Disconnected from process 4711", quoted(KEPT + [n for n, _ in COUNTERS])]
    lines.append(quoted([""] * len(KEPT) + [unit for _, unit in COUNTERS]))
    for number, (kernel, us) in enumerate(launches):
        head = [str(number), "4711", "python3.11", "127.0.0.1", kernel, "1", "7"]
        head += ["(128, 1, 1)", "(1, 1, 1)", "0", "9.0"]
        lines.append(quoted([*head, "31.50", "32", "7.25", "1.5", us]))
    return "\n".join(lines)


def all_launches(repeats: int) -> list[tuple[str, str]]:
    """Every shot as often as it is made; one launch of the three takes far longer."""
    kernels = [["_select"]] * 4 + [["_accept"]] * 4 + [["_attend", "_join"]] * 4
    times = ["4.10", "1,234.5", "4.30"]
    return [(one, times[i]) for shot in kernels for i in range(repeats) for one in shot]


def on_path(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, body: str) -> None:
    """A stand-in for a tool."""
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def code_of(monkeypatch: pytest.MonkeyPatch, script: str, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(HOME / script), run_name="__main__")
    return int(left.value.code or 0)


def test_lanes_are_read_from_what_ncu_prints() -> None:
    import gpu_tools
    import lanes_gpu

    made = all_launches(lanes_gpu.REPEATS)
    found = gpu_tools.launches(printed(made))
    rows = lanes_gpu.rows_of(found, lanes_gpu.COUNTERS)
    assert [row["kernel"] for row in rows] == (["select"] * 4 + ["accept"] * 4 + ["attention"] * 8)
    assert rows[9]["function"] == "_join" and rows[9]["rows"] == rows[8]["rows"] == 32
    assert rows[0]["predicated_on"] == 31.5 and rows[0]["launches"] == 3
    assert rows[0]["nanoseconds"] == pytest.approx(4300), "the median, in the unit of its name"
    with pytest.raises(RuntimeError, match="11 launches of _accept, and 12 were made"):
        lanes_gpu.rows_of(found[:12] + found[13:], lanes_gpu.COUNTERS)
    with pytest.raises(RuntimeError, match="0 launches of _attend, and 12 were made"):
        lanes_gpu.rows_of(found[:24], lanes_gpu.COUNTERS)


@pytest.mark.parametrize(
    ("unit", "text", "figure"),
    [
        ("nsecond", "1,234.5", 1234.5),
        ("usecond", "4.1", 4100),
        ("us", "4.1", 4100),
        ("ms", "1.5", 1.5e6),
        ("second", "2", 2e9),
        ("byte/second", "9", 9),
        ("Gbyte/second", "3.5", 3.5e9),
        ("Tbyte/s", "1.25", 1.25e12),
        ("Mbyte", "1,024", 1.024e9),
        ("Ghz", "1.98", 1.98e9),
        ("%", "93.5", 93.5),
        ("inst", "12", 12),
        ("register/thread", "40", 40),
        ("", "n/a", None),
    ],
)
def test_figures_have_one_unit_whatever_ncu_chose(
    unit: str, text: str, figure: float | None
) -> None:
    import gpu_tools

    lines = [quoted(["ID", "Kernel Name", "x"]), quoted(["", "", unit]), quoted(["0", "_f", text])]
    (one,) = gpu_tools.launches("\n".join(lines))
    assert one.figures["x"] == (None if figure is None else pytest.approx(figure))


def test_a_table_that_is_not_there_has_no_launches() -> None:
    import gpu_tools

    assert gpu_tools.launches("==WARNING== No kernels were profiled.") == []
    assert gpu_tools.median_of([None, None]) is None


@CPU_ONLY
def test_the_lanes_script_goes_through_with_a_stand_in_for_ncu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It runs the command behind the options, as ncu does."""
    (tmp_path / "printed").write_text(printed(all_launches(3)))
    body = 'while [ "$1" != --metrics ]; do shift; done; shift 2; "$@" || exit 9\n'
    on_path(monkeypatch, tmp_path, "ncu", body + f"cat {tmp_path / 'printed'}")
    out = tmp_path / "lanes.json"
    assert code_of(monkeypatch, "lanes_gpu.py", "--tiny", "--out", str(out)) == 0
    record = json.loads(out.read_text())
    lanes = [row for row in record["results"] if row["row"] == "lanes"]
    assert len(lanes) == 16 and lanes[0]["lanes"] == pytest.approx(31.5 / 32)
    assert [row["failed"] for row in record["results"] if "failed" in row] == []
    assert {"device", "commit", "command", "date"} <= set(record)


@CPU_ONLY
@pytest.mark.parametrize(
    ("script", "tool", "said"),
    [
        ("lanes_gpu.py", "ncu", "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission"),
        ("lanes_gpu.py", "ncu", "==ERROR== Failed to initialize the profiler: LibraryNotLoaded"),
        ("lanes_gpu.py", "ncu", None),
        ("sanitize_gpu.py", "compute-sanitizer", "========= Error: Device not supported."),
        ("sanitize_gpu.py", "compute-sanitizer", None),
    ],
)
def test_a_tool_that_may_not_work_is_a_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    script: str,
    tool: str,
    said: str | None,
) -> None:
    if said is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        on_path(monkeypatch, tmp_path, tool, f"echo '{said}'; exit 1")
    out = tmp_path / "out.json"
    assert code_of(monkeypatch, script, "--tiny", "--out", str(out)) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told and tool in told.splitlines()[-1]
    assert (said or "not on the path")[-12:].strip("=. ") in told


def test_loops_and_shuffles_are_counted_in_machine_code() -> None:
    import lanes_gpu

    sass = """
        /*0000*/                   S2R R0, SR_CTAID.X ;        /* 0x0000000000007919 */
        /*0010*/              @!P0 SHFL.IDX PT, R2, R3, RZ, 0x1f ;
        /*0020*/               @P1 BRA 0x10 ;
        /*0030*/                   BRA 0x50 ;
        /*0040*/                   VOTE.ANY R3, PT, P0 ;
        /*0050*/                   BRA 0x50;
    """
    found = lanes_gpu.operations(sass)
    assert (found["SHFL"], found["VOTE"], found["loops"], found["instructions"]) == (1, 1, 1, 6)


@pytest.mark.parametrize(
    ("said", "code", "sound"),
    [
        ("12 passed in 3 s\n========= ERROR SUMMARY: 0 errors", 0, True),
        ("12 passed in 3 s\n========= ERROR SUMMARY: 3 errors", 0, False),
        ("12 passed\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)", 0, True),
        ("1 failed, 12 passed\n========= ERROR SUMMARY: 0 errors", 1, False),
        ("no tests ran\n========= ERROR SUMMARY: 0 errors", 5, False),
        ("12 passed", 0, False),
    ],
)
def test_a_sanitizer_that_ran_nothing_or_found_something_is_not_sound(
    said: str, code: int, sound: bool
) -> None:
    import sanitize_gpu

    assert sanitize_gpu.verdict(said, code)["sound"] is sound


@CPU_ONLY
def test_acceptance_is_one_warp_that_shuffles_and_walks_nothing(tmp_path: Path) -> None:
    """Its machine code for an H200, compiled without one, in a process without the interpreter."""
    out = tmp_path / "code.json"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(HOME.parent)}
    words = ["--code", "--kernels", "accept", "--out", str(out)]
    subprocess.run([sys.executable, str(HOME / "lanes_gpu.py"), *words], check=True, env=env)
    rows = json.loads(out.read_text())["results"]
    assert len(rows) == 2, "of 32 and of 64 rows"
    for row in rows:
        assert row["warps"] == 1 and row["SHFL"] > 0
        assert row["loops"] == row["BAR"] == 0, "nobody walks, nobody waits"
        assert row["stack_bytes"] == row["LDL"] == row["STL"] == 0


@CPU_ONLY
def test_the_sanitizing_script_goes_through_with_a_stand_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The stand-in finds nothing; pytest runs for it."""
    body = 'shift 4; "$@"; code=$?; echo "========= ERROR SUMMARY: 0 errors"; exit $code'
    on_path(monkeypatch, tmp_path, "compute-sanitizer", body)
    out = tmp_path / "sanitize.json"
    words = ["--tiny", "--out", str(out), "--tests", "tests/test_kernels_wipe_triton.py"]
    assert code_of(monkeypatch, "sanitize_gpu.py", *words) == 0
    (row,) = json.loads(out.read_text())["results"]
    assert row["sound"] and row["passed"] > 0
    words[-1] = "tests/no_such_test.py"
    assert code_of(monkeypatch, "sanitize_gpu.py", *words) == 2

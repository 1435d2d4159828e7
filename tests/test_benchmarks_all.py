"""All figures of a GPU: parts run in order and in time, and goals are held against figures."""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmark_scripts import HOME, scripts_find_each_other  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("scripts_find_each_other")

LONG = 3600.0  # seconds; a busy machine needs no more, and the test itself has an end
WRITE = "import json, sys; json.dump(json.loads(sys.argv[2]), open(sys.argv[1], 'w'))"


def run(home: Path, **changes: Any) -> Any:
    import all_gpu

    asked = {"commit": "f00", "tiny": False, "again": False, "end": math.inf}
    return all_gpu.Run(home, **{**asked, **changes})


def part(name: str, *commands: tuple[str, ...], **changes: Any) -> Any:
    import gpu_plan

    return gpu_plan.Part(name, commands, **{"seconds": LONG, "tells": False, **changes})


def writes(name: str, **record: Any) -> Any:
    told = json.dumps({"commit": "f00", "seconds": 1, "results": [], **record})
    return part(name, ("-c", WRITE, "{out}", told.replace("{", "{{").replace("}", "}}")))


def test_a_part_that_is_there_is_not_run_again(tmp_path: Path) -> None:
    one, here = writes("one"), run(tmp_path)
    assert here.played(one)["state"] == "done"
    assert here.played(one) == {"state": "was there"}
    assert run(tmp_path, commit="another").played(one)["state"] == "done", "of other code"
    assert run(tmp_path, again=True).played(one)["state"] == "done"


@pytest.mark.parametrize(
    "record",
    [
        {"left_out": [{"n": 1}]},
        {"results": [{"failed": "RuntimeError"}]},
        {"shortcomings": ["3 laws were not reached: greedy"]},
    ],
)
def test_a_part_that_is_not_whole_is_run_again(tmp_path: Path, record: dict[str, Any]) -> None:
    here = run(tmp_path)
    assert [here.played(writes("one", **record))["state"] for _ in "ab"] == ["done", "done"]


def test_a_part_is_ended_at_its_time_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over once the last that it starts has a pipe open, which ends with who has it."""
    import all_gpu

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = f"import time; f = open({str(pipe)!r}, 'w'); time.sleep(200); f.write('went on')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    clock, start, ends = SimpleNamespace(now=0.0), subprocess.Popen, list[Any]()

    def started(*args: Any, **options: Any) -> Any:
        process = start(*args, **options)
        ends.append(pipe.open("rb"))  # waits for who opens it to write
        clock.now = 2.0
        return process

    monkeypatch.setattr(subprocess, "Popen", started)
    shown = SimpleNamespace(monotonic=lambda: clock.now, strftime=time.strftime)
    monkeypatch.setattr(all_gpu, "time", shown)
    told = run(tmp_path).played(part("slow", ("-c", parent), seconds=1))
    assert told["state"] == "stopped" and told["exit_codes"] == [None]
    with ends[0] as end:
        assert end.read() == b""


def test_nothing_is_begun_without_time(tmp_path: Path) -> None:
    told = run(tmp_path, end=time.monotonic() + 5).played(writes("one"))
    assert told == {"state": "no time"} and not (tmp_path / "one.log").exists()


def test_shares_run_side_by_side_and_are_put_together_behind_them(tmp_path: Path) -> None:
    wait = "import sys, time, pathlib; mine = pathlib.Path(sys.argv[1]); mine.mkdir()\n"
    wait += "while len([*mine.parent.iterdir()]) < 3: time.sleep(.02)"  # one by one they never end
    count = "import sys, pathlib, json; found = len(list(pathlib.Path(sys.argv[1]).iterdir())); "
    count += "json.dump(dict(commit='f00', found=found), open(sys.argv[2], 'w'))"
    (tmp_path / "s.parts").mkdir()
    shares = [("-c", wait, f"{{kept}}/{n}") for n in range(3)]
    one = part("s", *shares, then=("-c", count, "{kept}", "{out}"))
    assert run(tmp_path).played(one)["exit_codes"] == [0] * 4
    assert json.loads((tmp_path / "s.json").read_text())["found"] == 3


def test_parts_that_want_the_machine_have_it_and_the_others_no_more_than_there_are(
    tmp_path: Path,
) -> None:
    import all_gpu

    log = tmp_path / "log"
    note = "import sys, time, pathlib; f = open(sys.argv[1], 'a'); f.write('+'); f.flush()\n"
    note += "mine = pathlib.Path(sys.argv[2]); mine.mkdir(parents=True)\n"
    # those of one part are under way together, however long one is in coming
    note += "while len([*mine.parent.iterdir()]) < int(sys.argv[3]): time.sleep(.02)\n"
    note += "time.sleep(.4); f.write('-'); f.close()"

    def notes(name: str, count: int) -> list[tuple[str, ...]]:
        return [
            ("-c", note, str(log), str(tmp_path / name / str(n)), str(count)) for n in range(count)
        ]

    alone = [part(name, *notes(name, 1)) for name in "ab"]
    beside = [part(name, *notes(name, 2), alone=False) for name in "cde"]
    found = all_gpu.all_played(run(tmp_path), [*beside, *alone], 2)
    assert {one["state"] for one in found.values()} == {"done"}
    told = log.read_text()
    assert told[:4] == "+-+-"
    assert max(told[:n].count("+") - told[:n].count("-") for n in range(len(told))) == 2


def test_a_goal_is_met_or_missed_or_not_there() -> None:
    import gpu_goals

    rows = [
        {"way": "off", "batch": 1, "over_off": 1.0, "tokens_per_second": 2000.0},
        {"way": "ngram", "batch": 1, "over_off": 0.9, "tokens_per_second": 1800.0},
        {"way": "hybrid", "batch": 1, "over_off": 2.2, "tokens_per_second": 4400.0},
        {"way": "eager", "batch": 1, "over_off": 0.1, "tokens_per_second": 100.0},
    ]
    told = {one["goal"]: one for one in gpu_goals.judged({"versus_1": {"results": rows}})}
    assert told["trees over plain, batch 1"]["met"] is True
    assert told["the slowest drafter over plain, batch 1"]["figure"] == 0.9
    assert told["the slowest drafter over plain, batch 1"]["met"] is False
    assert told["over vLLM plain, batch 1"]["figure"] == pytest.approx(4400 / 431)
    assert told["over vLLM plain, batch 8"]["met"] is None


@pytest.mark.parametrize("record", [None, {}, {"results": []}, {"results": [{"failed": "x"}]}])
def test_no_goal_is_met_by_what_is_not_there(record: Any) -> None:
    import gpu_goals

    for goal in gpu_goals.GOALS:
        met = goal.judge(record)["met"]
        assert met is None or (met is False and record == {"results": [{"failed": "x"}]})


def test_every_goal_is_of_a_part_and_every_part_has_its_script() -> None:
    import gpu_goals
    import gpu_plan

    names = [one.name for one in gpu_plan.PARTS]
    assert len(set(names)) == len(names)
    assert {goal.part for goal in gpu_goals.GOALS} <= set(names)
    for one in gpu_plan.PARTS:
        scripts = [words[0] for words in (*one.commands, one.tiny) if words[0].endswith(".py")]
        assert all(Path(script).is_file() for script in scripts)
    assert any("test_kernels_accept_triton" in file for file in gpu_plan.GPU_TESTS)


def test_goals_read_the_rows_that_the_scripts_write(tmp_path: Path) -> None:
    """What was measured before has the figures; scripts may not rename them unseen."""
    import gpu_goals

    home = HOME / "results"
    of_file = {
        "round_smollm2": "round_smollm2_h200",
        "versus_1": "versus_h200",
        "attention": "kernels_attention_h200",
        "bookkeeping": "kernels_round_h200",
        "lanes": "lanes_h200",
        "law": "sampler_law_h200",
    }
    records = {
        name: json.loads((home / f"{file}.json").read_text()) for name, file in of_file.items()
    }
    for one in gpu_goals.judged(records):
        assert (one["figure"] is not None) == (one["part"] in of_file), one["goal"]


@pytest.mark.usefixtures("embedded_model")
def test_one_part_is_tried_on_a_cpu_and_summed_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_plan

    unhurried = [replace(one, seconds=LONG) for one in gpu_plan.PARTS]
    monkeypatch.setattr(gpu_plan, "PARTS", unhurried)
    monkeypatch.setattr(
        sys, "argv", ["all_gpu.py", "--tiny", "--only", "growth_nodes", "--results", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(HOME / "all_gpu.py"), run_name="__main__")
    assert left.value.code == 1, "most goals are not there"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["parts"]["growth_nodes"]["state"] == "done"
    assert {"device", "commit", "command", "date"} <= set(summary)
    assert "four rows over one, 8B shape" in capsys.readouterr().out


STUBBED = """
import json
import no_device; no_device.absent()
import triton.compiler
import compile_ahead
class Nothing:
    function = packed_metadata = None
    def launch_metadata(self, *_): pass
    def run(self, *_): pass
triton.compiler.compile = lambda source, *_, **__: Nothing()
print(json.dumps(compile_ahead.play(compile_ahead.Job("tiny", "ngram", 2, 200, 7, "penalties"))))
"""


@pytest.mark.usefixtures("embedded_model")
def test_rounds_are_played_where_launches_do_nothing_and_their_kernels_are_named() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(HOME), str(HOME.parent)])
    told = subprocess.run(
        [sys.executable, "-c", STUBBED], check=True, stdout=subprocess.PIPE, text=True, env=env
    )
    found = json.loads(told.stdout.splitlines()[-1])
    named = {"_attend", "_row", "_product", "_select", "_accept", "_settle", "_move"}
    assert named <= set(found["by_name"])
    assert found["kernels"] == sum(found["by_name"].values()) > 40

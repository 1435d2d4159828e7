"""The GPU scripts run on a CPU at sizes that say nothing, and their checks can fail."""

from __future__ import annotations

import json
import runpy
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_engine import tiny_engine
from triton_device import DEVICE, MARKS

pytestmark = MARKS

HOME = Path(__file__).parent.parent / "benchmarks"
CPU = torch.device("cpu")
TOP = {"memory_gb_per_s": 1.0, "bf16_tflop_per_s": 1.0, "smallest_kernel_us": 1.0}


@pytest.fixture(autouse=True)
def _scripts_find_each_other(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(HOME))
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(HOME)):
            del sys.modules[name]


def ran(monkeypatch: pytest.MonkeyPatch, script: str, *words: str) -> tuple[int, dict[str, Any]]:
    """(exit code, the JSON object) of a script with --tiny."""
    out = Path(words[0])
    monkeypatch.setattr(sys, "argv", [script, "--tiny", "--out", *words])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(HOME / script), run_name="__main__")
    return int(left.value.code or 0), json.loads(out.read_text())


@pytest.mark.usefixtures("embedded_model")
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kernels_gpu.py", ()),
        ("round_gpu.py", ("--batches", "2", "--tokens", "10")),
        ("growth_gpu.py", ("--only", "batch")),
        ("soak_gpu.py", ("--only", "waits", "moves")),
        ("sampler_law_gpu.py", ("--vocabularies", "8", "--filters", "none", "all")),
        ("sweep_attention.py", ("--rows", "1")),
    ],
)
def test_a_script_measures_and_says_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, words: tuple[str, ...]
) -> None:
    code, record = ran(monkeypatch, script, str(tmp_path / "out.json"), *words)
    assert code == 0
    assert record["results"]
    assert [row for row in record["results"] if "failed" in row or row.get("sound") is False] == []
    assert {"what", "command", "device", "commit", "date", "seconds"} <= set(record)
    told = " ".join(["python", f"benchmarks/{script}", "--tiny", *words])
    assert record["command"] == told, "and nothing of where its results go"


def test_triton_kernels_pass_the_checks_of_their_rows() -> None:
    """The rows that torch has no kernel for, in the interpreter."""
    import kernels_bench
    import kernels_layer
    import kernels_round
    import kernels_vocabulary
    from targets import SPECS

    from furcate.kernels.backend_triton import TRITON

    bench, spec = kernels_bench.Bench(TRITON, DEVICE, torch.float32, TOP), SPECS["tiny"]
    rows = [
        kernels_vocabulary.choosing(bench, 300, 2, 2),
        kernels_vocabulary.filtering(bench, 300, 2, 2),
        kernels_vocabulary.proposing(bench, 300, 2, 2),
        kernels_layer.turning(bench, spec, 3),
        kernels_round.selecting_rows(bench, 2, 8),
        kernels_round.walking(bench, 2, 8),
        kernels_round.moving(bench, spec, 2, 8, stays=False),
    ]
    assert [row["sound"] for row in rows] == [True] * len(rows)


def test_tree_attention_passes_and_a_wrong_one_does_not() -> None:
    import kernels_attention
    import kernels_bench
    from targets import SPECS

    from furcate.kernels.backend_triton import TRITON

    bench = kernels_bench.Bench(TRITON, DEVICE, torch.float32, TOP)
    good = kernels_attention.verifying(bench, SPECS["tiny"], 2, 21, 5)
    assert good["sound"] and good["error"] < 1e-5
    looks = TRITON.look

    def one_key_too_many(sight: Any, group: int, dtype: torch.dtype) -> Any:
        longer = replace(sight.places, length_B=sight.places.length_B - 1)
        return looks(replace(sight, places=longer), group, dtype)

    wrong = replace(bench, kernels=replace(TRITON, look=one_key_too_many))
    assert not kernels_attention.verifying(wrong, SPECS["tiny"], 2, 21, 5)["sound"]


def test_slots_that_nobody_owns_are_poison() -> None:
    import gpu_cases

    made = gpu_cases.case(2, 21, 5, CPU)
    pool = gpu_cases.pool_of(made, (2, 4), torch.float32)
    places = made.places
    mine = {0} | {
        int(places.table_BP[b, at // 16]) * 16 + at % 16 for b in range(2) for at in range(26)
    }
    finite = pool.isfinite().flatten(1).all(1)
    assert set(finite.nonzero().flatten().tolist()) == mine


def test_what_ends_a_row_early_is_written_and_the_rest_goes_on(tmp_path: Path) -> None:
    import gpu_report

    out = tmp_path / "out.json"
    report = gpu_report.Report.of("x.py", "nothing", CPU, Namespace(out=out, commit="f00"))

    def rows() -> Iterator[dict[str, Any]]:
        yield {"us": 1.0}
        raise RuntimeError("out of luck\nand more")

    report.run({"n": 1}, rows)
    assert json.loads(out.read_text())["results"][1]["failed"] == "RuntimeError: out of luck"
    report.run({"n": 2}, lambda: {"us": 2.0})
    assert json.loads(out.read_text())["commit"] == "f00"
    assert [row["n"] for row in json.loads(out.read_text())["results"]] == [1, 1, 2]
    assert report.close() == 1


def test_floors_are_those_of_the_spec() -> None:
    import floors
    from targets import SPECS

    spec, ceiling = SPECS["llama-8b"], floors.Floor(4.3e9, 790e9)
    assert floors.kv_bytes(spec, 1) == 128 * 1024
    assert floors.weight_bytes(spec) == pytest.approx(15.0e9, rel=0.01)
    plain, tree = (floors.floor_of(spec, 1, 2048, n, ceiling) for n in (1, 64))
    assert plain == pytest.approx(3.55, rel=0.02)
    assert tree == pytest.approx(3.64, rel=0.05)


def test_traffic_comes_to_its_end() -> None:
    import soak_gpu

    with tiny_engine("ngram", max_batch=3, max_context=160) as engine:
        seconds, held = soak_gpu.traffic(engine, 10, CPU)
        assert engine.built.scheduler.busy is False
    assert seconds > 0
    assert len(held) == 5


def test_lanes_are_read_from_what_ncu_prints() -> None:
    import lanes_gpu

    names = list(lanes_gpu.COUNTERS)
    heads = ["ID", "Kernel Name", *names]
    lines = ["==PROF== Connected", ",".join(f'"{head}"' for head in heads), '"","","","","","",""']
    functions = ["_select"] * 4 + ["_accept"] * 4 + ["_attend", "_join"] * 4
    for number, function in enumerate(functions):
        values = [str(number), function, "31.5", "32", "7.25", "1.5", "4,100"]
        lines.append(",".join(f'"{value}"' for value in values))
    rows = lanes_gpu.rows_of(lanes_gpu.table("\n".join(lines)), lanes_gpu.COUNTERS)
    assert [row["kernel"] for row in rows] == (["select"] * 4 + ["accept"] * 4 + ["attention"] * 8)
    assert rows[9]["function"] == "_join" and rows[9]["rows"] == rows[8]["rows"] == 32
    assert rows[0]["predicated_on"] == 31.5 and rows[0]["nanoseconds"] == 4100
    with pytest.raises(RuntimeError):
        lanes_gpu.rows_of(lanes_gpu.table("\n".join(lines[:-2])), lanes_gpu.COUNTERS)


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


def test_ways_take_turns_and_equal_answers_are_counted() -> None:
    import versus_gpu

    asked: list[str] = []

    def way(name: str, token: int) -> Any:
        def answer(prompts: Any, tokens: int) -> list[list[int]]:
            asked.append(name)
            return [[token] * tokens for _ in prompts]

        return answer

    ways = {"off": way("off", 1), "tree": way("tree", 1), "eager": way("eager", 2)}
    groups = [[[5]], [[6]], [[7]]]
    found = versus_gpu.compared(SimpleNamespace(tokens=3), ways, groups)
    assert asked[:18].count("tree") == 6, "every way warms up on every group, for one token and all"
    assert asked[18::6] == ["off", "tree"], "another one goes first in each group"
    assert [found[name].equal for name in ways] == [2, 2, 0]
    assert all(len(one.rates) == 2 for one in found.values())

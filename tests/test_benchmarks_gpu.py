"""The GPU scripts run on a CPU at sizes that say nothing, and their checks can fail."""

from __future__ import annotations

import json
import re
import runpy
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import HOME, scripts_find_each_other  # noqa: F401 (a fixture)
from clocks import Still
from tiny_engine import tiny_engine
from triton_device import DEVICE, MARKS

pytestmark = [*MARKS, pytest.mark.usefixtures("scripts_find_each_other")]

CPU = torch.device("cpu")
TOP = {"memory_gb_per_s": 1.0, "bf16_tflop_per_s": 1.0, "smallest_kernel_us": 1.0}


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
        ("growth_gpu.py", ()),
        ("soak_gpu.py", ("--target", "FOLDER")),  # on a CPU it is not the target that counts
        ("startup_gpu.py", ("--target", "FOLDER")),
        ("versus_gpu.py", ("--target", "FOLDER", "--longest", "400")),
        ("sampler_law_gpu.py", ("--vocabularies", "8", "64", "--laws", "greedy", "all")),
        ("sweep_attention.py", ("--rows", "1")),
        ("sweep_products.py", ("--products", "qkv", "down")),
    ],
)
def test_a_script_measures_and_says_where(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_model: Path,
    script: str,
    words: tuple[str, ...],
) -> None:
    words = tuple(str(tiny_model) if word == "FOLDER" else word for word in words)
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


@pytest.mark.parametrize("rows", [8, 32, 64])
@pytest.mark.parametrize(
    ("outputs", "inputs", "normed"),
    [(28672, 4096, True), (4096, 14336, False), (960, 576, True), (576, 1536, False)],
)
def test_cuts_worth_a_try_begin_with_the_one_in_use_and_have_room(
    rows: int, outputs: int, inputs: int, normed: bool
) -> None:
    from product_candidates import candidates, expected_us, fits, shared_bytes

    from furcate.models.product_cut import Size, fitting_tile

    size = Size(rows, outputs, inputs, torch.bfloat16)
    first, *others = candidates(size, normed=normed)
    assert first == fitting_tile(size)
    assert 20 <= len({first, *others}) == 1 + len(others) <= 40
    for tile in others:
        assert fits(size, tile, normed) and shared_bytes(size, tile) < 227 * 1024
        assert tile.rows == first.rows and (normed or not tile.apart)
        assert 0 < expected_us(size, tile, normed) < 1000
    if outputs < 132 * 64:
        assert {tile.splits > 1 for tile in others} == {True, False}


def test_the_best_sound_cut_of_a_size_is_told_with_what_is_taken_today() -> None:
    import sweep_products

    from furcate.models.product_cut import Tile

    tile = Tile(64, 128, 128, 4, 4, splits=4)
    cut = {f"tile_{n}": getattr(tile, n) for n in Tile.__dataclass_fields__}
    size = {"model": "m", "product": "p", "rows": 64, "outputs": 2, "inputs": 3}
    rows = [
        {**size, "way": "torch", "us": 39.0, "sound": True},
        {**size, "way": "cut", **cut, "us": 31.0, "sound": True, "share_of_memory": 0.9},
        {**size, "way": "cut", **cut, "us": 33.0, "sound": True, "share_of_memory": 0.8},
        {**size, "way": "cut", **cut, "us": 3.0, "sound": False, "share_of_memory": 9.0},
        {**size, "way": "cut", "failed": "out of resources"},
    ]
    _, told = sweep_products.table(rows)
    assert told.split()[:6] == ["m", "p", "64", "-", "39.0", "31.0"]
    assert told.endswith(f"{tile}, best of 2")


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
    report = gpu_report.Report.of(
        "x.py", "nothing", CPU, Namespace(out=out, commit="f00", seconds=None)
    )

    def rows() -> Iterator[dict[str, Any]]:
        yield {"us": 1.0}
        raise RuntimeError("out of luck\nand more")

    report.run({"n": 1}, rows)
    assert json.loads(out.read_text())["results"][1]["failed"] == "RuntimeError: out of luck"
    report.run({"n": 2}, lambda: {"us": 2.0})
    assert json.loads(out.read_text())["commit"] == "f00"
    assert [row["n"] for row in json.loads(out.read_text())["results"]] == [1, 1, 2]
    assert report.close() == 1


def test_what_there_is_no_time_for_is_named_and_not_begun(tmp_path: Path) -> None:
    import gpu_report

    out = tmp_path / "out.json"
    asked = Namespace(out=out, commit="f00", seconds=1000.0)
    report = gpu_report.Report.of("x.py", "nothing", CPU, asked)

    def rows() -> Iterator[dict[str, Any]]:
        yield {"us": 1.0}
        report.began -= 2000
        yield {"us": 2.0}
        raise AssertionError("nobody asks for a third")

    report.run({"n": 1}, rows)
    report.run({"n": 2}, lambda: {"us": 3.0})
    record = json.loads(out.read_text())
    assert [row["us"] for row in record["results"]] == [1.0, 2.0]
    assert record["left_out"] == [{"n": 1, "behind_rows": 2}, {"n": 2}]
    assert report.close() == 0


def test_floors_are_those_of_the_spec() -> None:
    import floors
    from targets import SPECS

    spec, ceiling = SPECS["llama-8b"], floors.Floor(4.3e9, 790e9)
    assert floors.kv_bytes(spec, 1) == 128 * 1024
    assert floors.weight_bytes(spec) == pytest.approx(15.0e9, rel=0.01)
    plain, tree = (floors.floor_of(spec, 1, 2048, n, ceiling) for n in (1, 64))
    assert plain == pytest.approx(3.55, rel=0.02)
    assert tree == pytest.approx(3.64, rel=0.05)


@pytest.mark.parametrize("law", ["greedy", "temperature", "all"])
@pytest.mark.parametrize("way", ["plain", "tree"])
def test_the_kernels_draw_what_the_references_draw(law: str, way: str) -> None:
    """Token for token: the same noise decides."""
    import sampler_law_gpu
    from sampler_laws import LAWS, Case

    from furcate.kernels.backend import TORCH
    from furcate.kernels.backend_triton import TRITON

    case, count = Case(37, *LAWS[law]), sampler_law_gpu.COUNTS[way]
    found, told = (count(case, kernels, 30, DEVICE) for kernels in (TRITON, TORCH))
    assert found.tolist() == told.tolist()
    assert found.sum() >= 30 if way == "plain" else found.sum() > 30


def test_a_law_that_is_not_kept_is_found_out() -> None:
    import sampler_law_gpu
    from sampler_laws import LAWS, Case

    from furcate.kernels.backend import TORCH

    case = Case(64, *LAWS["temperature"])
    kept = sampler_law_gpu.row(case, "tree", TORCH, 40_000, CPU, 48)
    assert kept["sound"] and kept["draws"] > 40_000
    counts = sampler_law_gpu.counted_in_trees(Case(64, 1.3), TORCH, 40_000, CPU)
    assert case.p_value(counts, case.probabilities(1.1)) < 1e-9


def test_times_by_name_add_up_to_the_round() -> None:
    import round_gpu

    spans = [("_attend", 10.0, 14.0), ("_select", 0.0, 3.0), ("_attend", 16.0, 21.0)]
    spans += [("copy", 2.0, 4.0)]  # beside the end of _select
    found = round_gpu.by_name(spans, 20.0)
    assert found["us_by_name"] == {"_attend": 9, "_select": 3, "copy": 2}
    assert found["by_name"] == {"_attend": 2, "_select": 1, "copy": 1}
    assert (found["us_of_kernels"], found["us_of_gaps"], found["us_side_by_side"]) == (14, 8, 1)
    assert found["us_launched"] == 21 == 14 + 8 - 1
    assert found["sound"]
    assert not round_gpu.by_name(spans, 10.0)["sound"], "kernels longer than their round"
    assert not round_gpu.by_name([], 10.0)["sound"], "nothing was seen"


def test_names_beyond_the_first_ones_are_counted_together() -> None:
    import round_gpu

    spans = [(f"k{n}", 10.0 * n, 10.0 * n + 1 + n % 3) for n in range(40)]
    found = round_gpu.by_name(spans, 1000.0)
    assert len(found["us_by_name"]) == round_gpu.SHOWN
    total = sum(found["us_by_name"].values()) + found["us_of_others"]
    assert total == pytest.approx(found["us_of_kernels"]) == pytest.approx(79)


def test_curves_measured_one_by_one_are_drawn_together(tmp_path: Path) -> None:
    import growth_gpu
    from gpu_report import CannotRun

    def record(curve: str, device: str = "H200") -> dict[str, Any]:
        point = {"context": 1024, "batch": 1, "rows": 8, "ms_per_round": 4.0, "floor_ms": 3.0}
        results = [{"curve": curve, "drafter": "tree", **point}, {"curve": curve, "failed": "x"}]
        return {"target": "llama-8b", "device": device, "results": results}

    both = growth_gpu.together([record("context"), record("nodes")])
    assert [row["curve"] for row in both["results"]] == ["context"] * 2 + ["nodes"] * 2
    with pytest.raises(CannotRun):
        growth_gpu.together([record("context"), record("batch", "another")])
    growth_gpu.plot(both, tmp_path / "growth.svg")
    has_matplotlib = find_spec("matplotlib") is not None
    assert [file.name for file in tmp_path.iterdir()] == ["growth.svg"] * has_matplotlib


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("growth_gpu.py", ("--replot", "/no/such.json", "--plot", "x.svg")),
        ("growth_gpu.py", ("--replot", "/no/such.json")),
        ("round_gpu.py", ("--shapes", "nonsense")),
        ("versus_gpu.py", ("--tiny", "--target", "/no/such/model")),
        ("versus_gpu.py", ("--tiny", "--prompts", "/no/such.jsonl", "--peers")),
        ("sampler_law_gpu.py", ("--tiny", "--vocabularies", "2")),
        ("soak_gpu.py", ("--tiny", "--requests", "0")),
        ("kernels_gpu.py", ("--tiny", "--out", "/")),
    ],
)
def test_what_a_user_got_wrong_is_a_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    words: tuple[str, ...],
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(HOME / script), run_name="__main__")
    told = capsys.readouterr().err
    assert left.value.code == 2 and "Traceback" not in told
    assert told.splitlines()[-1].startswith(script)


@pytest.mark.parametrize(
    "script", sorted({file.name for file in HOME.glob("*_gpu.py")} - {"all_gpu.py"})
)
def test_help_is_an_example_and_a_paragraph(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(HOME / script), run_name="__main__")
    told = capsys.readouterr().out
    assert left.value.code == 0
    assert f"    python benchmarks/{script}" in told
    assert {"--tiny", "--out", "--commit"} <= set(re.findall(r"--[a-z]+", told))


def test_traffic_comes_to_its_end() -> None:
    import soak_gpu

    with tiny_engine("ngram", max_batch=3, max_context=160) as engine:
        seen = soak_gpu.traffic(engine, 10, CPU)
        assert engine.built.scheduler.busy is False
        late = soak_gpu.traffic(engine, 10, CPU, end=0.0)
    assert (seen.requests, len(seen.held), late.requests) == (10, 5, 0)
    assert seen.seconds > 0


@pytest.mark.parametrize(
    ("peak", "allocated", "recordings", "sound"),
    [
        (1_040_000_000, [900, 900, 900, 900, 900], [4, 4, 4, 4, 4], True),
        (1_040_000_000, [700, 730, 760, 760, 790], [4, 5, 6, 6, 7], True),  # recordings are small
        (1_060_000_000, [900, 900, 900, 900, 900], [4, 4, 4, 4, 4], False),  # more than it said
        (1_040_000_000, [700, 800, 900, 900, 1300], [4, 4, 4, 4, 4], False),  # it grows
        (1_040_000_000, [700, 800, 900, 1000, 1100], [4, 5, 6, 7, 8], False),  # whatever the reason
        (1_040_000_000, [900], [4], False),  # nothing to compare with
    ],
)
def test_an_engine_holds_what_it_said_and_no_more_as_time_goes_on(
    peak: int, allocated: list[int], recordings: list[int], sound: bool
) -> None:
    import soak_gpu

    held = [
        {"allocated": kib << 10, "reserved": 0, "device": 0, "recordings": count}
        for kib, count in zip(allocated, recordings, strict=True)
    ]
    most = {"allocated": peak, "reserved": peak, "device": peak}
    row = soak_gpu.judged({"total": 1_000_000_000}, most, held)
    assert row["sound"] is sound
    assert (row["peak_allocated_bytes"], row["stated_total_bytes"]) == (peak, 1_000_000_000)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Still:
    """Time by which ways are compared."""
    import versus_gpu

    monkeypatch.setattr(versus_gpu, "time", still := Still())
    return still


def test_ways_take_turns_and_equal_answers_are_counted(clock: Still) -> None:
    import versus_gpu

    asked: list[str] = []

    def way(name: str, token: int) -> Any:
        def answer(prompts: Any, tokens: int) -> list[list[int]]:
            asked.append(name)
            clock.now += tokens
            return [[token] * tokens for _ in prompts]

        return answer

    ways = {"off": way("off", 1), "tree": way("tree", 1), "eager": way("eager", 2)}
    groups = [[[5]], [[6]], [[7]]]
    heard: list[int] = []
    found = versus_gpu.compared(3, ways, groups, lambda so_far: heard.append(len(so_far)))
    assert asked[:14].count("tree") == 6, "own ways warm up on every group, for one token and all"
    assert asked[:14].count("eager") == 2, "peers on one"
    assert asked[14::9] == ["off", "tree"], "another one goes first in each group"
    assert [found[name].equal for name in ways] == [2, 2, 0]
    assert all(len(one.rates) == 2 for one in found.values())
    assert heard == [3, 3], "figures are there after every group"


def test_a_way_warms_up_until_it_records_nothing_and_tells_what_it_recorded_later(
    clock: Still,
) -> None:
    import versus_gpu

    made = 0

    def way(prompts: Any, tokens: int) -> list[list[int]]:
        nonlocal made
        clock.now += tokens
        made += prompts == [[6]] and tokens == 3 and made < 3
        return [[1] * tokens for _ in prompts]

    groups = [[[5]], [[6]]]
    counts = {"tree": lambda: made}
    found = versus_gpu.compared(3, {"tree": way}, groups, recorded=counts)
    assert made == 3 and "recorded_meanwhile" not in found["tree"].figures()
    made = 0
    found = versus_gpu.compared(
        3, {"tree": way}, groups, limits=versus_gpu.Limits(passes=2), recorded=counts
    )
    assert found["tree"].figures()["recorded_meanwhile"] == 1


def test_a_group_that_tells_nothing_of_the_rest_is_counted_and_has_no_rate(clock: Still) -> None:
    import versus_gpu

    took = {(5, 1): 2.0, (5, 11): 7.0, (6, 1): 2.0, (6, 11): 1.0}

    def way(prompts: Any, tokens: int) -> list[list[int]]:
        clock.now += took[prompts[0][0], tokens]
        return [[1] * tokens for _ in prompts]

    found = versus_gpu.Found()
    for prompt in (5, 6):
        found.add(way, [[prompt]], 11)
    figures = found.figures()
    assert (figures["tokens_per_second"], figures["by_group"]) == (2.0, [2.0, None])
    assert figures["unclear"] == 1
    assert found.over(versus_gpu.Found(rates=[1.0, 1.0])) == 2.0
    assert versus_gpu.Found(rates=found.rates[1:]).over(found) is None


def test_two_ways_are_set_beside_each_other_where_both_have_answered() -> None:
    import versus_gpu

    own = versus_gpu.Found(rates=[20.0, 40.0, 400.0])
    peer = versus_gpu.Found(rates=[10.0, 10.0])
    assert own.over(peer) == 3 and peer.over(own) == pytest.approx(1 / 3)


def test_peers_answer_as_few_groups_as_they_are_asked_to_and_nobody_any_when_it_is_late(
    clock: Still,
) -> None:
    import versus_gpu

    def way(prompts: Any, tokens: int) -> list[list[int]]:
        clock.now += tokens
        return [[1] * tokens for _ in prompts]

    groups = [[[n]] for n in range(9)]
    limits = versus_gpu.Limits(peer_groups=2)
    found = versus_gpu.compared(3, {"off": way, "eager": way}, groups, limits=limits)
    assert [len(found[name].rates) for name in ("off", "eager")] == [8, 2]
    assert [found[name].answers for name in ("off", "eager")] == [8, 2]
    limits = versus_gpu.Limits(late=lambda: True)
    found = versus_gpu.compared(3, {"off": way}, groups, limits=limits)
    assert len(found["off"].rates) == 1, "one is answered, or there was nothing to warm up for"


def test_a_way_that_fails_leaves_the_others_alone(clock: Still) -> None:
    import versus_gpu

    def sound(prompts: Any, tokens: int) -> list[list[int]]:
        clock.now += tokens
        return [[1] * tokens for _ in prompts]

    def broken(prompts: Any, tokens: int) -> list[list[int]]:
        if prompts == [[7]]:
            raise RuntimeError("no room")
        return sound(prompts, tokens)

    ways, groups = {"off": sound, "static": broken}, [[[5]], [[6]], [[7]]]
    found = versus_gpu.compared(3, ways, groups)
    assert "failed" not in found["off"].figures() and len(found["off"].rates) == 2
    figures = found["static"].figures()
    assert figures["failed"] == "RuntimeError: no room" and len(figures["by_group"]) == 1

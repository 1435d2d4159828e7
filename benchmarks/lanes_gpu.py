"""How many lanes of a warp do work: counters of select, accept and attention, and their code.

    python benchmarks/lanes_gpu.py --out lanes.json
    python benchmarks/lanes_gpu.py --code --out code.json

Runs this file again below Nsight Compute (`ncu`), which must be there and must be allowed to read
the counters; where it is not, the script says what it answered, writes what the machine code tells,
and leaves with code 2. `lanes` is thread instructions that were executed with their predicate on
over 32 for each instruction issued: masks are predicates in Triton, so the plain ratio reads 32 for
nearly any kernel and stands beside it. Every kernel is launched a few times, and medians count. The
machine code of each kernel is looked through for votes, shuffles and backward branches; `--code`
does that alone, and without a GPU too, for which kernels are compiled as for an H200.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from gpu_cases import case, pool_of, proposal
from gpu_report import CannotRun, Report, asked_of, begin, parser_of
from gpu_tools import Launch, counted, median_of
from targets import OWN, SPECS

from furcate.kernels.backend import Kernels, kernels_of
from furcate.kernels.tree_attention import Keys, behind

WANTED = 0.96  # of the lanes
ROWS = (32, 64)
CONTEXT = 2048
COUNTERS = {
    "smsp__thread_inst_executed_pred_on_per_inst_executed.ratio": "predicated_on",
    "smsp__thread_inst_executed_per_inst_executed.ratio": "executed",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory_percent",
    "gpu__time_duration.sum": "nanoseconds",
}
MORE = {  # named otherwise by some versions: asked for apart
    "smsp__sass_average_branch_targets_threads_uniform.pct": "uniform_branches_percent",
    "launch__registers_per_thread": "registers",
}
JOIN = "_join"  # follows an attention whose columns are shared
STARTS = {"select": "_select", "accept": "_accept", "attention": "_attend"}
MODULES = {
    "select": "furcate.kernels.select_triton",
    "accept": "furcate.kernels.accept_triton",
    "attention": "furcate.kernels.tree_attention_triton",
}
REPEATS = 3  # launches of each; the median counts
SECONDS = 200  # most of one run below ncu


@dataclass(frozen=True)
class Shot:
    """One launch that is looked at."""

    kernel: str
    shape: str
    batch: int
    rows: int

    @property
    def name(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "shape": self.shape, "batch": self.batch, "rows": self.rows}


def shots() -> list[Shot]:
    """In the order in which they are launched."""
    found = [Shot(k, "any", b, n) for k in ("select", "accept") for b in (1, 32) for n in ROWS]
    return found + [Shot("attention", s, 1, n) for s in (OWN, "llama-8b") for n in ROWS]


def call_of(shot: Shot, kernels: Kernels, device: torch.device, length: int) -> Callable[[], Any]:
    """Its launch, all inputs made, behind so many tokens."""
    batch, rows = shot.batch, shot.rows
    if shot.kernel == "select":
        pool = proposal(batch, 4 * rows, device)
        root_B = torch.zeros(batch, dtype=torch.int64, device=device)
        allowance_B = torch.full_like(root_B, rows)
        return lambda: kernels.select(pool, root_B, rows, allowance_B)
    made = case(batch, length, rows, device)
    if shot.kernel == "accept":
        choice_BR = made.draft.tokens_BR.roll(-1, 1).contiguous()
        depth = int(made.draft.depth_BR.max())
        broken_BR = torch.zeros_like(choice_BR, dtype=torch.bool)
        return lambda: kernels.accept(made.draft, choice_BR, depth, broken_BR)
    spec = SPECS[shot.shape]
    size, dtype = (spec.num_kv_heads, spec.head_dim), torch.bfloat16
    keys = Keys(*(pool_of(made, size, dtype) for _ in "kv"))
    q_THD = torch.randn(batch * rows, spec.num_heads, spec.head_dim, device=device, dtype=dtype)
    sight = behind(made.places, made.draft.end_BR, made.draft.live_B)
    look = kernels.look(sight, spec.num_heads // spec.num_kv_heads, dtype)
    return lambda: look(q_THD, keys)


@torch.inference_mode()
def launch(device: torch.device) -> None:
    """What is run below ncu: each shot once to be compiled, and a few times while it looks."""
    torch.manual_seed(0)
    kernels, length = kernels_of(device), CONTEXT if device.type == "cuda" else 16
    calls = [call_of(shot, kernels, device, length) for shot in shots()]
    for call in calls:
        call()
    if device.type != "cuda":
        return
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for call in calls:
        for _ in range(REPEATS):
            call()
            torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def counted_of(counters: dict[str, str], *, tiny: bool) -> list[Launch]:
    """Our launches with these counters; raises CannotRun or RuntimeError."""
    command = [sys.executable, __file__, "--launch", *["--tiny"] * tiny]
    return counted(command, counters, "|".join((*STARTS.values(), JOIN)), SECONDS)


def rows_of(launches: Sequence[Launch], counters: dict[str, str]) -> list[dict[str, Any]]:
    """The median of each shot's launches; each begins with a kernel that is no join.

    Raises RuntimeError where launches are missing.
    """
    starts = [one for one in launches if not one.function.startswith(JOIN)]
    for kernel, function in STARTS.items():
        seen = sum(one.function.startswith(function) for one in starts)
        wanted = REPEATS * sum(shot.kernel == kernel for shot in shots())
        if seen != wanted:
            raise RuntimeError(f"ncu saw {seen} launches of {function}, and {wanted} were made")
    order = iter([shot for shot in shots() for _ in range(REPEATS)])
    found: dict[tuple[Shot, str], list[Launch]] = {}
    shot = None
    for one in launches:
        shot = shot if one.function.startswith(JOIN) else next(order)
        if shot is None:
            raise RuntimeError("ncu saw a join before any attention")
        found.setdefault((shot, one.function), []).append(one)
    return [
        {
            **shot.name,
            "function": function,
            "launches": len(group),
            **{n: median_of(one.figures.get(c) for one in group) for c, n in counters.items()},
        }
        for (shot, function), group in found.items()
    ]


def lanes(*, tiny: bool) -> Iterator[dict[str, Any]]:
    """All shots, each with its share of the lanes."""
    for row in rows_of(counted_of(COUNTERS, tiny=tiny), COUNTERS):
        on = row["predicated_on"]
        share = None if on is None else on / 32
        told = {**row, "lanes": share}
        if share is not None and not row["function"].startswith(JOIN):
            told["enough"] = share >= WANTED
        yield told


def code(kernel: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """What a kernel's launches were compiled to, each variant once; on a CPU nothing is launched.

    Needs triton, which machines without a GPU need not have.
    """
    kernels = import_module("furcate.kernels.backend_triton").TRITON
    module, function = MODULES[kernel], STARTS[kernel]
    with torch.inference_mode():
        for shot in shots():
            if shot.kernel == kernel:
                call_of(shot, kernels, device, CONTEXT)()
    compiled = getattr(import_module(module), function)
    at = import_module("triton.runtime").driver.active.get_current_device()
    for made in compiled.device_caches[at][0].values():
        yield {
            "function": function,
            "warps": made.metadata.num_warps,
            "shared_bytes": made.metadata.shared,
            **resources(dumped(made.asm["cubin"], "-res-usage")),
            **operations(dumped(made.asm["cubin"], "-sass")),
        }


def dumped(cubin: bytes, what: str) -> str:
    """By the cuobjdump on the path, or the one that comes with triton."""
    triton = Path(str(import_module("triton").__file__)).parent
    tool = shutil.which("cuobjdump") or str(triton / "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = [tool, what, file.name]
        return subprocess.run(told, check=True, capture_output=True, text=True).stdout


def resources(usage: str) -> dict[str, int]:
    """Registers of a thread, and bytes of its own that do not fit into them."""
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return {"registers": found["REG"], "stack_bytes": found["STACK"] + found["LOCAL"]}


def operations(sass: str) -> dict[str, int]:
    """Shuffles, votes, warp-wide sums, matrix products, and branches that go back: loops."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)([^;]*);", sass)
    kinds = Counter(operation.split(".")[0] for _, operation, _ in lines)
    back = 0
    for at, operation, rest in lines:
        goal = re.search(r"0x([0-9a-f]+)", rest)
        if operation.split(".")[0] == "BRA" and goal is not None:
            back += int(goal[1], 16) < int(at, 16)  # not the one to itself behind the end
    names = (
        "SHFL",
        "VOTE",
        "VOTEU",
        "REDUX",
        "MATCH",
        "HGMMA",
        "HMMA",
        "FFMA",
        "BAR",
        "LDL",
        "STL",
    )
    return {"instructions": len(lines), "loops": back} | {name: kinds[name] for name in names}


def main() -> None:
    """Print one JSON object."""
    parser = parser_of(__doc__)
    parser.add_argument("--launch", action="store_true", help="what is run below ncu")
    parser.add_argument("--code", action="store_true", help="the machine code alone")
    parser.add_argument("--kernels", nargs="+", default=list(STARTS), choices=STARTS, help="of it")
    if "--code" in sys.argv and not torch.cuda.is_available():
        import_module("no_device").absent()
        asked, device = parser.parse_args(), torch.device("cpu")
    else:
        asked, device = asked_of(parser, {})
    if asked.launch:
        launch(device)
        return
    what = "lanes at work in select, accept and attention, by ncu; their machine code"
    if asked.code:
        what = "machine code of select, accept and attention, compiled for compute capability 9.0"
    report = Report.of("lanes_gpu.py", what, device, asked)
    if not asked.code:
        report.note(wanted=WANTED, counters={**COUNTERS, **MORE})
        count(report, tiny=asked.tiny)
    if device.type == "cuda" or asked.code:
        read_code(report, asked.kernels, device)
    sys.exit(report.close() if asked.code else not any("lanes" in row for row in report.rows))


def count(report: Report, *, tiny: bool) -> None:
    """Counters of all shots; where nothing can be counted the machine code is all there is."""
    try:
        report.run({"row": "lanes"}, lambda: list(lanes(tiny=tiny)))
        report.run({"row": "more counters"}, lambda: rows_of(counted_of(MORE, tiny=tiny), MORE))
    except CannotRun as fault:
        report.note(not_counted=str(fault))
        if torch.cuda.is_available():
            read_code(report, list(STARTS), torch.device("cuda"))
        report.close()
        raise


def read_code(report: Report, kernels: Sequence[str], device: torch.device) -> None:
    """Rows of the machine code of each kernel."""
    for kernel in kernels:
        report.run({"row": "code", "kernel": kernel}, lambda k=kernel: code(k, device))


if __name__ == "__main__":
    begin(main)

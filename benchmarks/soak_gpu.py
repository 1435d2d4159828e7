"""Runs an engine for long: memory before and after, waits for the device, and moves of keys.

    python benchmarks/soak_gpu.py --out soak.json

`memory`: requests of all kinds come and go (prompts, answers and laws of all lengths, some
aborted); each law has a stretch of them, as a server sees whose users are many and whose programs
are few. Trees are always as large as they may be, which is when most is held, and is recorded in
few kinds of rounds. The most that tensors ever held must be no more than five per cent above what
the engine said it would hold: weights, pages of keys, workspace and recordings
(`Engine.backend()["memory"]`). From the first fifth of the requests to the end it must hold the
same; what is recorded meanwhile counts.
Once `--memory-seconds` are over no further request comes, and the row says how many there were.
`waits`: recorded rounds are played while torch treats every wait for the device as an error.
`moves`: the accepted path's keys are put in place for every path of random trees, a batch at a
time, and each must equal the torch reference bit for bit.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from forced import Drive, Sizes, built_of
from gpu_cases import case
from gpu_report import Report, asked_of, begin, parser_of
from kernels_bench import Bench
from targets import OWN, PAGE, SPECS, Target, target_of

from furcate.config import SamplingParams
from furcate.engine.engine import Engine
from furcate.engine.graphs import CudaRecorder, Graphs
from furcate.kernels.backend import kernels_of
from furcate.kernels.draft import Draft, Verdict
from furcate.kernels.kv_move import move_path
from furcate.models.spec import DecoderSpec

PARTS = ("memory", "waits", "moves")
OWN_WAYS = ("off", "ngram", "eagle3", "mtp", "medusa", "hybrid")
LAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
    {"temperature": 0.7, "repetition_penalty": 1.2, "logit_bias": {7: 2.0}},
    {"temperature": 1.0, "logprobs": True, "top_logprobs": 3},
)
AT_ONCE = 24  # requests that are open together
STRETCH = 40  # requests of one law, one behind the other
MOST_OVER = 1.05  # of what was stated
GROWTH = 256 << 10  # bytes from the first fifth on: a few kilobytes for each further recording


@dataclass(frozen=True)
class Soak:
    """What `memory` asks of an engine."""

    target: str
    drafter: str
    requests: int
    seconds: float  # no request comes after so many


def memory(soak: Soak, device: torch.device) -> dict[str, Any]:
    """What an engine holds, by torch's count and by the driver's."""
    before = _held(device)
    context = 1024 if device.type == "cuda" else 96
    options: dict[str, Any] = {
        "max_batch": 8,
        "max_context": context,
        "kv_tokens": 8 * context,
    }
    if soak.drafter != "off":
        nodes = 31 if device.type == "cuda" else 7
        options["draft"] = {"adaptive": False, "num_draft_tokens": nodes}
    end = time.monotonic() + soak.seconds
    with Engine.load(soak.target, soak.drafter, device=device.type, **options) as engine:
        stated = engine.backend()["memory"]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        few = min(soak.requests, STRETCH * len(LAWS))
        warm = traffic(engine, few, device, end)  # the kinds of rounds are recorded
        seen = traffic(engine, soak.requests, device, end)
        peak = _peak(device)
        backend = engine.backend()
    row = {
        "requests": seen.requests,
        "wanted": soak.requests,
        "seconds_to_record": warm.seconds,
        "seconds_of_traffic": seen.seconds,
        "held": seen.held,
        "sound": seen.requests == soak.requests,
    }
    if stated is None:
        return row  # nobody counts on a CPU
    most = {name: peak[name] - before[name] for name in peak}
    most["device"] = seen.held[-1]["device"] - before["device"]
    verdict = judged(stated, most, seen.held)
    sound = row["sound"] and verdict["sound"]
    return row | verdict | {"sound": sound, "stated_bytes": stated, "backend": backend}


def judged(
    stated: dict[str, int], most: dict[str, int], held: list[dict[str, int]]
) -> dict[str, Any]:
    """Whether an engine holds what it said, and goes on holding it.

    Args:
        stated: bytes by what they are for, and their `total`.
        most: bytes ever held: `allocated` by tensors, `reserved` in torch's pools, and of the
            `device` at the end.
        held: the same, and `recordings`, as time goes on.
    """
    grown = {name: held[-1][name] - held[0][name] for name in (*most, "recordings")}
    within = most["allocated"] <= MOST_OVER * stated["total"]
    still = len(held) > 1 and grown["allocated"] <= GROWTH
    return {
        "peak_allocated_bytes": most["allocated"],
        "stated_total_bytes": stated["total"],
        "most_over_stated": MOST_OVER,
        **{f"{name}_over_stated": most[name] / stated["total"] for name in most},
        "grown": grown,
        "within_stated": within,
        "holds_still": still,
        "sound": within and still,
    }


@dataclass(frozen=True)
class Seen:
    """What came of requests, and what was held after each fifth of them."""

    requests: int
    seconds: float
    held: list[dict[str, int]]


def traffic(engine: Engine, requests: int, device: torch.device, end: float = float("inf")) -> Seen:
    """Requests until `end`, by `time.monotonic`; the fifth that it meets is cut short."""
    rng = random.Random(5)
    began, asked = time.perf_counter(), 0
    held: list[dict[str, int]] = []
    for fifth in range(5):
        open_: list[str] = []
        for number in range(fifth * requests // 5, (fifth + 1) * requests // 5):
            if time.monotonic() >= end:
                break
            asked += 1
            law = number // min(STRETCH, requests // len(LAWS)) % len(LAWS)
            open_.append(engine.submit(*_request(engine, rng, number, LAWS[law])))
            if number % 17 == 0:
                engine.next_piece(open_[-1])
                engine.abort(open_.pop())
            if len(open_) == AT_ONCE:
                engine.collect(open_.pop(0))
        for request_id in open_:
            engine.collect(request_id)
        held.append(_held(device) | {"recordings": len(engine.built.player.played.recorded)})
        taken = time.perf_counter() - began
        sys.stderr.write(f"{taken:6.1f} s: {asked} requests, holding {held[-1]}\n")
    return Seen(asked, time.perf_counter() - began, held)


def _request(
    engine: Engine, rng: random.Random, number: int, law: dict[str, Any]
) -> tuple[list[int], SamplingParams]:
    words, context = min(4000, engine.built.limits.vocab), engine.built.limits.context
    prompt = [rng.randrange(3, words) for _ in range(rng.randint(1, context * 2 // 5))]
    prompt += prompt[-rng.randint(1, 60) :] * rng.randint(0, 3)  # n-grams to be found
    params = SamplingParams(
        max_tokens=rng.randint(1, context // 10),
        ignore_eos=number % 3 > 0,
        seed=number,
        **law,
    )
    return prompt[: context * 3 // 5], params


def _held(device: torch.device) -> dict[str, int]:
    """Bytes: of tensors, of torch's pools, of the whole device."""
    if device.type != "cuda":
        return {"allocated": 0, "reserved": 0, "device": 0}
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "device": total - free,
    }


def _peak(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {"allocated": 0, "reserved": 0}
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
    }


class AllowedToWait(CudaRecorder):
    """A recorder whose one wait, for a round's outcome, is no error."""

    def fetch(self, staged: torch.Tensor, device: torch.Tensor) -> Callable[[], None]:
        wait = super().fetch(staged, device)

        def allowed() -> None:
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("default")
            wait()
            torch.cuda.set_sync_debug_mode(before)

        return allowed


@contextmanager
def waiting_is_an_error(device: torch.device) -> Iterator[None]:
    """Torch raises where a call waits for the device by itself."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@torch.inference_mode()
def waits(target: Target, drafter: str, rounds: int, device: torch.device) -> dict[str, Any]:
    """Rounds replayed, and rounds launched, up to the wait for a round's result."""
    on_gpu = device.type == "cuda"
    sizes = Sizes(batch=2, context=700, nodes=31 if on_gpu else 7)
    built = built_of(target, drafter, sizes)
    player = Graphs(built.round, AllowedToWait()) if on_gpu else built.player
    drive = Drive(replace(built, player=player), sizes, 100)
    rows = built.round.most_nodes + 1
    drive.stand(rows, 1)
    batch = drive.asked(rows)
    on_device = batch.on(device)
    drive.rewind()
    built.round.play(on_device)
    if on_gpu:
        torch.cuda.synchronize()
    with waiting_is_an_error(device):
        for _ in range(rounds):
            drive.rewind()
            player.launch(batch)()
            drive.rewind()
            built.round.play(on_device)
        sound = not on_gpu or _caught(on_device.slot_B[0].item)
    played = player.played.as_json()
    sound = sound and not played["refused"]
    return {"rounds": rounds, "rows": rows, "sound": sound, **played}


def _caught(call: Callable[[], Any]) -> bool:
    """The check can fail: reading a value is an error meanwhile."""
    try:
        call()
    except RuntimeError:
        return True
    return False


@torch.inference_mode()
def moves(bench: Bench, spec: DecoderSpec, batch: int, rows: int, trees: int) -> dict[str, Any]:
    """All paths of random trees, each request of a batch another one at a time."""
    paths = wrong = moved = 0
    for _ in range(trees):
        made = case(batch, 3 * PAGE + 5, rows, bench.device)
        size = (spec.num_layers, made.slots, spec.num_kv_heads, spec.head_dim)
        old = (bench.random(*size), bench.random(*size))
        slot_BR = made.slot_BR
        for step in range(rows):
            verdict = _to(made.draft, (step + torch.arange(batch)) % rows)
            ours, theirs = (tuple(pool.clone() for pool in old) for _ in "ab")
            bench.kernels.move_path((ours[0], ours[1]), slot_BR, verdict)
            move_path(theirs, slot_BR, verdict)
            same = all(_bits_equal(a, b) for a, b in zip(ours, theirs, strict=True))
            paths, wrong = paths + batch, wrong + (not same)
            moved += not all(_bits_equal(a, b) for a, b in zip(ours, old, strict=True))
    return {"paths": paths, "wrong": wrong, "calls_that_moved": moved, "sound": wrong == 0 < moved}


def _to(draft: Draft, goal_B: torch.Tensor) -> Verdict:
    """The verdict that accepts the path to this row of each tree."""
    parents, depths = draft.parent_BR.tolist(), draft.depth_BR.tolist()
    deepest = max(1, *map(max, depths))
    paths, counts = [], []
    for b, goal in enumerate(goal_B.tolist()):
        path, row = [goal], goal
        while row:
            row = parents[b][row]
            path.append(row)
        path.reverse()
        counts.append(len(path))
        paths.append(path + path[-1:] * (deepest + 1 - len(path)))
    path_BD = torch.tensor(paths, device=draft.parent_BR.device)
    count_B = torch.tensor(counts, device=path_BD.device)
    return Verdict(path_BD, path_BD, count_B, count_B - 1)


def _bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    whole = {2: torch.int16, 4: torch.int32}[one.itemsize]
    return torch.equal(one.view(whole), other.view(whole))


def main() -> None:
    """Print one JSON object; exit with 1 if anything is wrong."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--target", default=OWN)
    parser.add_argument("--drafters", nargs="+", default=list(OWN_WAYS), choices=OWN_WAYS)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--memory-seconds", type=float, default=150)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--trees", type=int, default=16)
    parser.add_argument("--soak-drafter", default="hybrid", choices=OWN_WAYS, help="of `memory`")
    tiny = {"drafters": ["ngram"], "requests": 5, "rounds": 2, "trees": 1, "soak_drafter": "ngram"}
    asked, device = asked_of(parser, tiny)
    if min(asked.requests, asked.rounds, asked.trees) < 1 or asked.requests < 5:
        parser.error("at least 5 requests, a round and a tree")
    torch.manual_seed(0)
    report = Report.of("soak_gpu.py", "an engine at work for long", device, asked)
    if "memory" in asked.only:
        soak = Soak(asked.target, asked.soak_drafter, asked.requests, asked.memory_seconds)
        report.run(
            {"part": "memory", "drafter": asked.soak_drafter},
            lambda: memory(soak, device),
        )
    if "waits" in asked.only:
        target = target_of("tiny" if asked.tiny else asked.target, device)
        for drafter in asked.drafters:
            report.run(
                {"part": "waits", "drafter": drafter},
                lambda d=drafter: waits(target, d, asked.rounds, device),
            )
    shapes = (("tiny", 2, 9),) if asked.tiny else ((OWN, 8, 64), ("llama-8b", 8, 64), (OWN, 3, 33))
    for shape, batch, rows in shapes if "moves" in asked.only else ():
        bench = Bench(kernels_of(device), device, torch.bfloat16, {})
        report.run(
            {"part": "moves", "shape": shape, "batch": batch, "rows": rows},
            lambda b=bench, s=shape, batch=batch, rows=rows: moves(
                b, SPECS[s], batch, rows, asked.trees
            ),
        )
    sys.exit(report.close())


if __name__ == "__main__":
    begin(main)

"""Times whole rounds on a GPU: where a round's time goes, and milliseconds per token.

    python benchmarks/round_gpu.py --out round.json
    python benchmarks/round_gpu.py --shapes llama-8b --batches 1 --drafters off eagle3@5 --nodes 63

SmolLM2-135M with its own weights and heads, and a target of Llama-8B's sizes with random weights.
Acceptance is forced: the last norm of every target is set to zero, so that all scores are equal and
the choice is token 0, whatever rounds how; and the tree's likeliest path is set to what plain
decoding said before, as far as `--accept` levels, while the drafter does all its work. So figures
are of speed alone, and each of them says that it was forced. Every request of a batch is the same,
greedy. Rounds are driven without tokenizer, scheduler and text, which `furcate bench` measures too.
Plain decoding and the tree take turns, twice each. "eagle3@5" drafts five levels. For each a
waterfall says what the stages take by themselves, and which kernels the time goes to in a whole
round, in a plain pass, in scoring the tree and in drafting the next one.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from floors import Floor, floor_of
from forced import Drive, Forced, Sizes, built_of, median
from gpu_report import Report, asked_of, begin, parser_of
from gpu_timing import ceilings, timed
from targets import OWN, SPECS, Target, target_of

from furcate.drafters.make import kernels_in
from furcate.engine.build import Built
from furcate.engine.report import backend_json
from furcate.engine.round import Batch, Round
from furcate.engine.target import Span
from furcate.kernels.draft import Draft, Verdict
from furcate.verify.coupled import verify

SHOWN = 24  # kernels by name
WATCHED = ("whole round", "plain pass", "verify", "draft")  # stages whose kernels are told apart
MOST_OVER = 1.15  # a kernel that is watched alone may take a little longer than in a recording
TURNS = 2  # of plain decoding and the tree, one after the other


@dataclass(frozen=True)
class Plan:
    """What is run for every combination of shape, drafter, batch, and graphs on or off."""

    device: torch.device
    prompt: int
    tokens: int
    accept: int
    nodes: int

    def sizes(self, batch: int) -> Sizes:
        """Of the requests."""
        context = self.prompt + self.tokens + 2 * self.nodes + 16
        return Sizes(batch, context, self.nodes)


@dataclass(frozen=True)
class Played:
    """What came of one combination, and its rounds, to be taken apart."""

    figures: dict[str, Any]
    built: Built
    rows: int


def alone(target: Target, plan: Plan, batch: int, graphs: bool) -> Played:
    """Plain decoding; the first run only warms up."""
    plain = built_of(target, "off", plan.sizes(batch), graphs=graphs)
    _played(plain, plan, batch, 1)
    _, times = _played(plain, plan, batch, 1)
    return Played({"plain_ms_per_token": median(times), **backend_json(plain)}, plain, 1)


def against(target: Target, kind: str, plan: Plan, batch: int, graphs: bool) -> Played:
    """A drafter's rounds beside plain ones; the first run of each only warms up."""
    sizes = plan.sizes(batch)
    plain = built_of(target, "off", sizes, graphs=graphs)
    told, _ = _played(plain, plan, batch, 1)
    inner = target.drafter(kind, sizes.context + sizes.nodes + 1, batch)
    forced = Forced(inner, plan.accept, sizes.context, plan.device)
    forced.token_W[: plan.prompt] = plain.round.state.tokens_CW[0, : plan.prompt]
    forced.token_W[plan.prompt : plan.prompt + len(told)] = torch.tensor(told, device=plan.device)
    built = built_of(target, forced, sizes, graphs=graphs)
    rows = built.round.most_nodes + 1
    _played(built, plan, batch, rows)
    plain_times: list[float] = []
    times: list[float] = []
    tokens: list[int] = []
    for _ in range(TURNS):
        plain_times += _played(plain, plan, batch, 1)[1]
        tokens, more = _played(built, plan, batch, rows)
        times += more
    per_round = len(tokens) * TURNS / len(times)
    plain_ms, ms = median(plain_times), median(times)
    beneath = kernels_in(forced.inner)
    figures = {
        "plain_ms_per_token": plain_ms,
        "draft_levels": forced.inner.depth,
        **backend_json(built),
        "draft_kernels": None if beneath is None else beneath.name,
        "draft_kernels_why": None if beneath is None else beneath.why,
        "forced_levels": plan.accept,
        "rows": rows,
        "tokens_per_round": per_round,
        "ms_per_round": ms,
        "ms_per_token": ms / per_round,
        "speedup": plain_ms * per_round / ms,
        "sound": tokens[: len(told)] == told[: len(tokens)],  # the tokens of plain decoding
    }
    return Played(figures, built, rows)


def stages_of(drive: Drive, rows: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Each stage by itself, at the prompt's end; nothing is committed there.

    `bookkeeping` is what a tree costs beside drafting and scoring: select, the walk, the commit and
    the move of keys. `plain pass` is the target over one row a request, which `verify` is beside.
    """
    round_ = drive.round
    batch = drive.asked(rows).on(device)
    round_.state.finish_C[: drive.batch] = 1  # no room: lengths stay as they are
    found = round_.state.entries(batch.slot_B)
    view = round_.state.seen(found, batch.columns, batch.needs)
    draft = round_._draft(found, batch)
    scored = round_.target.score(view, draft, Span(batch.columns - 1))
    law_rows = round_._rows(view, draft, scored)
    verified = verify(scored.logits_BRV, view.law, law_rows, round_.kernels)
    choice_BR = draft.tokens_BR.roll(-1, 1).contiguous()
    broken_BR = torch.zeros_like(choice_BR, dtype=torch.bool)

    def settle(of: Draft, verdict: Verdict) -> None:
        gains = round_.most_nodes  # the proposals stay
        settled = round_.state.commit(found, of, verdict, needs=batch.needs, gains=gains)
        if rows > 1:
            round_.target.cache.move(scored.slot_BR, replace(verdict, count_B=settled.count_B))

    def commit() -> None:
        settle(draft, verified.verdict)
        round_.drafter.learn(view, draft, verified.verdict, scored.features_BRF)

    def bookkeeping() -> None:
        made = round_._draft(found, batch)
        settle(made, round_.kernels.accept(made, choice_BR, law_rows.depth, broken_BR))

    return {
        "draft": lambda: round_.propose(batch),
        "select": lambda: round_._draft(found, batch),
        "verify": lambda: round_.target.score(view, draft, Span(batch.columns - 1)),
        "accept": lambda: verify(scored.logits_BRV, view.law, law_rows, round_.kernels),
        "commit": commit,
        "bookkeeping": bookkeeping,
        "plain pass": lambda: _plain_pass(round_, batch),
        "whole round": lambda: round_.play(batch),
    }


def waterfall(
    stages: Mapping[str, Callable[[], Any]], levels: int, device: torch.device
) -> dict[str, float]:
    """Milliseconds of each stage, recorded as a graph of its own without the host."""
    found = {name: timed(stage, device).ms for name, stage in stages.items()}
    found["verify_over_plain"] = found["verify"] / found["plain pass"]
    if levels:
        found["draft_level_us"] = 1e3 * found["draft"] / levels
    return found


def launches(stage: Callable[[], Any], device: torch.device, recorded_ms: float) -> dict[str, Any]:
    """Kernels and copies of a stage that is launched: how many, and their time by name.

    On a CPU torch's outermost calls stand for kernels.
    """
    on_gpu = device.type == "cuda"
    stage()
    kind = torch.profiler.ProfilerActivity
    if on_gpu:
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=[kind.CUDA if on_gpu else kind.CPU]) as seen:
        stage()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    spans = [
        (one.name, one.time_range.start, one.time_range.end)
        for one in seen.events() or ()
        if one.device_type == wanted and (on_gpu or one.cpu_parent is None)
    ]
    # being watched costs a CPU what it costs
    return by_name(spans, recorded_ms * 1e3, MOST_OVER if on_gpu else float("inf"))


def by_name(
    spans: Sequence[tuple[str, float, float]], whole_us: float, most_over: float = MOST_OVER
) -> dict[str, Any]:
    """How often and how long each kernel ran, out of (name, start, end) in microseconds.

    `us_by_name` with `us_of_others` adds up to `us_of_kernels`, and with the gaps between kernels,
    less what ran side by side, to `us_launched`. It is sound if kernels were seen and do not take
    longer than what was recorded, which has the same ones and next to no gaps.
    """
    count: Counter[str] = Counter()
    us: Counter[str] = Counter()
    busy, last = 0.0, float("-inf")
    for name, start, end in sorted(spans, key=lambda span: span[1:]):
        count[name[:60]] += 1
        us[name[:60]] += end - start  # type: ignore[assignment]
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    shown = us.most_common(SHOWN)
    total = sum(us.values())
    began = min((start for _, start, _ in spans), default=0.0)
    span = last - began if spans else 0.0
    return {
        "kernels": count.total(),
        "by_name": {name: count[name] for name, _ in shown},
        "us_by_name": {name: round(value, 2) for name, value in shown},
        "us_of_others": round(total - sum(value for _, value in shown), 2),
        "us_of_kernels": round(total, 2),
        "us_of_gaps": round(span - busy, 2),
        "us_side_by_side": round(total - busy, 2),
        "us_launched": round(span, 2),
        "us_recorded": round(whole_us, 2),
        "kernels_over_recorded": total / whole_us,
        "sound": bool(spans) and total <= whole_us * most_over,
    }


def _plain_pass(round_: Round, batch: Batch) -> None:
    """The target over one row a request: what a tree of many rows is compared with."""
    one = replace(batch, rows=1)
    found = round_.state.entries(one.slot_B)
    view = round_.state.seen(found, one.columns, one.needs)
    round_.target.score(view, round_._draft(found, one), Span(one.columns - 1))


def _played(built: Built, plan: Plan, batch: int, rows: int) -> tuple[list[int], list[float]]:
    """One run over the answer."""
    return Drive(built, plan.sizes(batch), plan.prompt).run(rows, plan.tokens)


@dataclass(frozen=True)
class Combination:
    """One of those that are measured."""

    target: Target
    drafter: str
    batch: int
    graphs: bool

    @property
    def name(self) -> dict[str, Any]:
        """What all its rows begin with."""
        return {
            "target": self.target.name,
            "drafter": self.drafter,
            "batch": self.batch,
            "graphs_asked": self.graphs,
        }

    def rows(self, plan: Plan, top: dict[str, float]) -> Iterator[dict[str, Any]]:
        """Its speed with the floor beneath it; then the stages; then what is launched."""
        asked = (plan, self.batch, self.graphs)
        if self.drafter == "off":
            played = alone(self.target, *asked)
        else:
            played = against(self.target, self.drafter, *asked)
        spec, context = self.target.decoder.spec, plan.prompt + plan.tokens // 2
        floors = [floor_of(spec, self.batch, context, n, Floor.of(top)) for n in (1, played.rows)]
        floor = {"plain_floor_ms": floors[0], "verify_floor_ms": floors[1]}
        yield {"row": "speed", **played.figures, **floor}
        drive = Drive(played.built, plan.sizes(self.batch), plan.prompt)
        stages, levels = stages_of(drive, played.rows, plan.device), drive.round.drafter.depth
        taken = waterfall(stages, levels, plan.device)
        yield {"row": "waterfall", "rows": played.rows, "draft_levels": levels, **taken}
        for name in WATCHED if levels else WATCHED[:1]:
            yield {
                "row": "launches",
                "stage": name,
                **launches(stages[name], plan.device, taken[name]),
            }


@torch.inference_mode()
def main() -> None:
    """Print one JSON object."""
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=[OWN, "llama-8b"], choices=list(SPECS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--drafters", nargs="+", default=["off", "ngram", "eagle3"])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=31)
    parser.add_argument("--accept", type=int, default=4, help="levels that are right")
    parser.add_argument("--launched", action="store_true", help="without recorded rounds too")
    tiny = {"shapes": ["tiny"], "batches": [1, 3], "prompt": 40, "tokens": 20, "nodes": 7}
    asked, device = asked_of(parser, tiny)
    plan = Plan(device, asked.prompt, asked.tokens, asked.accept, asked.nodes)
    what = "rounds under forced acceptance; milliseconds are medians of the wall clock"
    report = Report.of("round_gpu.py", what, device, asked)
    top = ceilings(device, tiny=asked.tiny)
    report.note(**top, prompt=plan.prompt, tokens=plan.tokens)
    recorded = (True, False) if asked.launched else (True,)
    for name in asked.shapes:
        target = target_of(name, device)
        for batch in asked.batches:
            for kind in asked.drafters:
                for graphs in recorded:
                    one = Combination(target, kind, batch, graphs)
                    report.run(one.name, lambda one=one: one.rows(plan, top))
    sys.exit(report.close())


if __name__ == "__main__":
    begin(main)

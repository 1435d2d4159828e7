"""Tokens per second end to end: own plain decoding, own trees, transformers, and vLLM.

    python benchmarks/versus_gpu.py --out versus.json
    python benchmarks/versus_gpu.py --ways off eagle3 --peers static --batches 1 --tokens 128
    python benchmarks/versus_gpu.py --batches 1 --groups 10 --peer-groups 3 --peers eager static

All of them answer the same prompts with the same weights, greedily, and stop at the same number of
tokens. They take turns in every round of answers, and who goes first changes. Each is asked for one
token, twice, and for all of them: `tokens_per_second` are those between, so that scoring prompts
counts for nobody; `all_in` is the whole call. A group whose first token took as long as all of them
tells nothing of the rest and is counted as `unclear`. Our own ways warm up on all groups until they
record no further kind of round; `recorded_meanwhile` tells what was recorded all the same while
time was taken. "eager" is transformers' `generate` as it comes, "static" the
same with its static cache, which it compiles. vLLM runs in a process of its own if this Python has
it (or `--vllm-python` does); `missing` says which peers are not there, and why. Peers that are slow
may answer fewer groups (`--peer-groups`); two ways are set beside each other over the groups that
both have answered. A way that fails says so in its row, and the others go on; figures so far are
written after every group, as `running`, so that a run that is stopped has lost one group, and
`warm_up_seconds` tells where the rest of the time went. Once `--seconds` are over no further group
is answered, and no further batch. Of each tree's answers the figures say how many equal those of
own plain decoding: in bf16 a tie may fall otherwise. "eagle3@4" always drafts four levels; without
a number the engine chooses, and `mean_levels` says what it chose in the mean of all rounds, those
that only warm up included.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpu_report import Report, asked_of, begin, parser_of
from targets import OWN, drafts_of

from furcate.config import EngineOptions, SamplingParams
from furcate.engine.build import build, dtype_of
from furcate.engine.engine import Engine
from furcate.engine.outputs import Stats
from furcate.engine.prompts import read_prompts
from furcate.models.decoder import Decoder
from furcate.models.load import load_decoder
from furcate.models.zoo import resolve
from furcate.text.tokenizer import Tokenizer, load_tokenizer

ASKED = ("off", "ngram", "eagle3", "hybrid")
OWN_WAYS = ("off", "ngram", "eagle3", "mtp", "medusa", "hybrid")
PEERS = ("eager", "static", "vllm")
PROMPTS = Path(__file__).parent / "data" / "spec_bench_dev.jsonl"

Answers = list[list[int]]
Way = Callable[[Sequence[list[int]], int], Answers]
"""(prompts to be answered together, tokens of each answer) -> token ids."""


@dataclass
class Found:
    """What one way took, group by group."""

    rates: list[float] = field(default_factory=list)
    all_in: list[float] = field(default_factory=list)
    equal: int = 0
    answers: int = 0
    warm_up_seconds: float = 0.0
    unclear: int = 0
    recorded_meanwhile: int = 0
    failed: str | None = None

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """What goes wrong is a result of this way alone."""
        try:
            yield
        except Exception as fault:  # noqa: BLE001
            sys.stderr.write(traceback.format_exc())
            self.failed = f"{type(fault).__name__}: {fault}".splitlines()[0]

    def add(self, way: Way, prompts: Sequence[list[int]], tokens: int) -> Answers:
        """Answer a group; for the first token alone before and behind it."""
        _, before = _taken(way, prompts, 1)
        answers, seconds = _taken(way, prompts, tokens)
        _, behind = _taken(way, prompts, 1)
        rest = seconds - min(before, behind)
        self.unclear += rest <= 0
        self.rates.append(len(prompts) * (tokens - 1) / rest if rest > 0 else math.nan)
        self.all_in.append(len(prompts) * tokens / seconds)
        return answers

    def figures(self) -> dict[str, Any]:
        """Medians over groups."""
        why: dict[str, Any] = {"warm_up_seconds": round(self.warm_up_seconds, 1)}
        counts = {"unclear": self.unclear, "recorded_meanwhile": self.recorded_meanwhile}
        why |= {name: count for name, count in counts.items() if count}
        why |= {} if self.failed is None else {"failed": self.failed}
        if not self.clear:
            return why
        return {
            "tokens_per_second": statistics.median(self.clear),
            "all_in_tokens_per_second": statistics.median(self.all_in),
            "by_group": [None if math.isnan(rate) else round(rate, 1) for rate in self.rates],
            **why,
        }

    @property
    def clear(self) -> list[float]:
        """Rates of the groups that have one."""
        return [rate for rate in self.rates if not math.isnan(rate)]

    def over(self, other: Found) -> float | None:
        """How many times as fast, over the groups of which both have a rate."""
        both = [
            (ours, theirs)
            for ours, theirs in zip(self.rates, other.rates, strict=False)
            if not math.isnan(ours + theirs)
        ]
        if not both:
            return None
        return statistics.median(o for o, _ in both) / statistics.median(t for _, t in both)


@dataclass(frozen=True)
class Limits:
    """How far a comparison goes."""

    peer_groups: int = 1 << 30  # that count
    late: Callable[[], bool] = lambda: False
    passes: int = 4  # over all groups, to warm up


@dataclass(frozen=True)
class Setting:
    """The target and how it is asked."""

    decoder: Decoder
    tokenizer: Tokenizer
    batch: int
    tokens: int
    context: int
    peer_groups: int

    def own(self, drafter: str) -> Engine:
        """An engine of ours."""
        drafter, drafts = drafts_of(drafter)
        options = EngineOptions(
            max_batch=self.batch,
            max_context=self.context,
            kv_tokens=self.batch * self.context,
            reuse_prefix=False,
        )
        built = build(self.decoder, self.tokenizer, drafter, options, drafts)
        if drafts.depth is not None:  # no fewer either
            built.round.drafter.depths = built.round.drafter.depths[-1:]
        return Engine(built)


def own_way(engine: Engine, played: list[Stats]) -> Way:
    """Through the engine, as `Engine.generate` does; `played` hears of every answer's rounds."""

    def answer(prompts: Sequence[list[int]], tokens: int) -> Answers:
        law = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, seed=0)
        ids = [engine.submit(prompt, law) for prompt in prompts]
        outputs = [engine.collect(one) for one in ids]
        played.extend(choice.stats for output in outputs for choice in output.choices)
        return [list(output.token_ids) for output in outputs]

    return answer


def compared(
    tokens: int,
    ways: dict[str, Way],
    groups: Sequence[list[list[int]]],
    tell: Callable[[dict[str, Found]], None] = lambda _: None,
    limits: Limits = Limits(),
    recorded: Mapping[str, Callable[[], int]] = MappingProxyType({}),
) -> dict[str, Found]:
    """Every way over every group in turn, behind turns that only warm up: what is recorded or
    compiled at its first use is there then. The first group only warms up, and does so alone for
    peers, whose shapes are all the same. `tell` hears what there is after every group, and
    `recorded` tells how many kinds of rounds a way has recorded so far."""
    found = {name: Found() for name in ways}
    count = {name: recorded.get(name, lambda: 0) for name in ways}
    for name, way in ways.items():
        began = time.perf_counter()
        with found[name].noting_failure():
            for _ in range(limits.passes):
                before = count[name]()
                _warm(way, groups[:1] if name in PEERS else groups, tokens)
                if count[name]() == before:
                    break
        found[name].warm_up_seconds = time.perf_counter() - began
        sys.stderr.write(f"{name} is warm after {found[name].warm_up_seconds:.1f} s\n")
    warm = {name: count[name]() for name in ways}
    for turn, group in enumerate(groups[1:]):
        if turn and limits.late():
            break
        order = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        answers: dict[str, Answers] = {}
        for name in order:
            done = name in PEERS and turn >= limits.peer_groups
            if found[name].failed is None and not done:
                with found[name].noting_failure():
                    answers[name] = found[name].add(ways[name], group, tokens)
        for name, told in answers.items():
            found[name].recorded_meanwhile = count[name]() - warm[name]
            plain = answers.get("off", told)
            found[name].answers += len(told)
            found[name].equal += sum(a == b for a, b in zip(told, plain, strict=True))
        tell(found)
    return found


def _warm(way: Way, groups: Sequence[list[list[int]]], tokens: int) -> None:
    """Let a way see what will be asked."""
    for group in groups:
        for most in (tokens, 1):  # the larger cache serves both
            way(group, most)


def rows(
    setting: Setting,
    names: Sequence[str],
    groups: Sequence[list[list[int]]],
    peers: dict[str, Way],
    report: Report,
) -> Iterator[dict[str, Any]]:
    """One for each way, with what it is over own plain decoding and over each peer."""

    def running(found: dict[str, Found]) -> None:
        report.note(running={"batch": setting.batch, **_told(found)})

    with ExitStack() as open_:
        engines = {name: open_.enter_context(setting.own(name)) for name in names}
        for engine in engines.values():
            engine.warm_up(SamplingParams(temperature=0))
        played: dict[str, list[Stats]] = {name: [] for name in names}
        ways = {name: own_way(engines[name], played[name]) for name in names} | peers
        limits = Limits(setting.peer_groups, lambda: report.late)
        recorded = {name: partial(_recorded, engine) for name, engine in engines.items()}
        found = compared(setting.tokens, ways, groups, running, limits, recorded)
        for name, one in found.items():
            row = {"way": name, "batch": setting.batch, **one.figures()}
            beside = [x for x in found if x in ("off", *PEERS)]
            over = {f"over_{x}": one.over(found[x]) for x in beside}
            row |= {name: ratio for name, ratio in over.items() if ratio is not None}
            row["equal_to_plain"] = f"{one.equal} of {one.answers}" if "off" in found else None
            if name in engines:
                row["mean_levels"] = sum(played[name], Stats()).mean_levels
                row["backend"] = engines[name].backend()
            yield row
    report.note(running=None)


def _recorded(engine: Engine) -> int:
    """Kinds of rounds so far, those that gave way included."""
    return engine.built.player.played.recordings


def _told(found: dict[str, Found]) -> dict[str, Any]:
    return {name: one.figures() for name, one in found.items()}


def _taken(way: Way, prompts: Sequence[list[int]], tokens: int) -> tuple[Answers, float]:
    began = time.perf_counter()
    answers = way(prompts, tokens)
    return answers, time.perf_counter() - began


def _groups(
    tokenizer: Tokenizer, file: Path, batch: int, count: int, most: int
) -> list[list[list[int]]]:
    """Prompts of all kinds: every n-th of the file that is short enough, `batch` in a group."""
    lines = read_prompts(file)
    encoded = [tokenizer.chat_ids(list(line.opening)) for line in lines]
    encoded = [one for one in encoded if len(one) <= most]
    wanted = batch * (count + 1)
    step = max(1, len(encoded) // wanted)
    chosen = [encoded[(i * step + i // len(encoded)) % len(encoded)] for i in range(wanted)]
    return [chosen[i : i + batch] for i in range(0, wanted, batch)]


def _peers(
    open_: ExitStack, home: Path, decoder: Decoder, asked: argparse.Namespace
) -> tuple[dict[str, Way], dict[str, str]]:
    """(those that are there, why the others are not); their weights are written to `home`."""
    if not asked.peers:
        return {}, {}
    if find_spec("transformers") is None:
        return {}, dict.fromkeys(asked.peers, "transformers is not installed")
    versus_peers = import_module("versus_peers")
    try:
        versus_peers.write_target(decoder, home)
    except Exception as fault:  # noqa: BLE001  # our own figures do not need them
        return {}, dict.fromkeys(asked.peers, f"{type(fault).__name__}: {fault}")
    found: tuple[dict[str, Way], dict[str, str]] = versus_peers.peers(
        open_, home, asked.peers, decoder.device, asked.vllm_python
    )
    return found


def _own(way: str) -> str:
    """One of our own ways, with a depth or without one."""
    name, at, depth = way.partition("@")
    if name not in OWN_WAYS or (at and not (depth.isdecimal() and int(depth) > 0)):
        known = ", ".join(OWN_WAYS)
        raise argparse.ArgumentTypeError(f"{way!r}: known are {known}, and eagle3@5 and the like")
    return way


def main() -> None:
    """Print one JSON object."""
    parser = parser_of(__doc__)
    parser.add_argument("--target", default=OWN)
    parser.add_argument("--ways", nargs="*", default=list(ASKED), type=_own, metavar="WAY[@DEPTH]")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--groups", type=int, default=3, help="groups of prompts that count")
    parser.add_argument("--peer-groups", type=int, default=1 << 30, help="of these, by peers")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--static-batches", nargs="*", type=int, help="all, if it is left out")
    tiny = {"ways": ["off", "ngram"], "peers": ["eager"], "batches": [2], "tokens": 6}
    asked, device = asked_of(parser, tiny | {"groups": 1, "longest": 40})
    if (
        asked.tokens < 2
        or min(asked.groups, asked.peer_groups, *asked.batches) < 1
        or not asked.ways + asked.peers
    ):
        parser.error("at least 2 tokens, a group, a batch of 1, and one that answers")
    what = "greedy answers of the same prompts, tokens of all requests a second; medians"
    report = Report.of("versus_gpu.py", what, device, asked)
    path = resolve(asked.target)
    tokenizer = load_tokenizer(path)
    decoder = load_decoder(path, dtype_of(asked.dtype, device), device).requires_grad_(False)
    with ExitStack() as open_:
        home = Path(open_.enter_context(tempfile.TemporaryDirectory()))
        peers, missing = _peers(open_, home, decoder, asked)
        report.note(target=asked.target, tokens=asked.tokens, dtype=asked.dtype, missing=missing)
        for batch in asked.batches:
            context = asked.longest + asked.tokens + 80
            setting = Setting(decoder, tokenizer, batch, asked.tokens, context, asked.peer_groups)
            groups = _groups(tokenizer, asked.prompts, batch, asked.groups, asked.longest)
            static = asked.static_batches is None or batch in asked.static_batches
            here = {name: way for name, way in peers.items() if name != "static" or static}
            report.run(
                {}, lambda s=setting, g=groups, p=here: list(rows(s, asked.ways, g, p, report))
            )
    sys.exit(report.close())


if __name__ == "__main__":
    begin(main)

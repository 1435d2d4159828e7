"""Times whole rounds on a GPU: where a round's time goes, and milliseconds per token.

    python benchmarks/round_gpu.py --out round.json
    python benchmarks/round_gpu.py --shapes llama-8b --batches 1 --drafters off eagle3

SmolLM2-135M with its own weights and heads, and a target of Llama-8B's sizes with random weights.
Acceptance is forced: the last norm of every target is set to zero, so that all scores are equal and
the choice is token 0, whatever rounds how; and the tree's likeliest path is set to what plain
decoding said before, as far as `--accept` levels, while the drafter does all its work. So figures
are of speed alone, and each of them says that it was forced. Every request of a batch is the same,
greedy. Rounds are driven without tokenizer, scheduler and text, which `furcate bench` measures too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_timing import ceilings, median_ms
from torch import Tensor

from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.drafters.around import around_head
from furcate.drafters.base import Drafter, View
from furcate.drafters.make import Setting, kernels_in, make_drafter, room_of
from furcate.engine.asking import Limits, settle
from furcate.engine.birth import birth
from furcate.engine.build import Built, build
from furcate.engine.player import Player
from furcate.engine.report import backend_json
from furcate.engine.request import Request
from furcate.engine.round import Batch, Round
from furcate.engine.target import Span, chain
from furcate.files import write_json
from furcate.heads.eagle import Eagle3
from furcate.heads.output import Shared
from furcate.heads.spec import EagleSpec
from furcate.kernels.backend import kernels_of
from furcate.kernels.draft import Draft, Proposal, Verdict
from furcate.kv.cache import CacheShape
from furcate.models.decoder import Decoder
from furcate.models.load import load_decoder
from furcate.models.spec import DecoderSpec, RopeSpec
from furcate.models.zoo import resolve
from furcate.text.tokenizer import Tokenizer, load_tokenizer
from furcate.verify.coupled import verify
from furcate.verify.law import Needs
from furcate.verify.stops import truncate

OWN = "smollm2-135m"
PAGE = 16
LLAMA_8B = DecoderSpec(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_position=8192,
    rope=RopeSpec(theta=500000.0),
    rope_layers=(True,) * 32,
)
TINY = replace(
    LLAMA_8B,
    vocab_size=49152,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_layers=(True,) * 2,
)
SPECS = {"llama-8b": LLAMA_8B, "tiny": TINY}


class Forced:
    """Does what the drafter inside does, and then puts known tokens on its likeliest path.

    `token_W` is what plain decoding says, prompt and answer; the first `levels` are right.
    """

    def __init__(self, inner: Drafter, levels: int, context: int, device: torch.device) -> None:
        self.inner, self.levels = inner, levels
        self.depth, self.pool, self.light = inner.depth, inner.pool, inner.light
        self.layers = inner.layers
        self.token_W = torch.zeros(context + 128, dtype=torch.int64, device=device)

    def propose(self, view: View) -> Proposal:
        """The path is that of the best child at every level, whatever it is worth."""
        made = self.inner.propose(view)
        tokens_BP, value_BP = made.tokens_BP.clone(), made.value_BP.clone()
        up_B1 = torch.full_like(view.length_B[:, None], -1)
        wrong_BP = (tokens_BP == self.token_W[view.length_B + 1][:, None]) & (made.depth_BP > 0)
        tokens_BP = torch.where(wrong_BP, tokens_BP + 1, tokens_BP)
        for depth in range(1, min(self.levels, self.depth) + 1):
            child_BP = (made.depth_BP == depth) & (made.parent_BP == up_B1)
            worth_BP = torch.where(child_BP, made.value_BP.clamp_min(-1e30), -torch.inf)
            at_B1 = worth_BP.argmax(1, keepdim=True)
            right_B1 = self.token_W[view.length_B + depth][:, None]
            taken_BP = child_BP & (tokens_BP == right_B1)
            tokens_BP = torch.where(taken_BP, tokens_BP + 1, tokens_BP)
            tokens_BP.scatter_(1, at_B1, right_B1)
            value_BP.scatter_(1, at_B1, -1e-3 * depth)
            up_B1 = at_B1
        return replace(made, tokens_BP=tokens_BP, value_BP=value_BP)

    def learn(self, view: View, draft: Draft, verdict: Verdict, features_BRF: Tensor) -> None:
        """What was forced teaches nothing, but states are kept."""
        untold = None if draft.tag_BR is None else torch.full_like(draft.tag_BR, -1)
        self.inner.learn(view, replace(draft, tag_BR=untold), verdict, features_BRF)

    def keep(self, view: View, rows: Draft, features_BRF: Tensor) -> None:
        self.inner.keep(view, rows, features_BRF)

    def read(self, view: View, rows: Draft) -> None:
        self.inner.read(view, rows)

    def forget(self, slot: int) -> None:
        self.inner.forget(slot)

    def copy_page(self, source: int, target: int) -> None:
        self.inner.copy_page(source, target)


@dataclass(frozen=True)
class Plan:
    """What is run for every combination of shape, drafter, batch, and graphs on or off."""

    device: torch.device
    prompt: int
    tokens: int
    accept: int
    nodes: int

    @property
    def context(self) -> int:
        return self.prompt + self.tokens + 2 * self.nodes + 16


@dataclass(frozen=True)
class Target:
    """A decoder, the tokenizer that an engine needs, and a head."""

    name: str
    decoder: Decoder
    tokenizer: Tokenizer

    def drafter(self, kind: str, plan: Plan, batch: int) -> Drafter:
        """By its name; a random EAGLE-3 head where the target has random weights."""
        spec, how = self.decoder.spec, DraftOptions()
        pages = batch * -(-plan.context // PAGE)
        shape = CacheShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, pages, PAGE)
        kernels = kernels_of(plan.device)
        setting = Setting(self.decoder, self.tokenizer, shape, batch, how, kernels)
        if kind != "eagle3" or self.name == OWN:
            return make_drafter(kind, setting)
        return around_head(_random_head(self.decoder), how, room_of(setting))


class Drive:
    """Equal requests side by side in pages of their own, played round by round."""

    def __init__(self, built: Built, plan: Plan, batch: int, player: Player) -> None:
        self.built, self.plan, self.player = built, plan, player
        self.round: Round = built.round
        self.batch = batch
        self.length = plan.prompt - 1
        params = SamplingParams(temperature=0, max_tokens=plan.tokens, ignore_eos=True, seed=1)
        limits = Limits(self.round.target.decoder.spec.vocab_size, plan.context, ())
        rng = torch.Generator().manual_seed(3)
        prompt = torch.randint(3, 4000, (plan.prompt,), generator=rng).tolist()
        each = -(-plan.context // PAGE)
        for slot in range(batch):
            request = Request(settle(f"{slot}", prompt, params, limits), 0)
            self.round.state.admit(slot, request)
            own = list(range(1 + slot * each, 1 + (slot + 1) * each))
            self.round.state.set_pages(slot, own)
        slot_B = torch.arange(batch, device=plan.device)
        view = self.round.state.view(slot_B, self.length, Needs())
        live_B = torch.full_like(slot_B, self.length)
        self.round.prefill(view, chain(view.tokens_BW, live_B), Span(self.length))
        self.round.state.length_C[:batch] = self.length
        self.round.propose(self.asked(1).on(plan.device))

    def asked(self, rows: int, *, propose: bool = True) -> Batch:
        """A round of all requests."""
        return Batch(
            slot_B=torch.arange(self.batch),
            allowance_B=torch.full((self.batch,), rows),
            rows=rows,
            columns=self.length + 1 + rows,
            needs=Needs(),
            propose=propose,
        )

    def run(self, rows: int) -> tuple[list[int], list[float]]:
        """Tokens of the first request, and milliseconds of every round."""
        tokens: list[int] = []
        times: list[float] = []
        while len(tokens) < self.plan.tokens:
            began = time.perf_counter()
            told = self.player.play(self.asked(rows)).told()
            times.append((time.perf_counter() - began) * 1e3)
            tokens += told[0].tokens
            if not told[0].tokens:
                break
            self.length = self.plan.prompt - 1 + len(tokens)
        return tokens, times


def built_of(target: Target, drafter: Drafter | str, plan: Plan, batch: int, graphs: bool) -> Built:
    """An engine's parts; sizes are those of the plan."""
    options = EngineOptions(
        max_batch=batch,
        max_context=plan.context,
        kv_tokens=batch * -(-plan.context // PAGE) * PAGE,
        page_size=PAGE,
        graphs=graphs,
    )
    how = DraftOptions(num_draft_tokens=plan.nodes) if drafter != "off" else DraftOptions()
    return build(target.decoder, target.tokenizer, drafter, options, how)


def timed(target: Target, kind: str, plan: Plan, batch: int, graphs: bool) -> dict[str, Any]:
    """Milliseconds per token of one combination; the first rounds only warm up."""
    plain = built_of(target, "off", plan, batch, graphs)
    told, plain_times = _twice(plain, plan, batch, 1)
    plain_ms = _median(plain_times)
    record: dict[str, Any] = {
        "target": target.name,
        "drafter": kind,
        "batch": batch,
        "graphs_asked": graphs,
        "plain_ms_per_token": plain_ms,
        **backend_json(plain),
    }
    if kind == "off":
        return record
    forced = Forced(target.drafter(kind, plan, batch), plan.accept, plan.context, plan.device)
    prompt = plain.round.state.tokens_CW[0, : plan.prompt]
    forced.token_W[: plan.prompt] = prompt
    forced.token_W[plan.prompt : plan.prompt + len(told)] = torch.tensor(told, device=plan.device)
    built = built_of(target, forced, plan, batch, graphs)
    rows = built.round.most_nodes + 1
    tokens, times = _twice(built, plan, batch, rows)
    per_round = len(tokens) / len(times)
    beneath = kernels_in(forced.inner)
    return (
        record
        | backend_json(built)
        | {
            "draft_kernels": None if beneath is None else beneath.name,
            "draft_kernels_why": None if beneath is None else beneath.why,
            "forced_levels": plan.accept,
            "rows": rows,
            "tokens_per_round": per_round,
            "ms_per_round": _median(times),
            "ms_per_token": _median(times) / per_round,
            "speedup": plain_ms * per_round / _median(times),
            "equal_to_plain": tokens[: len(told)] == told[: len(tokens)],
            "waterfall_ms": waterfall(Drive(built, plan, batch, built.player), rows),
        }
    )


def waterfall(drive: Drive, rows: int) -> dict[str, float]:
    """Milliseconds of each stage by itself, at the prompt's end; nothing is committed there."""
    round_, device = drive.round, drive.plan.device
    batch = drive.asked(rows).on(device)
    round_.state.finish_C[: drive.batch] = 1  # no room: lengths stay as they are
    view = round_.state.view(batch.slot_B, batch.columns, batch.needs)
    draft = round_._draft(view, batch)
    scored = round_.target.score(view, draft, Span(batch.columns - 1))
    law_rows = round_._rows(view, draft)
    verified = verify(scored.logits_BRV, view.law, law_rows, round_.kernels)
    room_B = round_.state.room(view)
    cut = truncate(verified.verdict, view.law, room_B)

    def commit() -> None:
        round_._commit(view, scored.slot_BR, cut)
        round_.drafter.learn(view, draft, verified.verdict, scored.features_BRF)

    stages = {
        "draft": lambda: round_.propose(batch),
        "select": lambda: round_._draft(view, batch),
        "verify": lambda: round_.target.score(view, draft, Span(batch.columns - 1)),
        "accept": lambda: truncate(
            verify(scored.logits_BRV, view.law, law_rows, round_.kernels).verdict, view.law, room_B
        ),
        "commit": commit,
        "plain pass": lambda: _plain_pass(round_, batch),
        "whole round": lambda: round_.play(batch),
    }
    return {name: median_ms(stage, device) for name, stage in stages.items()}


def _plain_pass(round_: Round, batch: Batch) -> None:
    """The target over one row a request: what a tree of many rows is compared with."""
    one = replace(batch, rows=1)
    view = round_.state.view(one.slot_B, one.columns, one.needs)
    round_.target.score(view, round_._draft(view, one), Span(one.columns - 1))


def _twice(built: Built, plan: Plan, batch: int, rows: int) -> tuple[list[int], list[float]]:
    """The second of two runs: in the first one kernels are compiled and rounds recorded."""
    Drive(built, plan, batch, built.player).run(rows)
    return Drive(built, plan, batch, built.player).run(rows)


def _median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def target_of(name: str, device: torch.device) -> Target:
    """SmolLM2, or a random decoder."""
    tokenizer = load_tokenizer(resolve(OWN))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == OWN:
        decoder = load_decoder(resolve(OWN), dtype, device)
    else:
        decoder = Decoder(SPECS[name], dtype, device)
        _fill(decoder)
    decoder.requires_grad_(False).norm.weight.zero_()
    return Target(name, decoder, tokenizer)


def _random_head(target: Decoder) -> Eagle3:
    """One layer of the target's widths over 32,768 tokens, or all where there are fewer."""
    spec, device = target.spec, target.device
    words = min(32768, spec.vocab_size)
    block = replace(spec, num_layers=1, rope_layers=(True,))
    layers = (1, spec.num_layers // 2, spec.num_layers - 1)
    head = EagleSpec("eagle3", block, block.hidden_size, layers, words, own_output=True)
    made = Eagle3(head, Shared.of(target), torch.arange(words, device=device))
    _fill(made)
    return made.requires_grad_(False)


def _fill(module: torch.nn.Module) -> None:
    """Random weights that keep the stream's size."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
            else:
                weight.normal_(0, weight.shape[-1] ** -0.5)


def runs(asked: argparse.Namespace, plan: Plan) -> Iterator[dict[str, Any]]:
    """All combinations, shape by shape."""
    for name in asked.shapes:
        target = target_of(name, plan.device)
        for batch in asked.batches:
            for graphs in (True, False) if plan.device.type == "cuda" else (False,):
                for kind in asked.drafters:
                    yield timed(target, kind, plan, batch, graphs)


@torch.inference_mode()
def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=[OWN, "llama-8b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--drafters", nargs="+", default=["off", "ngram", "eagle3"])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=31)
    parser.add_argument("--accept", type=int, default=4, help="levels that are right")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, to try the script")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.tiny:
        asked.shapes, asked.batches, asked.prompt, asked.tokens = ["tiny"], [1, 3], 40, 20
    device = torch.device("cpu" if asked.tiny else "cuda")
    plan = Plan(device, asked.prompt, asked.tokens, asked.accept, asked.nodes)
    found = []
    for record in runs(asked, plan):
        found.append(record)
        said = {k: v for k, v in record.items() if k != "graphs"}
        sys.stderr.write(json.dumps(said) + "\n")
    command = "python benchmarks/round_gpu.py " + " ".join(sys.argv[1:])
    record = {
        "what": "rounds under forced acceptance; milliseconds are medians of the wall clock",
        "command": command.strip(),
        **birth(device),
        **ceilings(device, tiny=asked.tiny),
        "plan": {k: v for k, v in asdict(plan).items() if k != "device"},
        "results": found,
    }
    sys.stdout.write(json.dumps(record, indent=2) + "\n")
    if asked.out is not None:
        write_json(asked.out, record)


if __name__ == "__main__":
    main()

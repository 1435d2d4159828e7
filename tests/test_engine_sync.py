"""From its first line to its last the round reads no value on the host: fake tensors have none."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from typing import Any

import pytest
import torch
from small_models import tiny_decoder
from tiny_engine import VOCAB, prompt_of, tokenizer
from tiny_heads import KINDS, network
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.drafters.around import around_head, around_model, beside_matches
from furcate.drafters.base import Drafter, View
from furcate.drafters.make import Setting, room_of
from furcate.drafters.ngram import NgramDrafter
from furcate.drafters.off import OffDrafter
from furcate.engine.asking import Limits, settle
from furcate.engine.build import build
from furcate.engine.request import Request
from furcate.engine.round import Batch, Round
from furcate.engine.target import Span, chain
from furcate.kernels.draft import Proposal
from furcate.kv.cache import CacheShape
from furcate.models.decoder import Decoder
from furcate.verify.law import needs_of

CPU = torch.device("cpu")
EVERYTHING = SamplingParams(
    temperature=0.9,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={5: 1.0},
    allowed_token_ids=tuple(range(100)),
    min_tokens=9,
    max_tokens=40,
    stop_token_ids=(7,),
    logprobs=True,
    seed=3,
)
GREEDY = SamplingParams(temperature=0, max_tokens=40, seed=4)


class Peeking(NgramDrafter):
    """Reads one number on the host."""

    def propose(self, view: View, levels: int) -> Proposal:
        assert view.length_B[0].item() >= 0
        return super().propose(view, levels)


class Branching(NgramDrafter):
    """Branches on a tensor's value."""

    def propose(self, view: View, levels: int) -> Proposal:
        if (view.length_B > 100).any():
            return super().propose(view, levels)
        return super().propose(view, levels)


def drafter_of(kind: str, target: Decoder, shape: CacheShape, draft: DraftOptions) -> Drafter:
    if kind == "off":
        return OffDrafter()
    room = room_of(Setting(target, tokenizer(), shape, 4, draft))
    if kind == "model":
        return around_model(tiny_decoder(torch.float64, 1, VOCAB), draft, room)
    if kind == "hybrid":
        ngram = NgramDrafter(DraftOptions(), capacity=4, device=CPU)
        head = around_head(network("eagle3", True), draft, room, longest=ngram.depth)
        return beside_matches(ngram, head, room)
    if kind in KINDS:
        return around_head(network(kind, True), draft, room)
    known = {"ngram": NgramDrafter, "peeking": Peeking, "branching": Branching}
    return known[kind](draft, capacity=4, device=CPU)


def fake() -> FakeTensorMode:
    """Inside, every tensor loses its values at its first use, whether it was made inside or not."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def round_of(kind: str) -> Round:
    """A round over two admitted requests; admission is the host's work and may read anything."""
    options = EngineOptions(max_batch=4, max_context=128, kv_tokens=512)
    target, draft = tiny_decoder(torch.float64, 0, VOCAB), DraftOptions(depth=4, topk=3)
    spec = target.spec
    shape = CacheShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, 32, 16)
    built = build(target, tokenizer(), drafter_of(kind, target, shape, draft), options, draft)
    limits = Limits(VOCAB, 128, (2,))
    for slot, params in ((1, EVERYTHING), (3, GREEDY)):
        request = Request(settle("r", prompt_of(20 + slot), params, limits), 0)
        request.cached = request.committed - 1
        built.round.state.admit(slot, request)
        built.round.state.set_pages(slot, [1 + slot, 9 + slot, 5 + slot])
    return built.round


def batch_of(round_: Round, rows: int, **changes: Any) -> Batch:
    return Batch(
        slot_B=torch.tensor([1, 3]),
        allowance_B=torch.tensor([rows, rows]),
        rows=rows,
        columns=24 + rows,
        needs=needs_of([EVERYTHING, GREEDY], VOCAB),
        levels=max(round_.drafter.depths, default=0),
        raw_top=4,
        processed_top=3,
        **changes,
    )


def shapes(record: Any) -> dict[str, torch.Size]:
    found: dict[str, torch.Size] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, torch.Tensor):
            found[field.name] = value.shape
        elif value is not None:
            found |= {f"{field.name}.{k}": size for k, size in shapes(value).items()}
    return found


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("off", 1),
        *product(("ngram", "model", "eagle3", "medusa", "hybrid"), (1, 2, 8, 40)),
        ("mtp", 8),
    ],
)
def test_the_round_waits_for_nothing(kind: str, rows: int) -> None:
    round_ = round_of(kind)
    with fake():
        emitted = round_.play(batch_of(round_, rows))
    again = round_of(kind)
    real = again.play(batch_of(again, rows))
    assert shapes(emitted) == shapes(real), "and its shapes are known beforehand"
    assert {"raw.chosen_BD", "processed.top_BDK"} <= set(shapes(emitted))


@pytest.mark.parametrize("kind", ["off", "ngram", "model", *KINDS])
def test_prefill_and_the_first_draft_wait_for_nothing(kind: str) -> None:
    round_ = round_of(kind)
    with fake():
        batch = batch_of(round_, 1)
        view = round_.state.view(batch.slot_B[:1], 21, batch.needs)
        round_.prefill(view, chain(view.tokens_BW[:, :16], torch.tensor([16])), Span(21))
        gain_BN = round_.propose(batch)
    assert len(gain_BN) == 2


@pytest.mark.parametrize("kind", ["peeking", "branching"])
def test_the_check_can_fail(kind: str) -> None:
    round_ = round_of(kind)
    with fake(), pytest.raises(DataDependentOutputException):
        round_.play(batch_of(round_, 8))


def test_reading_the_result_is_what_waits() -> None:
    round_ = round_of("ngram")
    with fake():
        emitted = round_.play(batch_of(round_, 8))
        with pytest.raises(DataDependentOutputException):
            emitted.count_B[0].item()

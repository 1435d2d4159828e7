"""Nothing in a round copies between host and device, which no recording could hold.

The device is torch's "meta": tensors there have no values, and none of them is the host's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import tiny_decoder
from test_engine_sync import EVERYTHING, GREEDY
from tiny_engine import VOCAB, prompt_of, tokenizer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.drafters.around import around_head, around_model, beside_matches
from furcate.drafters.base import Drafter
from furcate.drafters.draft_cache import Room
from furcate.drafters.ngram import NgramDrafter
from furcate.drafters.off import OffDrafter
from furcate.engine.asking import Limits, settle
from furcate.engine.build import build
from furcate.engine.emitted import packed
from furcate.engine.request import Request
from furcate.engine.round import Batch, Round
from furcate.heads.eagle import Eagle1, Eagle3
from furcate.heads.medusa import Medusa
from furcate.heads.mtp import Mtp
from furcate.heads.output import Shared
from furcate.heads.spec import EagleSpec, MedusaSpec, MtpSpec
from furcate.models.decoder import Decoder
from furcate.verify.law import needs_of

NOWHERE = torch.device("meta")
WARM = SamplingParams(temperature=0.7, max_tokens=40, seed=9)


class Crossings(TorchDispatchMode):
    """Notes operations that read the host's memory and write the device's, or the other way."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        # torch.tensor ends with `detach_`: numbers of the host have become a tensor
        if len({x.device.type for x in leaves}) > 1 or func is torch.ops.aten.detach_.default:
            self.found.append(str(func))
        return out


class Subscripts(TorchFunctionMode):
    """Notes subscripts that a GPU makes into a copy from the host, and this device does not.

    They are lists as indices, and numbers that are assigned where tensors are the indices or where
    one entry alone is meant; a slice is filled with a number without a copy.
    """

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            key = args[1] if isinstance(args[1], tuple) else (args[1],)
            number = func is Tensor.__setitem__ and isinstance(args[2], bool | int | float)
            entry = len(key) == args[0].dim() and all(type(k) is int for k in key)
            pointed = entry or any(isinstance(k, Tensor) for k in key)
            if any(isinstance(k, list) for k in key) or (number and pointed):
                self.found.append(f"{func.__name__} {args[1:]}")
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[list[str]]:
    found: list[str] = []
    with Subscripts(found), Crossings(found):
        yield found


def drafter_of(kind: str, target: Decoder) -> Drafter:
    draft = DraftOptions(depth=3, topk=3)
    room = Room(4, 32, 16, VOCAB, NOWHERE)
    if kind == "off":
        return OffDrafter()
    ngram = NgramDrafter(DraftOptions(), capacity=4, device=NOWHERE)
    if kind == "ngram":
        return ngram
    if kind == "model":
        return around_model(Decoder(tiny_decoder().spec, torch.float32, NOWHERE), draft, room)
    if kind == "hybrid":
        head = head_of("eagle3", target)
        return beside_matches(ngram, around_head(head, draft, room, longest=ngram.depth), room)
    return around_head(head_of(kind, target), draft, room)


def head_of(kind: str, target: Decoder) -> Any:
    shared, last = Shared.of(target), target.spec.num_layers
    block = replace(target.spec, num_layers=1, rope_layers=(True,), intermediate_size=40)
    if kind == "medusa":
        return Medusa(MedusaSpec(block.hidden_size, VOCAB, 4, 2, (last,), VOCAB), shared, None)
    if kind == "mtp":
        return Mtp(MtpSpec(block, (last,), VOCAB), shared, None)
    if kind == "eagle1":
        return Eagle1(EagleSpec(kind, block, block.hidden_size, (last,), VOCAB), shared, None)
    spec = EagleSpec("eagle3", block, block.hidden_size, (0, 1, last), VOCAB, fc_norm=True)
    return Eagle3(spec, shared, None)


def round_of(kind: str, asked: list[SamplingParams]) -> Round:
    target = Decoder(tiny_decoder(vocab=VOCAB).spec, torch.float32, NOWHERE)
    options = EngineOptions(max_batch=4, max_context=128, kv_tokens=512, graphs=False)
    built = build(target, tokenizer(), drafter_of(kind, target), options, DraftOptions())
    for slot, params in enumerate(asked):
        request = Request(settle("r", prompt_of(20 + slot), params, Limits(VOCAB, 128, (2,))), 0)
        request.cached = request.committed - 1
        built.round.state.admit(slot, request)
        built.round.state.set_pages(slot, [1 + slot, 9 + slot, 5 + slot])
    return built.round


def crossings(kind: str, asked: list[SamplingParams], rows: int) -> list[str]:
    with torch.inference_mode():
        round_ = round_of(kind, asked)
        batch = Batch(
            slot_B=torch.zeros(2, dtype=torch.int64, device=NOWHERE),
            allowance_B=torch.ones(2, dtype=torch.int64, device=NOWHERE),
            rows=rows,
            columns=128,
            needs=needs_of(asked, VOCAB),
            levels=max(round_.drafter.depths, default=0),
            raw_top=2,
            processed_top=2,
        )
        with watched() as found:
            packed(round_.play(batch))
            packed(round_.play(replace(batch, levels=0)))
    return found


@pytest.mark.parametrize(
    "kind", ["off", "ngram", "model", "eagle1", "eagle3", "mtp", "medusa", "hybrid"]
)
@pytest.mark.parametrize("law", [[GREEDY], [WARM, GREEDY], [EVERYTHING, GREEDY]], ids=len)
def test_a_round_copies_nothing_between_host_and_device(
    kind: str, law: list[SamplingParams]
) -> None:
    for rows in (1, 8) if kind != "off" else (1,):
        assert crossings(kind, law, rows) == []


def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    propose = NgramDrafter.propose

    def sends(self: Any, view: Any, levels: int) -> Any:
        torch.tensor([1.0], device=view.length_B.device)
        return propose(self, view, levels)

    def moves(self: Any, view: Any, levels: int) -> Any:
        torch.ones(3).to(view.length_B.device)
        return propose(self, view, levels)

    def puts(self: Any, view: Any, levels: int) -> Any:
        view.tokens_BW[view.length_B >= 0] = 1
        return propose(self, view, levels)

    def puts_one(self: Any, view: Any, levels: int) -> Any:
        view.tokens_BW[0, -1] = 1
        return propose(self, view, levels)

    def picks(self: Any, view: Any, levels: int) -> Any:
        view.tokens_BW[:, [0, 1]]
        return propose(self, view, levels)

    for fault in (sends, moves, puts, puts_one, picks):
        monkeypatch.setattr(NgramDrafter, "propose", fault)
        assert crossings("ngram", [GREEDY], 1) != []

"""How many kernels a round launches around its layers, with the Triton kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from round_launches import Launches, launches
from test_engine_triton import engine_on, target
from tiny_engine import VOCAB, prompt_of
from triton_device import DEVICE, MARKS

from furcate.config import SamplingParams
from furcate.engine.asking import Limits, settle
from furcate.engine.emitted import packed
from furcate.engine.request import Request
from furcate.engine.round import Batch, Round
from furcate.kernels.backend_triton import TRITON
from furcate.models import blocks_triton
from furcate.verify.law import needs_of

pytestmark = [*MARKS, pytest.mark.skipif(DEVICE.type != "cpu", reason="counts interpreted kernels")]

AROUND = 8  # entries, arrival, last norm, logits, two of the choice, acceptance, ledger
OF_A_LAYER = 5  # attention, which turns and writes the keys of few rows, and four products
LAYERS = 2
LAWS = {"greedy": {"temperature": 0.0}, "warm": {"temperature": 0.9}}


def round_of(drafter: str, params: SamplingParams, patch: Any) -> Round:
    decoder = target().on(blocks_triton.TRITON)
    round_ = engine_on(TRITON, decoder, drafter, patch).built.round
    request = Request(settle("r", prompt_of(20), params, Limits(VOCAB, 96, (2,))), 0)
    request.cached = request.committed - 1
    round_.state.admit(1, request)
    round_.state.set_pages(1, [1, 5, 3])
    return round_


def counted(drafter: str, law: str, rows: int, patch: Any, *, drafts: bool = False) -> Launches:
    params = SamplingParams(max_tokens=9, **LAWS[law])
    with torch.inference_mode():
        round_ = round_of(drafter, params, patch)
        quiet(round_)
        batch = Batch(
            slot_B=torch.tensor([1]),
            allowance_B=torch.tensor([rows]),
            rows=rows,
            columns=32,
            needs=needs_of([params], VOCAB),
            levels=drafts * max(round_.drafter.depths, default=0),
        )
        with launches() as found:
            packed(round_.play(batch))
    return found


def quiet(round_: Round) -> None:
    """What the drafter does is its own matter: it learns nothing, and has its proposal ready."""
    slot_B = torch.tensor([0])
    view = round_.state.view(slot_B, 32, needs_of([SamplingParams()], VOCAB))
    ready = round_.drafter.propose(view, max(round_.drafter.depths, default=0))
    round_.drafter.learn = lambda *_: None  # type: ignore[method-assign]
    round_.drafter.propose = lambda *_: ready  # type: ignore[method-assign]


@pytest.mark.parametrize("law", LAWS)
def test_a_plain_round_launches_nothing_of_torch_and_few_kernels(
    law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = counted("off", law, 1, monkeypatch)
    assert found.torch.total() == 0, found.torch
    assert found.triton.total() - LAYERS * OF_A_LAYER <= AROUND, found.triton


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("drafts", [False, True])
def test_a_drafted_round_launches_nothing_of_torch_either(
    law: str, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = counted("ngram", law, 7, monkeypatch, drafts=drafts)
    assert found.torch.total() == 0, found.torch
    # the drafted rows are selected, and the accepted ones moved; the next draft is looked up, kept
    more = 4 if drafts else 2
    assert found.triton.total() - LAYERS * OF_A_LAYER <= AROUND + more, found.triton


def test_the_count_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    with launches() as found:
        x = torch.ones(3)
        x[1:].view(2, 1).contiguous()
        x[None] + torch.empty_like(x)
    assert found.torch == {"ones": 1, "add": 1} and not found.triton

"""Whole laws on the Triton kernels: an engine says what one on the references says, request by
request, and logits that are not numbers end their own request alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import fill_randomly, tiny_decoder
from tiny_engine import DRAFT, VOCAB, finished, prompt_of, tokenizer
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.engine import build as building
from furcate.engine.build import build
from furcate.engine.compare import parting
from furcate.engine.engine import Engine
from furcate.engine.outputs import Output
from furcate.kernels import sample_triton
from furcate.kernels.backend import TORCH, Kernels
from furcate.kernels.backend_triton import TRITON
from furcate.models.decoder import Decoder, States
from furcate.models.weights import places

pytestmark = MARKS

MOST = 4 if DEVICE.type == "cpu" else 60
FAR = 90  # from this position on logits are not numbers; whoever starts before it never gets there
LAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "top_p": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.5, "logit_bias": {5: 3.0}},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(3, 60)), "min_tokens": 3},
)


class BrokenHead(Decoder):
    """Logits are NaN by position, not by token: a random answer may come to say any token."""

    def states(self, tokens_T: Tensor, positions_T: Tensor, *rest: Any) -> States:
        states = super().states(tokens_T, positions_T, *rest)
        broken_TC = states.last_TC.masked_fill((positions_T >= FAR)[:, None], torch.nan)
        return replace(states, last_TC=broken_TC)


def target() -> Decoder:
    spec = replace(tiny_decoder(vocab=VOCAB).spec, head_dim=16)
    decoder = BrokenHead(spec, torch.float32, torch.device("cpu"))
    fill_randomly(places(decoder), 0)
    return decoder.requires_grad_(False).to(DEVICE)


@pytest.fixture
def engine_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes engines on given kernels, whatever the device."""
    monkeypatch.setattr(sample_triton, "_BLOCKS", 64)

    def made(kernels: Kernels, drafter: str, decoder: Decoder) -> Engine:
        monkeypatch.setattr(building, "kernels_of", lambda device, **_: kernels)
        options = EngineOptions(max_batch=4, max_context=96, kv_tokens=512)
        how = {**DRAFT, "depth": 3, "topk": 3, "num_draft_tokens": 7}
        draft = DraftOptions(**({} if drafter == "off" else how))
        return Engine(build(decoder, tokenizer(), drafter, options, draft))

    return made


def asked(law: dict[str, Any], seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=MOST, seed=seed, **law)


def answers(engine: Engine, prompts: list[list[int]]) -> list[Output]:
    laws = [asked(law, n) for n, law in enumerate(LAWS)]
    return finished(engine, [engine.submit(p, law) for p, law in zip(prompts, laws, strict=True)])


@pytest.mark.parametrize("drafter", ["off", "ngram"])
def test_every_law_says_what_the_references_say(drafter: str, engine_on: Any) -> None:
    decoder, prompts = target(), [2 * prompt_of(7 + n, n) for n in range(len(LAWS))]
    with engine_on(TORCH, drafter, decoder) as engine:
        told = answers(engine, prompts)
    with engine_on(TRITON, drafter, decoder) as engine:
        heard = answers(engine, prompts)
        for n, (one, other) in enumerate(zip(heard, told, strict=True)):
            part = parting(engine, one, other, asked(LAWS[n], n))
            assert part is None or part.tie, f"{LAWS[n]}: {part}"
    assert drafter == "off" or sum(output.stats.drafted for output in heard) > 0


@pytest.mark.parametrize("filtered", [False, True])
def test_logits_that_are_no_numbers_end_their_request_alone(filtered: bool, engine_on: Any) -> None:
    law = {"temperature": 0.9, "max_tokens": MOST, "ignore_eos": True, "seed": 3}
    params = SamplingParams(**law, **({"top_p": 0.9, "top_k": 50} if filtered else {}))
    prompts = [prompt_of(9), prompt_of(FAR + 1), prompt_of(20)]
    assert max(len(prompts[n]) for n in (0, 2)) + MOST < FAR
    kernels = replace(TRITON, arrive=None)  # so that the pass asks for the decoder's `states`
    with engine_on(kernels, "off", target()) as engine:
        outputs = finished(engine, [engine.submit(prompt, params) for prompt in prompts])
        alone = [finished(engine, [engine.submit(prompts[n], params)])[0] for n in (0, 2)]
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].token_ids == () and "not finite" in str(outputs[1].choices[0].error)
    assert [output.token_ids for output in outputs[::2]] == [one.token_ids for one in alone]

"""Logprobs do not know whether their token was drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_engine import EOS, VOCAB, decoder, judged, prompt_of, tiny_engine

from furcate.config import SamplingParams
from furcate.drafters.adversary import SHAPES, Adversary
from furcate.drafters.base import Drafter
from furcate.engine.naive import Judge
from furcate.engine.outputs import Choice

EXACT = 1e-9
TOLD = 2e-6  # logprobs are told in float32: half a unit in the last place of numbers up to 32
LAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.3, "min_p": 0.02, "logit_bias": {5: 3.0}, "presence_penalty": -0.5},
)


def params(law: dict[str, Any], **more: Any) -> SamplingParams:
    asked = {"max_tokens": 24, "seed": 11, "ignore_eos": True, "logprobs": True, **law, **more}
    return SamplingParams(**asked)


def hostile(prompt: list[int], asked: SamplingParams, shape: str) -> Adversary:
    stream = [*prompt, *judged(prompt, asked)]
    return Adversary([stream], shape, vocab=VOCAB, seed=3)


def answer(drafter: str | Drafter, prompt: list[int], asked: SamplingParams) -> Choice:
    with tiny_engine(drafter) as engine:
        return engine.collect(engine.submit(prompt, asked)).choices[0]


def assert_same_logprobs(a: Choice, b: Choice) -> None:
    assert a.logprobs is not None
    assert b.logprobs is not None
    assert len(a.logprobs) == len(a.token_ids) == len(b.logprobs)
    for x, y in zip(a.logprobs, b.logprobs, strict=True):
        assert x.token_id == y.token_id
        assert x.logprob == pytest.approx(y.logprob, abs=EXACT)
        assert [token for token, _ in x.top] == [token for token, _ in y.top]
        assert [v for _, v in x.top] == pytest.approx([v for _, v in y.top], abs=EXACT)


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_logprobs_are_those_of_plain_decoding(law: dict[str, Any], mode: str) -> None:
    prompt, asked = prompt_of(20), params(law, top_logprobs=5, logprobs_mode=mode)
    plain = answer("off", prompt, asked)
    for shape in ("twins", "hidden", "bushy"):
        drafter = hostile(prompt, asked, shape)
        drafted = answer(drafter, prompt, asked)
        assert drafted.token_ids == plain.token_ids
        assert drafter.accepted > 5
        assert_same_logprobs(drafted, plain)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_raw_logprobs_are_the_models_own(law: dict[str, Any]) -> None:
    prompt, asked = prompt_of(20), params(law, top_logprobs=3)
    choice = answer(hostile(prompt, asked, "any"), prompt, asked)
    judge = Judge(decoder(), prompt, asked)
    assert choice.logprobs is not None
    for entry in choice.logprobs:
        want_V = judge.next_logits()[0, 0].log_softmax(-1)
        assert entry.logprob == pytest.approx(float(want_V[entry.token_id]), abs=TOLD)
        best = want_V.topk(3)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [v for _, v in entry.top] == pytest.approx(best.values.tolist(), abs=TOLD)
        judge.append(entry.token_id)


@pytest.mark.parametrize("law", LAWS[1:], ids=str)
def test_processed_logprobs_are_those_of_the_law_that_was_sampled(law: dict[str, Any]) -> None:
    prompt, asked = prompt_of(20), params(law, top_logprobs=3, logprobs_mode="processed")
    choice = answer(hostile(prompt, asked, "any"), prompt, asked)
    judge = Judge(decoder(), prompt, asked)
    assert choice.logprobs is not None
    for entry in choice.logprobs:
        processed = judge.processed(judge.next_logits(), asked)
        logits_V, allowed = processed.logits_BRV[0, 0], processed.allowed_BRV
        if allowed is not None:
            logits_V = torch.where(allowed[0, 0], logits_V, -torch.inf)
        temperature = float(torch.tensor(asked.temperature))
        want_V = (logits_V / temperature).log_softmax(-1)
        assert entry.logprob == pytest.approx(float(want_V[entry.token_id]), abs=TOLD)
        judge.append(entry.token_id)


def test_the_check_can_fail() -> None:
    prompt, asked = prompt_of(20), params(LAWS[1], top_logprobs=2)
    raw = answer("off", prompt, asked)
    processed = answer("off", prompt, asked.model_copy(update={"logprobs_mode": "processed"}))
    with pytest.raises(AssertionError):
        assert_same_logprobs(raw, processed)


def test_in_a_mixed_batch_each_gets_what_it_asked_for() -> None:
    prompt = prompt_of(20)
    wishes: list[dict[str, Any]] = [
        {"logprobs": False},
        {"top_logprobs": 0},
        {"top_logprobs": 7, "temperature": 0.5},
        {"top_logprobs": 2, "logprobs_mode": "processed"},
        {"top_logprobs": 4, "logprobs_mode": "processed", "temperature": 0},
    ]
    asked = [params(LAWS[1], **wish) for wish in wishes]
    streams = [[*prompt, *judged(prompt, p)] for p in asked]
    with tiny_engine(Adversary(streams, "any", vocab=VOCAB)) as engine:
        names = [engine.submit(prompt, p) for p in asked]
        together = [engine.collect(name).choices[0] for name in names]
    assert together[0].logprobs is None
    for p, choice in zip(asked[1:], together[1:], strict=True):
        assert choice.logprobs is not None
        assert all(len(entry.top) == p.top_logprobs for entry in choice.logprobs)
        assert_same_logprobs(choice, answer("off", prompt, p))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stream_carries_the_logprobs_of_its_tokens(shape: str) -> None:
    prompt, asked = prompt_of(20), params(LAWS[1], top_logprobs=1, ignore_eos=False)
    with tiny_engine(hostile(prompt, asked, shape)) as engine:
        name = engine.submit(prompt, asked)
        pieces = []
        while (piece := engine.next_piece(name)) is not None:
            pieces.append(piece)
    told = [entry for piece in pieces for entry in piece.logprobs or ()]
    assert [entry.token_id for entry in told] == [t for piece in pieces for t in piece.token_ids]
    last = pieces[-1].choice
    assert last is not None
    assert tuple(told) == last.logprobs
    assert EOS not in last.token_ids[:-1]

"""How close a call must be for rounding to explain it follows from the target's dtype."""

from __future__ import annotations

import pytest
import torch
from small_models import tiny_decoder
from tiny_engine import VOCAB, prompt_of

from furcate.config import SamplingParams
from furcate.engine.compare import TIE, Parting, explain, tie_width
from furcate.engine.naive import Judge, naive
from furcate.models.decoder import Decoder

GREEDY = SamplingParams(temperature=0, max_tokens=12, seed=1)
HALVES = [torch.bfloat16, torch.float16]


def decoder_in(dtype: torch.dtype) -> Decoder:
    return tiny_decoder(dtype, 0, VOCAB)


def first_tokens(target: Decoder, params: SamplingParams, seed: int, rank: int) -> Parting:
    """What is said of an answer that begins with the token of this rank, not the likeliest."""
    logits_V = Judge(target, prompt_of(9, seed), params).next_logits()[0, 0].float()
    order = logits_V.argsort(descending=True)
    judge = Judge(target, prompt_of(9, seed), params)
    return explain(judge, [int(order[rank])], [int(order[0])], 0)


def test_a_tie_is_as_wide_as_a_few_units_in_the_last_place_of_the_largest_logit() -> None:
    logits_V = torch.tensor([-20.0, 3.0, -torch.inf])
    assert tie_width(logits_V) == tie_width(logits_V.double()) == TIE
    assert tie_width(logits_V.bfloat16()) == 4 * 16 * 2**-7
    assert tie_width(logits_V.half()) == 4 * 16 * 2**-10
    assert tie_width(torch.zeros(3, dtype=torch.float16)) == TIE


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_near_tie_in_half_precision_is_a_tie_and_names_its_dtype(dtype: torch.dtype) -> None:
    target = decoder_in(dtype)
    parts = [first_tokens(target, GREEDY, seed, 1) for seed in range(60)]
    near = [part for part in parts if TIE < part.gap <= part.tie_below]
    assert near and all(part.tie for part in near)
    assert {part.dtype for part in parts} == {str(dtype).removeprefix("torch.")}


def test_the_same_gap_in_float32_is_a_difference() -> None:
    parts = [first_tokens(decoder_in(torch.float32), GREEDY, seed, 1) for seed in range(60)]
    assert {part.tie_below for part in parts} == {TIE}
    assert any(TIE < part.gap < 0.02 and not part.tie for part in parts)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_wrong_token_in_half_precision_is_found(dtype: torch.dtype) -> None:
    target, found = decoder_in(dtype), []
    for seed in range(20):
        right = naive(target, prompt_of(9, seed), GREEDY)
        wrong = [*right[:7], (right[7] + 1) % VOCAB, *right[8:]]
        found.append(explain(Judge(target, prompt_of(9, seed), GREEDY), wrong, right, 7))
    assert sum(not part.tie for part in found) >= 18


@pytest.mark.parametrize("law", [{"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.5}], ids=str)
def test_a_token_that_a_filter_bars_is_found_in_half_precision(law: dict[str, float]) -> None:
    params = SamplingParams(temperature=1, max_tokens=1, seed=5, **law)  # type: ignore[arg-type]
    part = first_tokens(decoder_in(torch.bfloat16), params, 0, VOCAB - 1)
    assert not part.tie and part.gap == torch.inf

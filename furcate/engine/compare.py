"""Two streams of one request side by side: equal, parted where rounding decides, or one is wrong.

Legend: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.config import DraftOptions, SamplingParams
from furcate.engine.build import build
from furcate.engine.engine import Engine
from furcate.engine.naive import Judge, law_of
from furcate.engine.outputs import Output
from furcate.verify.filters import floor_of

__all__ = ["TIE", "Parting", "explain", "first_difference", "parting", "plain_twin", "tie_width"]

TIE = 1e-4  # scores (logits + T * noise) or filter thresholds this close are decided by rounding
HALVES = (torch.bfloat16, torch.float16)
# In half precision: two computations of a logit, each to the nearest, are up to a unit in the last
# place apart, so that the gap between two logits moves by two; as much again is for what was
# rounded on the way to them.
UNITS = 4


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two answers part, and how close the call was.

    `gap` is what the less likely of the two tokens lacks to be the choice, under the slow loop's
    own scores. `tie` says that rounding alone explains it: the two best allowed scores lie within
    `tie_below`, or a filter's threshold moved by as much lets the token in. If it does not, one of
    the two answers is wrong.
    """

    index: int  # counted in tokens of the answer, from 0
    drafted: int | None  # token ids; None: that answer had ended
    plain: int | None
    gap: float
    tie: bool
    tie_below: float = TIE  # `tie_width` at that place
    dtype: str = "float32"  # in which the target was computed


def tie_width(logits_V: Tensor) -> float:
    """How close two scores must be for rounding to choose between them, by the logits' dtype.

    TIE, and in half precision at least UNITS units in the last place of the largest logit.
    """
    if logits_V.dtype not in HALVES:
        return TIE
    numbers = torch.finfo(logits_V.dtype)
    largest = float(logits_V.masked_fill(~logits_V.isfinite(), 0.0).abs().max())
    unit = math.ldexp(numbers.eps, math.frexp(max(largest, numbers.tiny))[1] - 1)
    return max(TIE, UNITS * unit)


def plain_twin(engine: Engine) -> Engine:
    """The same weights, decoding one token a round; raises BadRequest if memory has no room."""
    parts = engine.built
    decoder = parts.round.target.decoder
    return Engine(build(decoder, engine.tokenizer, "off", parts.options, DraftOptions()))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two answers differ, which may be the end of one of them."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def parting(
    engine: Engine, drafted: Output, plain: Output, params: SamplingParams
) -> Parting | None:
    """Where and why an engine's answer leaves plain decoding; None where it does not.

    Args:
        engine: whose target judges the place.
        drafted, plain: answers to one prompt with one seed and the same `params`.
    """
    index = first_difference(drafted.token_ids, plain.token_ids)
    if index is None:
        return None
    parts = engine.built
    params = params.model_copy(update={"seed": drafted.seed})
    eos = () if params.ignore_eos else parts.limits.eos_ids
    judge = Judge(
        parts.round.target.decoder,
        drafted.prompt_token_ids,
        params,
        tuple(dict.fromkeys((*eos, *params.stop_token_ids))),
    )
    return explain(judge, drafted.token_ids, plain.token_ids, index)


@torch.inference_mode()
def explain(judge: Judge, drafted: Sequence[int], plain: Sequence[int], index: int) -> Parting:
    """Walk the slow loop to `index`, where the streams part, and measure how close the call was.

    `judge` is fresh: nothing has been appended to it yet.
    """
    for token in drafted[:index]:
        judge.append(token)
    bounds = _bounds(judge)
    pair = [s[index] if index < len(s) else None for s in (drafted, plain)]
    gap = max(torch.inf if token is None else bounds.shortfall(token) for token in pair)
    dtype = str(judge.decoder.dtype).removeprefix("torch.")
    return Parting(index, pair[0], pair[1], gap, gap <= bounds.width, bounds.width, dtype)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Scores at one position, and which tokens the filters keep for sure or perhaps."""

    score_V: Tensor
    sure_V: Tensor  # bool, kept whichever way the thresholds round
    perhaps_V: Tensor  # bool, kept if they round its way
    width: float  # of a rounding tie

    def shortfall(self, token: int) -> float:
        """What the token's score lacks to win; infinite if a filter bars it for sure."""
        if not self.perhaps_V[token]:
            return torch.inf
        rivals_V = self.score_V.masked_fill(~self.sure_V, -torch.inf)
        return max(0.0, float(rivals_V.max() - self.score_V[token]))


def _bounds(judge: Judge) -> _Bounds:
    """The judge's scores at its position, with every filter threshold moved by a tie both ways."""
    logits_BRV = judge.next_logits()
    width = tie_width(logits_BRV[0, 0].to(judge.decoder.dtype))
    bare = judge.params.model_copy(update={"top_k": 0, "top_p": 1.0, "min_p": 0.0})
    masked = judge.processed(logits_BRV, bare)
    allowed_BRV = masked.allowed_BRV
    if allowed_BRV is None:
        allowed_BRV = torch.ones_like(masked.scores_BRV, dtype=torch.bool)
    kept_BRV = masked.logits_BRV.masked_fill(~allowed_BRV, -torch.inf)
    floors = [_floor(judge, kept_BRV, top_p) for top_p in _around(judge.params, width)]
    return _Bounds(
        score_V=masked.scores_BRV[0, 0],
        sure_V=(kept_BRV > max(floors) + width)[0, 0],
        perhaps_V=((kept_BRV >= min(floors) - width) & allowed_BRV)[0, 0],
        width=width,
    )


def _around(params: SamplingParams, width: float) -> list[float]:
    """top_p, and how far rounding may move a sum of probabilities below and above it.

    Logits that are off by half a width each multiply the odds of any set of tokens by at most
    exp(width / T).
    """
    top_p = params.top_p
    if top_p >= 1:
        return [1.0]
    moved = [top_p - TIE, top_p + TIE]
    if width > TIE and params.temperature > 0:
        odds = math.log(top_p / (1 - top_p))
        moved += [_chance(odds + step / params.temperature) for step in (-width, width)]
    return [max(min(moved), TIE / 2), top_p, min(max(moved), 1.0)]


def _chance(log_odds: float) -> float:
    return 1 / (1 + math.exp(min(-log_odds, 700.0)))  # the exponential of more is no float


def _floor(judge: Judge, kept_BRV: Tensor, top_p: float) -> float:
    """The value a logit must reach to pass the filters."""
    params = judge.params.model_copy(update={"top_p": top_p})
    law = law_of(params, judge.prompt, judge.output, judge.stop_ids, kept_BRV)
    return float(floor_of(kept_BRV, law)) if law.needs.filters else -torch.inf

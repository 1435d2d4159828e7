"""The one chain from logits to scores and choices, for plain decoding and every node of a tree.

Order: logit_bias, penalties, min_tokens and allowed tokens, temperature, top_k, top_p, min_p.
Legend: B requests, R rows, D levels below the root, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.verify.filters import floor_of
from furcate.verify.law import Law, Rows, noise_of
from furcate.verify.penalties import penalised

__all__ = ["Choice", "Lawful", "Processed", "choose", "going_on", "process"]


@dataclass(frozen=True, slots=True)
class Lawful:
    """What a row's law is told by, its temperature aside."""

    logits_BRV: Tensor  # after bias and penalties; any float dtype
    allowed_BRV: Tensor | None  # bool; R may be 1; None: every token of a finite logit
    floor_BR: Tensor | None = None  # least logit of a token that may be chosen


@dataclass(frozen=True, slots=True)
class Processed:
    """What a choice is made from, float32 or float64.

    `scores` = logits + T * noise, not divided by T. A token that may not be chosen is told by
    `allowed` alone, never by a low score; None: every token may.
    """

    logits_BRV: Tensor  # after bias and penalties, before temperature
    scores_BRV: Tensor
    allowed_BRV: Tensor | None  # bool; R may be 1

    @property
    def lawful(self) -> Lawful:
        """The same without the noise."""
        return Lawful(self.logits_BRV, self.allowed_BRV)


@dataclass(frozen=True, slots=True)
class Choice:
    """The target's own choice at each row."""

    token_BR: Tensor  # int64
    broken_BR: Tensor  # bool, no token could be chosen: the row's logits are NaN or infinite


def process(logits_BRV: Tensor, law: Law, rows: Rows) -> Processed:
    """Apply the law to the logits of each row; no host synchronisation, fixed shapes.

    Args:
        logits_BRV: any float dtype; half precision is lifted to float32. Not written to.
        law: how each request is sampled.
        rows: which node of which tree each row is.
    """
    logits_BRV = _lifted(logits_BRV)
    if law.bias_BV is not None:
        logits_BRV = logits_BRV + law.bias_BV[:, None]
    if law.needs.penalties:
        logits_BRV = penalised(logits_BRV, law, rows.draft)
    allowed_BRV = _mask(law, rows, logits_BRV.shape[-1])
    if law.needs.filters:
        allowed_BRV = _filtered(logits_BRV, allowed_BRV, law)
    return Processed(logits_BRV, _scores(logits_BRV, law, rows), allowed_BRV)


def choose(processed: Processed) -> Choice:
    """The best allowed token of each row; equal scores go to the lower id.

    A row is broken where its best score is not finite.
    """
    scores_BRV = processed.scores_BRV
    if processed.allowed_BRV is not None:
        # an allowed token beats a forbidden one whatever its score
        scores_BRV = scores_BRV.clamp_min(torch.finfo(scores_BRV.dtype).min)
        scores_BRV = torch.where(processed.allowed_BRV, scores_BRV, -torch.inf)
    best = scores_BRV.max(dim=-1)  # documented to return the first of equal values
    return Choice(best.indices, ~best.values.isfinite())


def _lifted(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _mask(law: Law, rows: Rows, vocab: int) -> Tensor | None:
    """Tokens that allowed_token_ids and min_tokens leave, bool [B, 1 or R, V]; None: all.

    Stop ids are barred while fewer than min_tokens output tokens stand before the row's choice.
    Where allowed_token_ids leaves nothing but stop ids, min_tokens gives way.
    """
    allowed_B1V = None if law.allowed_BV is None else law.allowed_BV[:, None]
    if not law.needs.min_tokens:
        return allowed_B1V
    going_BV, bars_BR = going_on(law, rows, vocab)
    going_B1V = going_BV[:, None]
    otherwise_B1V = torch.ones_like(going_B1V) if allowed_B1V is None else allowed_B1V
    return torch.where(bars_BR[:, :, None], going_B1V, otherwise_B1V)


def going_on(law: Law, rows: Rows, vocab: int) -> tuple[Tensor, Tensor]:
    """Allowed tokens that do not end a request, bool [B, V], and the rows that must not, [B, R]."""
    assert law.min_tokens_B is not None
    going_BV = ~_stops(law.stop_BS, vocab)
    if law.allowed_BV is not None:
        going_BV = going_BV & law.allowed_BV
    before_BR = law.output_B[:, None] + rows.draft.depth_BR
    return going_BV, (before_BR < law.min_tokens_B[:, None]) & going_BV.any(-1, keepdim=True)


def _stops(stop_BS: Tensor, vocab: int) -> Tensor:
    """bool [B, V]: which tokens end the request."""
    # pads (-1) go to a column of their own, which is cut off
    stop_BV = stop_BS.new_zeros((stop_BS.shape[0], vocab + 1), dtype=torch.bool)
    column_BS = torch.where(stop_BS < 0, vocab, stop_BS)
    return stop_BV.scatter_(1, column_BS, True)[:, :vocab]


def _filtered(logits_BRV: Tensor, allowed_BRV: Tensor | None, law: Law) -> Tensor:
    if allowed_BRV is None:
        return logits_BRV >= floor_of(logits_BRV, law)
    masked_BRV = torch.where(allowed_BRV, logits_BRV, -torch.inf)
    return (masked_BRV >= floor_of(masked_BRV, law)) & allowed_BRV


def _scores(logits_BRV: Tensor, law: Law, rows: Rows) -> Tensor:
    if not law.needs.noise:
        return logits_BRV
    batch, count, vocab = logits_BRV.shape
    noise_BDV = rows.noise_BDV
    if noise_BDV is None:
        noise_BDV = noise_of(law, rows.length_B, rows.depth, vocab)
    temperature_B11 = law.temperature_B[:, None, None].to(logits_BRV.dtype)
    scaled_BDV = noise_BDV.to(logits_BRV.dtype) * temperature_B11
    # all nodes of a depth share one noise vector
    first_B1 = torch.arange(batch, device=logits_BRV.device)[:, None] * scaled_BDV.shape[1]
    index = (first_B1 + rows.draft.depth_BR).flatten()
    noise_BRV = scaled_BDV.flatten(0, 1).index_select(0, index).view(batch, count, vocab)
    return noise_BRV.add_(logits_BRV)

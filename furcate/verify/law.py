"""The sampling law of a batch as tensors, and the rows it is applied to.

Legend: B requests, R rows of a draft, D levels below the root, V vocabulary, S stop ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.config import SamplingParams
from furcate.kernels.draft import Draft
from furcate.verify.noise import gumbel_noise

__all__ = ["Law", "Needs", "Rows", "needs_of", "noise_of", "plain_rows"]


@dataclass(frozen=True, slots=True)
class Needs:
    """Which steps of the chain any request of the batch uses; fixed while a round is captured.

    A step that is run for the sake of one request leaves the others' numbers as they are.
    """

    noise: bool = False  # some temperature is above 0
    penalties: bool = False
    min_tokens: bool = False
    top_k: int = 0  # the largest top_k in use, 0: none
    top_p: bool = False
    min_p: bool = False
    bias: bool = False
    allowed: bool = False  # allowed_token_ids

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p or self.min_p


@dataclass(frozen=True, slots=True)
class Law:
    """How each request of a batch is sampled. A field that no request needs is None."""

    needs: Needs
    temperature_B: Tensor  # float32, 0: greedy
    seed_B: Tensor  # int64, the bit pattern of the 64-bit seed
    choice_B: Tensor  # int64, index among the request's n choices
    output_B: Tensor  # int64, output tokens committed so far, the root among them if it is one
    stop_BS: Tensor  # int64, EOS and stop ids; -1 pads
    top_k_B: Tensor | None = None  # int64, off: 0, -1 or V
    top_p_B: Tensor | None = None  # float32, off: 1
    min_p_B: Tensor | None = None  # float32, off: 0
    repetition_B: Tensor | None = None  # float32, off: 1
    presence_B: Tensor | None = None  # float32, off: 0
    frequency_B: Tensor | None = None  # float32, off: 0
    min_tokens_B: Tensor | None = None  # int64
    bias_BV: Tensor | None = None  # float32
    allowed_BV: Tensor | None = None  # bool
    prompt_BV: Tensor | None = None  # bool, the token occurs in the prompt
    counts_BV: Tensor | None = None  # int64, occurrences in the committed output

    @property
    def only_noise(self) -> bool:
        """Whether a choice is the argmax of logits + T * noise over the whole vocabulary."""
        needs = self.needs
        more = needs.filters or needs.penalties or needs.min_tokens
        return not more and self.bias_BV is None and self.allowed_BV is None


@dataclass(frozen=True, slots=True)
class Rows:
    """What the rows of logits are: the nodes of a draft below a root at position `length`."""

    draft: Draft
    length_B: Tensor  # int64, absolute position of the root
    depth: int  # D, deepest level the draft can have
    noise_BDV: Tensor | None = None  # float32 [B, D + 1, V], where a drafter has drawn it already
    next_BR: Tensor | None = None  # int64, position of each row's choice, where it is made already


def plain_rows(token_B: Tensor, length_B: Tensor) -> Rows:
    """One row per request: the last committed token alone, as plain decoding has it."""
    tokens_BR = token_B[:, None]
    zero_BR = torch.zeros_like(tokens_BR)
    one_BR = torch.ones_like(tokens_BR)
    value_BR = torch.zeros_like(tokens_BR, dtype=torch.float32)
    draft = Draft(tokens_BR, zero_BR, zero_BR, one_BR, value_BR, one_BR[:, 0])
    return Rows(draft, length_B, depth=0)


def noise_of(law: Law, length_B: Tensor, depth: int, vocab: int) -> Tensor:
    """The target's noise, float32 [B, depth + 1, V]: entry d decides the children of depth d.

    A row at depth d below a root at position L samples the token of position L + d + 1.
    """
    position_BD = length_B[:, None] + torch.arange(1, depth + 2, device=length_B.device)
    return gumbel_noise(law.seed_B, position_BD, law.choice_B, vocab)


def needs_of(params: Sequence[SamplingParams], vocab: int) -> Needs:
    """The steps that a batch of requests uses."""
    return Needs(
        noise=any(p.temperature > 0 for p in params),
        penalties=any(
            p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
            for p in params
        ),
        min_tokens=any(p.min_tokens > 0 for p in params),
        # greedy requests are not filtered: their best token passes every filter
        top_k=max(
            (p.top_k for p in params if p.temperature > 0 and 0 < p.top_k < vocab), default=0
        ),
        top_p=any(p.temperature > 0 and p.top_p < 1 for p in params),
        min_p=any(p.temperature > 0 and p.min_p > 0 for p in params),
        bias=any(p.logit_bias for p in params),
        allowed=any(p.allowed_token_ids is not None for p in params),
    )

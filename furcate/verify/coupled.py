"""The default rule: follow the target's own choices down the tree, then emit its choice.

At a node at absolute position t the target's choice is argmax(logits + T * g_t), where the noise
g_t depends on (request seed, t, token id, choice) alone. By induction along the path those are the
choices of plain decoding, whatever the tree: tokens, not only their law, are the same.
Legend: B requests, R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.kernels.backend import TORCH, Kernels
from furcate.kernels.draft import Verdict
from furcate.kernels.draws import Draws
from furcate.kernels.lawful import Edits, Filters, Limited, Limiter, Penalties
from furcate.verify.law import Law, Rows
from furcate.verify.process import Choice, Lawful, choose, going_on, process

__all__ = ["Verified", "verify"]


@dataclass(frozen=True, slots=True)
class Verified:
    """A verdict, and what it was decided from."""

    verdict: Verdict
    processed: Lawful

    @property
    def broken_B(self) -> Tensor:
        """bool: the verdict ends where a row's logits allow no choice."""
        return self.verdict.count_B <= self.verdict.accepted_B


def verify(logits_BRV: Tensor, law: Law, rows: Rows, kernels: Kernels = TORCH) -> Verified:
    """Judge a draft by the target's logits at its rows; plain decoding is a draft of one row."""
    processed, choice = _chosen(logits_BRV, law, rows, kernels)
    verdict = kernels.accept(rows.draft, choice.token_BR, rows.depth, choice.broken_BR)
    return Verified(verdict, processed)


def _chosen(logits_BRV: Tensor, law: Law, rows: Rows, kernels: Kernels) -> tuple[Lawful, Choice]:
    """The target's choice at every row: by kernels that know the law, where there are such."""
    if kernels.sample is None or kernels.limit is None:
        processed = process(logits_BRV, law, rows)
        return processed.lawful, choose(processed)
    limited = _limited(logits_BRV, law, rows, kernels.limit)
    position_BR = rows.next_BR
    if position_BR is None:
        position_BR = rows.length_B[:, None] + rows.draft.depth_BR + 1
    broken_BR = torch.empty_like(position_BR, dtype=torch.bool)
    draws = Draws(law.temperature_B, law.seed_B, law.choice_B, position_BR.flatten())
    floor_T = None if limited.floor_BR is None else limited.floor_BR.view(-1)
    token_T = kernels.sample(limited.logits_BRV.flatten(0, 1), draws, broken_BR.view(-1), floor_T)
    lawful = Lawful(limited.logits_BRV, None, limited.floor_BR)
    return lawful, Choice(token_T.view_as(position_BR), broken_BR)


def _limited(logits_BRV: Tensor, law: Law, rows: Rows, limit: Limiter) -> Limited:
    """The law up to its noise; a law that is noise alone leaves the logits as they are."""
    if law.only_noise:
        return Limited(logits_BRV)
    needs, vocab = law.needs, logits_BRV.shape[2]
    going = going_on(law, rows, vocab) if needs.min_tokens else (None, None)
    edits = Edits(law.bias_BV, _penalties(law), law.allowed_BV, *going)
    filters = Filters(
        law.temperature_B,
        top_k_B=law.top_k_B if needs.top_k else None,
        top_p_B=law.top_p_B if needs.top_p else None,
        min_p_B=law.min_p_B if needs.min_p else None,
    )
    return limit(logits_BRV, rows.draft, edits, filters)


def _penalties(law: Law) -> Penalties | None:
    if not law.needs.penalties:
        return None
    repetition_B, presence_B, frequency_B = law.repetition_B, law.presence_B, law.frequency_B
    assert repetition_B is not None and presence_B is not None and frequency_B is not None
    assert law.prompt_BV is not None and law.counts_BV is not None
    return Penalties(repetition_B, presence_B, frequency_B, law.prompt_BV, law.counts_BV)

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
from furcate.verify.law import Law, Rows
from furcate.verify.process import Choice, Lawful, choose, process

__all__ = ["Verified", "verify"]


@dataclass(frozen=True, slots=True)
class Verified:
    """A verdict, and what it was decided from."""

    verdict: Verdict
    broken_B: Tensor  # bool, the verdict ends where a row's logits allow no choice
    processed: Lawful


def verify(logits_BRV: Tensor, law: Law, rows: Rows, kernels: Kernels = TORCH) -> Verified:
    """Judge a draft by the target's logits at its rows; plain decoding is a draft of one row."""
    processed, choice = _chosen(logits_BRV, law, rows, kernels)
    verdict = kernels.accept(rows.draft, choice.token_BR, rows.depth, choice.broken_BR)
    return Verified(verdict, verdict.count_B <= verdict.accepted_B, processed)


def _chosen(logits_BRV: Tensor, law: Law, rows: Rows, kernels: Kernels) -> tuple[Lawful, Choice]:
    """The target's choice at every row: by a sampler that draws its noise on the fly, where there
    is one and it knows the whole law."""
    if kernels.sample is None or not law.only_noise:
        processed = process(logits_BRV, law, rows)
        return processed.lawful, choose(processed)
    position_BR = rows.length_B[:, None] + rows.draft.depth_BR + 1
    broken_BR = torch.empty_like(position_BR, dtype=torch.bool)
    draws = Draws(law.temperature_B, law.seed_B, law.choice_B, position_BR.flatten())
    token_T = kernels.sample(logits_BRV.flatten(0, 1), draws, broken_BR.view(-1))
    return Lawful(logits_BRV, None), Choice(token_T.view_as(position_BR), broken_BR)

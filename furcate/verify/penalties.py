"""Repetition, presence and frequency penalties, exact on every path of a tree.

Legend: B requests, R rows of a draft, V vocabulary; a row's path is the row and its ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.kernels.draft import Draft
from furcate.verify.law import Law

__all__ = ["penalised"]


@dataclass(frozen=True, slots=True)
class _Strength:
    """The options of each request in the logits' dtype, shape [B, 1, 1]."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor


def penalised(logits_BRV: Tensor, law: Law, draft: Draft) -> Tensor:
    """Logits after penalties: counts are the committed tokens and the row's own path.

    Repetition looks at prompt and output, presence and frequency at the output only (the meaning
    of vLLM). The root is committed, so the path's share of the counts begins below it.
    """
    strength = _strength(law, logits_BRV.dtype)
    counts_BV, prompt_BV = _given(law.counts_BV), _given(law.prompt_BV)
    base_BRV = _penalise(logits_BRV, counts_BV[:, None], prompt_BV[:, None], strength)
    if draft.tokens_BR.shape[1] == 1:
        return base_BRV
    # The committed counts hold for all rows alike. Only tokens of the tree can occur more often on
    # a path: those R x R entries are computed again, with the path's share.
    token_BRR = draft.tokens_BR[:, None, :].expand(-1, draft.tokens_BR.shape[1], -1)
    counts_BRR = counts_BV.gather(1, draft.tokens_BR)[:, None] + _on_path(draft)
    prompt_BRR = prompt_BV.gather(1, draft.tokens_BR)[:, None]
    edit_BRR = _penalise(logits_BRV.gather(2, token_BRR), counts_BRR, prompt_BRR, strength)
    return base_BRV.scatter_(2, token_BRR, edit_BRR)


def _on_path(draft: Draft) -> Tensor:
    """int64 [B, R, R]: how often row j's token occurs on row i's path below the root."""
    slot_R = torch.arange(draft.tokens_BR.shape[1], device=draft.tokens_BR.device)
    path_BRR = (slot_R <= slot_R[:, None]) & (slot_R[:, None] < draft.end_BR[:, None, :])
    path_BRR = path_BRR & (slot_R > 0)
    same_BRR = draft.tokens_BR[:, :, None] == draft.tokens_BR[:, None, :]
    # float32 holds these counts exactly, and its product is fast everywhere
    return (path_BRR.float() @ same_BRR.float()).long()


def _penalise(logits: Tensor, counts: Tensor, prompt: Tensor, strength: _Strength) -> Tensor:
    written = counts > 0
    repetition = torch.where(written | prompt, strength.repetition, 1.0)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    return logits - (strength.frequency * counts + strength.presence * written)


def _strength(law: Law, dtype: torch.dtype) -> _Strength:
    fields = (law.repetition_B, law.presence_B, law.frequency_B)
    return _Strength(*(_given(field)[:, None, None].to(dtype) for field in fields))


def _given(field: Tensor | None) -> Tensor:
    assert field is not None, "needs.penalties without the tensors that penalties read"
    return field

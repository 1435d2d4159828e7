"""The map of a small draft vocabulary as EAGLE-3 files hold it: offsets and a mask.

target id = draft id + d2t[draft id]; t2d[target id] says whether a token is among them.

Legend: D draft vocabulary, V vocabulary of the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.errors import BadFile, UserError
from furcate.heads.tensor_files import Kept, Kepts

__all__ = ["D2T", "T2D", "DraftIds", "offsets", "read_draft_ids", "rows_in_order"]

D2T, T2D = "d2t", "t2d"
_WHOLE_NUMBERS = (torch.int64, torch.int32)
_OFFSETS = "it holds offsets: target id = draft id + d2t[draft id]"
_SEEMS_IDS = f"it seems to hold target ids, but {_OFFSETS}"


@dataclass(frozen=True, slots=True)
class DraftIds:
    """What d2t and t2d say."""

    token_D: Tensor | None = None  # ascending; None: the vocabularies are one
    order_D: Tensor | None = None  # rows of the output matrix in that order; None: as they are
    fault: UserError | None = None  # token_D is then only a stand-in of the right length


def read_draft_ids(tensors: Kepts, draft: int, vocab: int) -> DraftIds:
    """The ids of a draft vocabulary of `draft` out of `vocab` tokens; none without d2t."""
    if D2T not in tensors:
        return DraftIds()
    stand_in = torch.arange(draft) if draft < vocab else None
    try:
        ids_D = _ids(tensors[D2T], draft, vocab)
        if T2D in tensors:
            _check_mask(tensors[T2D], ids_D, tensors[D2T], vocab)
    except BadFile as fault:
        return DraftIds(stand_in, fault=fault)
    ascending, order_D = ids_D.sort()
    sorted_already = torch.equal(ascending, ids_D)
    return DraftIds(None if draft == vocab else ascending, None if sorted_already else order_D)


def offsets(token_D: Tensor, vocab: int) -> dict[str, Tensor]:
    """d2t and t2d of ascending ids."""
    return {D2T: token_D - torch.arange(len(token_D)), T2D: _mask(token_D, vocab)}


def rows_in_order(kept: Kept, order_D: Tensor) -> Kept:
    """A matrix with its rows in another order."""
    return Kept(kept.name, kept.shape, kept.dtype, lambda: kept.read()[order_D])


def _ids(kept: Kept, draft: int, vocab: int) -> Tensor:
    if kept.dtype not in _WHOLE_NUMBERS:
        raise BadFile("must hold whole numbers", field=kept.name, value=kept.dtype)
    if kept.shape != (draft,):
        raise BadFile(f"must have shape ({draft},)", field=kept.name, value=kept.shape)
    stored_D = kept.read().to(torch.int64)
    ids_D = stored_D + torch.arange(draft)
    hint = _SEEMS_IDS if _ascends(stored_D, vocab) else _OFFSETS
    outside_D = ids_D[(ids_D < 0) | (ids_D >= vocab)]
    if len(outside_D):
        raise BadFile(
            f"leads out of the target's {vocab} tokens",
            field=kept.name,
            value=int(outside_D[0]),
            hint=hint,
        )
    if not _distinct(ids_D, vocab):
        raise BadFile("leads two draft ids to one token", field=kept.name, hint=hint)
    return ids_D


def _check_mask(kept: Kept, ids_D: Tensor, d2t: Kept, vocab: int) -> None:
    if kept.dtype != torch.bool or kept.shape != (vocab,):
        found = (kept.dtype, kept.shape)
        raise BadFile(f"must hold {vocab} booleans", field=kept.name, value=found)
    told_V = kept.read()
    differ_X = (_mask(ids_D, vocab) != told_V).nonzero().flatten()
    if len(differ_X):
        stored_D = d2t.read().to(torch.int64)
        as_ids = _ascends(stored_D, vocab) and torch.equal(_mask(stored_D, vocab), told_V)
        raise BadFile(
            "disagrees with d2t at a token",
            field=kept.name,
            value=int(differ_X[0]),
            hint=f"d2t is wrong: {_SEEMS_IDS}" if as_ids else None,
        )


def _mask(ids_D: Tensor, vocab: int) -> Tensor:
    mask_V = torch.zeros(vocab, dtype=torch.bool)
    mask_V[ids_D] = True
    return mask_V


def _ascends(ids_D: Tensor, vocab: int) -> bool:
    inside = bool((ids_D >= 0).all()) and bool((ids_D < vocab).all())
    return inside and bool((ids_D.diff() > 0).all())


def _distinct(ids_D: Tensor, vocab: int) -> bool:
    inside = bool((ids_D >= 0).all()) and bool((ids_D < vocab).all())
    return inside and int(torch.bincount(ids_D, minlength=vocab).max()) == 1

"""The longest path of a tree that the target's own choices follow; torch reference.

Legend: B requests, R rows, D deepest level, W words of 32 rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from furcate.kernels.draft import Draft, Verdict

__all__ = ["accept", "accept_words", "ancestor_words"]

WORD = 32


def accept(draft: Draft, choice_BR: Tensor, depth: int, broken_BR: Tensor | None = None) -> Verdict:
    """Walk each tree along the choices, all nodes at once.

    A node matches if its token is the choice of its parent; it is reached if it and all its
    ancestors match. The deepest reached node wins, ties go to the lowest row.

    Args:
        draft: B trees; pads are told by their index alone.
        choice_BR: int64, the target's choice at each row.
        depth: D, at least the deepest level of any node.
        broken_BR: bool, rows where nothing could be chosen. Where the path meets one, `count` ends
            before it and is at most `accepted`.
    """
    slot_R = _slots(draft)
    match_BR = _matches(draft, choice_BR)
    path_BRR = (slot_R <= slot_R[:, None]) & (slot_R[:, None] < draft.end_BR[:, None, :])
    reached_BR = (~path_BRR | match_BR[:, None, :]).all(-1)
    last_B1 = _deepest(draft, reached_BR)
    on_path_BR = (slot_R <= last_B1) & (last_B1 < draft.end_BR)
    verdict = _verdict(draft, choice_BR, last_B1, on_path_BR, depth)
    return verdict if broken_BR is None else _cut(verdict, broken_BR)


def accept_words(words_BRW: Tensor, draft: Draft, choice_BR: Tensor, depth: int) -> Verdict:
    """`accept` by words of ancestors: a ballot of the matches, and one test of words per node.

    `words_BRW` are the `ancestor_words` of the draft.
    """
    missed_BW = _ballot(~_matches(draft, choice_BR))
    reached_BR = ((words_BRW & missed_BW[:, None]) == 0).all(-1)
    last_B1 = _deepest(draft, reached_BR)
    mine_BW = torch.take_along_dim(words_BRW, last_B1[:, :, None], dim=1)[:, 0]
    slot_R = _slots(draft)
    on_path_BR = (mine_BW.gather(1, (slot_R // WORD).expand_as(choice_BR)) >> (slot_R % WORD)) & 1
    return _verdict(draft, choice_BR, last_B1, on_path_BR.bool(), depth)


def ancestor_words(end_BR: Tensor) -> Tensor:
    """int64 [B, R, W] holding 32-bit words: bit j % 32 of word j // 32 of row i says that row j is
    i or an ancestor of i."""
    slot_R = torch.arange(end_BR.shape[1], device=end_BR.device)
    path_BRR = (slot_R <= slot_R[:, None]) & (slot_R[:, None] < end_BR[:, None, :])
    return _ballot(path_BRR)


def _slots(draft: Draft) -> Tensor:
    return torch.arange(draft.tokens_BR.shape[1], device=draft.tokens_BR.device)


def _matches(draft: Draft, choice_BR: Tensor) -> Tensor:
    slot_R = _slots(draft)
    wanted_BR = choice_BR.gather(1, draft.parent_BR)
    # a pad's token may equal a choice, and the root has no parent: both are told by index
    return (slot_R == 0) | ((draft.tokens_BR == wanted_BR) & (slot_R < draft.live_B[:, None]))


def _deepest(draft: Draft, reached_BR: Tensor) -> Tensor:
    """int64 [B, 1]: the deepest reached row, the lowest of equals."""
    slot_R = _slots(draft)
    rank_BR = draft.depth_BR * len(slot_R) + (len(slot_R) - 1 - slot_R)  # no two alike
    return torch.where(reached_BR, rank_BR, -1).argmax(-1, keepdim=True)


def _cut(verdict: Verdict, broken_BR: Tensor) -> Verdict:
    """The tokens before the first broken row are those of plain decoding, which ends there too."""
    sound_BD = ~broken_BR.gather(1, verdict.path_BD)
    sound_B = sound_BD.long().cumprod(1).sum(1)
    return replace(verdict, count_B=torch.minimum(verdict.count_B, sound_B))


def _ballot(vote: Tensor) -> Tensor:
    """bool [..., R] to int64 [..., W] of 32 bits each."""
    rows = vote.shape[-1]
    words = -(-rows // WORD)
    bits = torch.nn.functional.pad(vote.long(), (0, words * WORD - rows))
    place = torch.arange(WORD, device=vote.device)
    return (bits.view(*bits.shape[:-1], words, WORD) << place).sum(-1)


def _verdict(
    draft: Draft, choice_BR: Tensor, last_B1: Tensor, on_path_BR: Tensor, depth: int
) -> Verdict:
    """Write each row of the path at its depth; entries past the path repeat its last row."""
    path_BD = last_B1.repeat(1, depth + 2)  # the last column takes the rows off the path
    column_BR = torch.where(on_path_BR, draft.depth_BR, depth + 1)
    slot_BR = _slots(draft).expand_as(choice_BR)
    path_BD = path_BD.scatter(1, column_BR, slot_BR)[:, : depth + 1].contiguous()
    accepted_B = draft.depth_BR.gather(1, last_B1)[:, 0]
    return Verdict(path_BD, choice_BR.gather(1, path_BD), accepted_B + 1, accepted_B)

"""The default rule: follow the target's own choices down the tree, then emit its choice.

At a node at absolute position t the target's choice is argmax(logits + T * g_t), where the noise
g_t depends on (request seed, t, token id, choice) alone. By induction along the path those are the
choices of plain decoding, whatever the tree: tokens, not only their law, are the same.
Legend: B requests, R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from furcate.kernels.accept import accept
from furcate.kernels.draft import Verdict
from furcate.verify.law import Law, Rows
from furcate.verify.process import Processed, choose, process

__all__ = ["Verified", "verify"]


@dataclass(frozen=True, slots=True)
class Verified:
    """A verdict, and what it was decided from."""

    verdict: Verdict
    broken_B: Tensor  # bool, the verdict ends where a row's logits allow no choice
    processed: Processed


def verify(logits_BRV: Tensor, law: Law, rows: Rows) -> Verified:
    """Judge a draft by the target's logits at its rows; plain decoding is a draft of one row."""
    processed = process(logits_BRV, law, rows)
    choice = choose(processed)
    verdict = accept(rows.draft, choice.token_BR, rows.depth)
    # the tokens before the first broken row are those of plain decoding, which ends there too
    sound_BD = ~torch.gather(choice.broken_BR, 1, verdict.path_BD)
    sound_B = sound_BD.long().cumprod(1).sum(1)
    broken_B = sound_B < verdict.count_B
    sound = replace(verdict, count_B=torch.minimum(verdict.count_B, sound_B))
    return Verified(sound, broken_B, processed)

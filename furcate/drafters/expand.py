"""Growing a tree level by level: weigh a drafter's logits, branch, and choose the next frontier.

Legend: B requests, F frontier rows, V vocabulary, C children of a row, X = F * C candidates of a
level, N frontier nodes of all levels so far, P pool nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.drafters.trust import Trust
from furcate.kernels.draft import Proposal

__all__ = [
    "Coupling",
    "Frontier",
    "Level",
    "branch",
    "log_weights",
    "narrow",
    "root",
    "to_proposal",
]


@dataclass(frozen=True, slots=True)
class Coupling:
    """How a drafter's logits predict the target's choice once the noise is known.

    If the target's logits are beta * l + Gumbel(0, s), then P(choice = x | noise) is
    softmax((beta * l + T * noise) / s) at x (the Gumbel-max trick). Fitted on a first trained
    head, s was 0.85 to 1 times T for T from 0.7 to 1; at low temperatures it is the drafter's own
    error and stops falling.
    """

    beta: float = 1.1
    sigma: float = 0.9  # in units of T
    least_sigma: float = 0.6  # in units of the logits

    def spread(self, temperature_B: Tensor) -> Tensor:
        """s of each request: float32 [B]."""
        return (self.sigma * temperature_B).clamp_min(self.least_sigma)


@dataclass(frozen=True, slots=True)
class Frontier:
    """The rows whose children come next. `index` is -1 at the root."""

    tokens_BF: Tensor  # int64
    value_BF: Tensor  # float32, log
    index_BF: Tensor  # int64, place in the pool
    seen_BFN: Tensor  # bool, frontier nodes on the row's own path, itself included


@dataclass(frozen=True, slots=True)
class Level:
    """All candidates of one level."""

    tokens_BX: Tensor  # int64
    parent_BX: Tensor  # int64, place of the parent in the pool
    row_BX: Tensor  # int64, place of the parent in its frontier
    value_BX: Tensor  # float32, log
    tag_BX: Tensor  # int64, the weight as `Trust` notes it


def root(tokens_B: Tensor) -> Frontier:
    """The frontier of depth 0: the last committed token, certain, and no node of a tree."""
    tokens_BF = tokens_B[:, None]
    return Frontier(
        tokens_BF=tokens_BF,
        value_BF=torch.zeros_like(tokens_BF, dtype=torch.float32),
        index_BF=torch.full_like(tokens_BF, -1),
        seen_BFN=torch.zeros(*tokens_BF.shape, 0, dtype=torch.bool, device=tokens_B.device),
    )


def log_weights(
    logits_BFV: Tensor, temperature_B: Tensor, noise_BV: Tensor | None, coupling: Coupling
) -> Tensor:
    """log P(the target chooses x at this row), float32 [B, F, V].

    `noise_BV` is the target's noise at the position that the row's children would take; None if
    every request is greedy.
    """
    score_BFV = coupling.beta * logits_BFV.float()
    if noise_BV is not None:
        score_BFV = score_BFV + temperature_B[:, None, None] * noise_BV[:, None, :]
    return (score_BFV / coupling.spread(temperature_B)[:, None, None]).log_softmax(2)


def branch(weights_BFV: Tensor, frontier: Frontier, children: int, trust: Trust) -> Level:
    """The likeliest `children` tokens below each row of the frontier."""
    weight_BFC, tokens_BFC = weights_BFV.topk(children, dim=2)
    tag_BFC = trust.tags(weight_BFC)
    value_BFC = frontier.value_BF[..., None] + trust.corrected(weight_BFC, tag_BFC)
    row_F1 = torch.arange(value_BFC.shape[1], device=value_BFC.device)[:, None]
    return Level(
        tokens_BX=tokens_BFC.flatten(1),
        parent_BX=frontier.index_BF[..., None].expand_as(tokens_BFC).flatten(1),
        row_BX=row_F1.expand_as(tokens_BFC).flatten(1),
        value_BX=value_BFC.flatten(1),
        tag_BX=tag_BFC.flatten(1),
    )


def narrow(level: Level, frontier: Frontier, rows: int, begin: int) -> Frontier:
    """The `rows` most valuable candidates of a level; `begin` is where it starts in the pool."""
    value_BF, pick_BF = level.value_BX.topk(rows, dim=1)
    row_BF = level.row_BX.gather(1, pick_BF)
    above = frontier.seen_BFN.shape[2]
    seen_BFN = frontier.seen_BFN.gather(1, row_BF[..., None].expand(-1, -1, above))
    own_FF = torch.eye(rows, dtype=torch.bool, device=row_BF.device)
    return Frontier(
        tokens_BF=level.tokens_BX.gather(1, pick_BF),
        value_BF=value_BF,
        index_BF=pick_BF + begin,
        seen_BFN=torch.cat([seen_BFN, own_FF.expand(len(row_BF), -1, -1)], 2),
    )


def to_proposal(levels: Sequence[Level]) -> Proposal:
    """All candidates of all levels as one pool, level by level."""
    depth = [torch.full_like(level.tokens_BX, d) for d, level in enumerate(levels, start=1)]
    return Proposal(
        tokens_BP=torch.cat([level.tokens_BX for level in levels], 1),
        parent_BP=torch.cat([level.parent_BX for level in levels], 1),
        depth_BP=torch.cat(depth, 1),
        value_BP=torch.cat([level.value_BX for level in levels], 1),
        tag_BP=torch.cat([level.tag_BX for level in levels], 1),
    )

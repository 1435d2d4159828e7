"""Growing a tree level by level: branch, prune, and choose the next frontier.

Legend: B requests, F frontier rows, V draft vocabulary, C children of a row, X = F * C
candidates of a level, N frontier nodes of all levels so far, D levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.drafters.base import View
from furcate.drafters.likeliest import Likeliest, Reader, reading
from furcate.drafters.plan import Plan, Step
from furcate.drafters.plausible import PRIOR, Plausible
from furcate.drafters.prune import NO_PRUNING, Pruning
from furcate.drafters.vocabulary import Vocabulary
from furcate.kernels.backend import TORCH, Kernels
from furcate.kernels.draft import Proposal
from furcate.tree.calibration import Calibration

__all__ = ["Frontier", "Grower", "Growth", "Manner"]


@dataclass(frozen=True, slots=True)
class Frontier:
    """The rows whose children come next. `index` is -1 at the root."""

    tokens_BF: Tensor  # int64
    value_BF: Tensor  # float32, log
    plain_BF: Tensor  # float32, log, the product of the weights on the path
    index_BF: Tensor  # int64, place in the pool
    row_BF: Tensor  # int64, place of the parent in the frontier before
    seen_BFN: Tensor  # bool, frontier nodes on the row's own path, itself included


@dataclass(frozen=True, slots=True)
class Level:
    """All candidates of one level."""

    tokens_BX: Tensor  # int64
    parent_BX: Tensor  # int64, place of the parent in the pool
    row_BX: Tensor  # int64, place of the parent in its frontier
    value_BX: Tensor  # float32, log
    plain_BX: Tensor  # float32, log
    tag_BX: Tensor  # int64, the weight as `Trust` notes it


@dataclass(frozen=True, slots=True)
class Manner:
    """What is settled about a drafter's trees before it is built."""

    plan: Plan
    calibration: Calibration = PRIOR
    pruning: Pruning = NO_PRUNING
    longest: int | None = None  # most nodes that a round may accept; None: as deep as it drafts
    coupled: bool = True  # children are ranked with the target's own noise

    def grower(self, words: Vocabulary, device: torch.device, kernels: Kernels = TORCH) -> Grower:
        """The same at work on a device."""
        plausible = Plausible(self.calibration, device)
        asks = self.pruning.asks_entropy
        reader = Reader(words, plausible, kernels, entropy=asks, coupled=self.coupled)
        return Grower(self.plan, reader, self.pruning)


@dataclass(frozen=True, slots=True)
class Grower:
    """How a drafter's scores become trees."""

    plan: Plan
    reader: Reader
    pruning: Pruning

    @property
    def plausible(self) -> Plausible:
        """What scores are worth."""
        return self.reader.plausible

    def begin(self, view: View) -> Growth:
        """Trees of the roots alone."""
        return Growth(self, view)

    def level(self, likeliest: Likeliest, frontier: Frontier, step: Step) -> Level:
        """The likeliest children of each row of the frontier as candidates.

        One row of children serves all rows of the frontier (Medusa).
        """
        rows = frontier.value_BF.shape[1]
        weight_BFC = likeliest.weight_BFC.expand(-1, rows, -1)
        worth = self.plausible.worth((frontier.value_BF, frontier.plain_BF), weight_BFC)
        value_BFC = self.pruning.pruned(worth.value_BFC, frontier.value_BF, likeliest.entropy_BF)
        value_BX = value_BFC.flatten(1)
        if step.kept_X is not None:
            value_BX = value_BX.masked_fill(~step.kept_X, -torch.inf)
        row_F1 = torch.arange(rows, device=value_BX.device)[:, None]
        return Level(
            tokens_BX=self.reader.words.targets(likeliest.word_BFC).expand(-1, rows, -1).flatten(1),
            parent_BX=frontier.index_BF[..., None].expand_as(value_BFC).flatten(1),
            row_BX=row_F1.expand_as(value_BFC).flatten(1),
            value_BX=value_BX,
            plain_BX=worth.plain_BFC.flatten(1),
            tag_BX=worth.tag_BFC.flatten(1),
        )


class Growth:
    """The trees of one round while they grow."""

    def __init__(self, grower: Grower, view: View) -> None:
        self.frontier = _root(view)
        self._grower = grower
        self._read = reading(grower.reader, view, len(grower.plan))
        self._levels: list[Level] = []
        self._size = 0

    def branch(self, logits_BFV: Tensor) -> None:
        """Add the level below the frontier; its most valuable nodes are the next frontier.

        `logits_BFV`: the drafter's scores at the frontier's rows, or one row for all of them.
        """
        grower, depth = self._grower, len(self._levels)
        step = grower.plan[depth]
        likeliest = self._read(logits_BFV, depth + 1, step.children)
        level = grower.level(likeliest, self.frontier, step)
        self._levels.append(level)
        if step.rows:
            self.frontier = _narrow(level, self.frontier, step, self._size)
        self._size += step.candidates

    def proposal(self) -> Proposal:
        """All candidates of all levels as one pool, level by level."""
        levels = self._levels
        depth = [torch.full_like(level.tokens_BX, d) for d, level in enumerate(levels, start=1)]
        return Proposal(
            tokens_BP=torch.cat([level.tokens_BX for level in levels], 1),
            parent_BP=torch.cat([level.parent_BX for level in levels], 1),
            depth_BP=torch.cat(depth, 1),
            value_BP=torch.cat([level.value_BX for level in levels], 1),
            tag_BP=torch.cat([level.tag_BX for level in levels], 1),
        )


def _root(view: View) -> Frontier:
    """The frontier of depth 0: the last committed token, certain, and no node of a tree."""
    tokens_B1 = view.tokens_BW.gather(1, view.length_B[:, None])
    certain_B1 = torch.zeros_like(tokens_B1, dtype=torch.float32)
    return Frontier(
        tokens_BF=tokens_B1,
        value_BF=certain_B1,
        plain_BF=certain_B1,
        index_BF=torch.full_like(tokens_B1, -1),
        row_BF=torch.zeros_like(tokens_B1),
        seen_BFN=torch.zeros(*tokens_B1.shape, 0, dtype=torch.bool, device=tokens_B1.device),
    )


def _narrow(level: Level, frontier: Frontier, step: Step, begin: int) -> Frontier:
    """The candidates of a level that go on; `begin` is where it starts in the pool."""
    if step.pick_F is None:
        pick_BF = level.value_BX.topk(step.rows, dim=1).indices
    else:
        pick_BF = step.pick_F.expand(len(level.value_BX), -1)
    row_BF = level.row_BX.gather(1, pick_BF)
    above = frontier.seen_BFN.shape[2]
    seen_BFN = frontier.seen_BFN.gather(1, row_BF[..., None].expand(-1, -1, above))
    own_FF = torch.eye(step.rows, dtype=torch.bool, device=row_BF.device)
    return Frontier(
        tokens_BF=level.tokens_BX.gather(1, pick_BF),
        value_BF=level.value_BX.gather(1, pick_BF),
        plain_BF=level.plain_BX.gather(1, pick_BF),
        index_BF=pick_BF + begin,
        row_BF=row_BF,
        seen_BFN=torch.cat([seen_BFN, own_FF.expand(len(row_BF), -1, -1)], 2),
    )

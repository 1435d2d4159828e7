"""Growing a tree level by level: branch, prune, and choose the next frontier.

Legend: B requests, F frontier rows, V draft vocabulary, C children of a row, X = F * C
candidates of a level, N the root and the frontier nodes of all levels so far, D
levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from furcate.drafters.base import View
from furcate.drafters.likeliest import Reader, reading
from furcate.drafters.plan import Plan, cut
from furcate.drafters.plausible import PRIOR, Plausible
from furcate.drafters.prune import NO_PRUNING, Pruning
from furcate.drafters.vocabulary import Vocabulary
from furcate.kernels.backend import TORCH, Kernels
from furcate.kernels.draft import Proposal
from furcate.kernels.grow import Frontier, Grow, Likeliest, Place, Trees, Yardstick
from furcate.tree.calibration import Calibration

__all__ = ["Frontier", "Grower", "Growth", "Manner", "places"]


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
        plausible = Plausible(self.calibration, device, kernels.tally)
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

    @property
    def yardstick(self) -> Yardstick:
        """What a kernel measures candidates by; it reads what is learned where it lies."""
        plausible, pruning = self.plausible, self.pruning
        return Yardstick(
            token_D=self.reader.words.token_D,
            knots=plausible.knots,
            expected_K=plausible.trust.expected_K,
            accepted_K=plausible.trust.accepted_K,
            kappa=pruning.kappa,
            gamma=pruning.gamma,
            least=pruning.least,
        )

    def begin(self, view: View, levels: int) -> Growth:
        """Trees of the roots alone, which will have so many levels."""
        return Growth(self, view, cut(self.plan, levels))

    def spelled_out(
        self,
        likeliest: Likeliest,
        frontier: Frontier | None,
        by: Yardstick,
        place: Place,
        trees: Trees,
    ) -> Frontier | None:
        """`Grow` in torch; `by` must be this grower's own. The kernel's reference."""
        above = _root(trees) if frontier is None else frontier
        level = self.level(likeliest, above, place)
        pool, batch = trees.pool, len(trees.length_B)
        end = place.begin + level.value_BX.shape[1]
        assert pool.tag_BP is not None and level.value_BX.shape[0] == batch
        pool.tokens_BP[:, place.begin : end] = level.tokens_BX
        pool.parent_BP[:, place.begin : end] = level.parent_BX
        pool.depth_BP[:, place.begin : end] = place.depth
        pool.value_BP[:, place.begin : end] = level.value_BX
        pool.tag_BP[:, place.begin : end] = level.tag_BX
        return _narrow(level, above, place) if place.rows else None

    def level(self, likeliest: Likeliest, frontier: Frontier, place: Place) -> Level:
        """The likeliest children of each row of the frontier as candidates.

        One row of children serves all rows of the frontier (Medusa).
        """
        rows = frontier.value_BF.shape[1]
        weight_BFC = likeliest.weight_BFC.expand(-1, rows, -1)
        worth = self.plausible.worth((frontier.value_BF, frontier.plain_BF), weight_BFC)
        value_BFC = self.pruning.pruned(worth.value_BFC, frontier.value_BF, likeliest.entropy_BF)
        value_BX = value_BFC.flatten(1)
        if place.kept_X is not None:
            value_BX = value_BX.masked_fill(~place.kept_X, -torch.inf)
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

    def __init__(self, grower: Grower, view: View, plan: Plan) -> None:
        self._plan, self._places = plan, places(plan)
        self._read = reading(grower.reader, view, len(plan))
        self._grow: Grow = grower.reader.kernels.grow or grower.spelled_out
        self._by = grower.yardstick
        self._trees = Trees(_unwritten(view, plan), view.length_B)
        self._frontier: Frontier | None = None
        self._levels = 0

    @property
    def frontier(self) -> Frontier:
        """The rows whose children come next, once there is a level and another to come."""
        assert self._frontier is not None
        return self._frontier

    def branch(self, logits_BFV: Tensor, below_BF: Tensor | None = None) -> None:
        """Add the level below the frontier; its most valuable nodes are the next frontier.

        `logits_BFV`: the drafter's scores at the frontier's rows, or one row for all of them;
        `below_BF`: int64, positions of these rows' children, where somebody knows them already.
        """
        step, place = self._plan[self._levels], self._places[self._levels]
        above = self._frontier
        likeliest = self._read(logits_BFV, place.depth, step.children, below_BF)
        self._frontier = self._grow(likeliest, above, self._by, place, self._trees)
        self._levels += 1

    def proposal(self) -> Proposal:
        """All candidates of all levels as one pool, level by level."""
        assert self._levels == len(self._plan)
        return self._trees.pool


def places(plan: Plan) -> tuple[Place, ...]:
    """Where each level of a plan stands."""
    ends = accumulate(step.candidates for step in plan)
    return tuple(
        Place(depth, end - step.candidates, step.rows, step.pick_F, step.kept_X)
        for depth, (step, end) in enumerate(zip(plan, ends, strict=True), start=1)
    )


def _unwritten(view: View, plan: Plan) -> Proposal:
    """Room for all candidates of a round."""
    size = len(view.length_B), sum(step.candidates for step in plan)
    tokens_BP, parent_BP, depth_BP, tag_BP = view.length_B.new_empty((4, *size)).unbind()
    value_BP = torch.empty(size, dtype=torch.float32, device=view.length_B.device)
    return Proposal(tokens_BP, parent_BP, depth_BP, value_BP, tag_BP)


def _root(trees: Trees) -> Frontier:
    """The frontier of depth 0: certain, and no node of a tree; nobody asks for its token."""
    zero_B1 = torch.zeros_like(trees.length_B)[:, None]
    certain_B1 = torch.zeros_like(zero_B1, dtype=torch.float32)
    return Frontier(
        tokens_BF=zero_B1,
        value_BF=certain_B1,
        plain_BF=certain_B1,
        index_BF=zero_B1 - 1,
        row_BF=zero_B1,
        seen_BFN=torch.ones_like(zero_B1, dtype=torch.bool)[..., None],
    )


def _narrow(level: Level, frontier: Frontier, place: Place) -> Frontier:
    """The candidates of a level that go on; of equally valuable ones the first."""
    if place.pick_F is None:
        order_BX = level.value_BX.sort(dim=1, descending=True, stable=True).indices
        pick_BF = order_BX[:, : place.rows]
    else:
        pick_BF = place.pick_F.expand(len(level.value_BX), -1)
    row_BF = level.row_BX.gather(1, pick_BF)
    above = frontier.seen_BFN.shape[2]
    seen_BFN = frontier.seen_BFN.gather(1, row_BF[..., None].expand(-1, -1, above))
    own_FF = torch.eye(place.rows, dtype=torch.bool, device=row_BF.device)
    return Frontier(
        tokens_BF=level.tokens_BX.gather(1, pick_BF),
        value_BF=level.value_BX.gather(1, pick_BF),
        plain_BF=level.plain_BX.gather(1, pick_BF),
        index_BF=pick_BF + place.begin,
        row_BF=row_BF,
        seen_BFN=torch.cat([seen_BFN, own_FF.expand(len(row_BF), -1, -1)], 2),
    )

"""Drafts with a recurrent network: EAGLE, MTP or a whole small model, all by one path.

Legend: B requests, R rows of one pass, F frontier rows, D levels, C size of a state,
V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from furcate.drafters.base import View
from furcate.drafters.draft_cache import DraftCache, Ending, Pass, Room
from furcate.drafters.expand import Frontier, Manner
from furcate.drafters.footprint import SPELLED_OUT, Footprint, storages
from furcate.drafters.plan import depths
from furcate.drafters.vocabulary import Vocabulary
from furcate.heads.recurrent import Fed, Recurrent, whole
from furcate.kernels.beside import Rows
from furcate.kernels.draft import Draft, Proposal, Verdict

__all__ = ["RecurrentDrafter"]


class RecurrentDrafter:
    """Speculative decoding (arXiv:2211.17192) with a tree grown by coupled scores.

    Each round first scores the tokens committed since the last one, fed with the states that the
    target itself had there; the root's output proposes level 1. Below it each row is fed with the
    output of its parent.

    Args:
        network: on `room.device`.
        manner: the shape of its trees, and how its scores predict the target's choice.
        room: sizes of the engine.
    """

    light = False

    def __init__(self, network: Recurrent, manner: Manner, room: Room) -> None:
        self.network = network
        self.layers = network.layers
        self.plan = manner.plan
        self.depth = len(manner.plan)
        self.depths = depths(manner.plan)
        self.pool = sum(step.candidates for step in manner.plan)
        self.cache = DraftCache(network, room, [step.rows for step in manner.plan])
        self.words = Vocabulary(network.token_D, min(room.vocab, network.vocab))
        kernels = room.kernels.fitting(network.dtype)
        self._beside = kernels.beside
        self._reads_all = network.vocab >= room.vocab
        self._grower = manner.grower(self.words, room.device, kernels)
        self.plausible = self._grower.plausible
        self._dummy = room.capacity
        # a round commits the accepted nodes and one more, and the last root's keys lay in scratch
        self._tail = 2 + (manner.longest or self.depth)

    @property
    def footprint(self) -> Footprint:
        """Keys, states, weights, and the scores of the widest level."""
        widest = max(1, *(step.rows for step in self.plan))
        score = self.network.dtype.itemsize + SPELLED_OUT
        return Footprint(
            slot=self.cache.slot_bytes,
            scratch=self.cache.scratch_bytes,
            work=self._dummy * widest * self.words.size * score,
            weights=storages(self.network),
        )

    def keep(self, view: View, rows: Draft, features_BRF: Tensor) -> None:
        """Keep the target's states at a stretch of committed tokens."""
        if self.network.state_size:
            state_TC = self.network.fuse(features_BRF.flatten(0, 1))
            self.cache.keep(view, rows.live_B, state_TC)

    def read(self, view: View, rows: Draft) -> None:
        """Score a stretch of committed tokens, for their keys alone.

        For what a round cannot catch up with: prompts, and what was committed during a rest.
        """
        stretch = self.cache.stretch(view, rows)
        before_BRC = self.cache.before(view, stretch.position_BR)
        self._score(before_BRC.flatten(0, 1), stretch)

    def propose(self, view: View, levels: int) -> Proposal:
        """Catch up with what was committed, then grow the tree level by level.

        As many tokens are caught up with whatever was asked before: the round behind the deepest
        draft may be followed by the shallowest.
        """
        tail = self.cache.tail(view, self._tail)
        out_BFC = self._root(tail)
        growth = self._grower.begin(view, levels)
        growth.branch(self._logits(out_BFC), tail.below_B1)
        for depth in range(1, levels):
            out_BFC = self._below(view, growth.frontier, out_BFC, depth)
            growth.branch(self._logits(out_BFC), growth.frontier.below_BF)
        return growth.proposal()

    def follow(self, view: View, next_BD: Tensor) -> Iterator[Tensor]:
        """What `scores` reads at the root and below each token of a given path, [B, C] a level.

        `next_BD`: int64, the tokens that follow each root; behind a -1 nothing has a meaning.
        """
        out_B1C = self._root(self.cache.tail(view, self._tail))
        for depth in range(self.depth):
            if depth:
                row = _on_path(next_BD[:, depth - 1 : depth].clamp_min(0), depth)
                out_B1C = self._below(view, row, out_B1C, depth)
            yield out_B1C[:, 0]

    def scores(self, out_BC: Tensor, level: int) -> Tensor:
        """Scores of the draft vocabulary, [B, V], `level` tokens below the root."""
        return self.network.logits(out_BC)[:, : self.words.size]

    def learn(self, view: View, draft: Draft, verdict: Verdict, features_BRF: Tensor) -> None:
        """Note how often nodes of each weight were accepted; keep the accepted path's states."""
        self.plausible.learn(view, draft, verdict, self._dummy)
        if self.network.state_size:
            rows = features_BRF.shape[1]
            path = Rows(features_BRF.flatten(0, 1), verdict.path_BD, step=rows)
            self.cache.keep(view, verdict.count_B, self.network.fuse(self._fed(path)))

    def forget(self, slot: int) -> None:
        """Nothing is kept by slot: keys and states lie in pages, and pages are the engine's."""

    def copy_page(self, source: int, target: int) -> None:
        """Follow the target's cache when it copies a shared page."""
        self.cache.copy_page(source, target)

    def _root(self, tail: Ending) -> Tensor:
        """Outputs [B, 1, C] at the roots, once all that was committed since is caught up with."""
        before = Rows(self.cache.states.state_SC, tail.before_BR)
        out_BRC = self._score(self._fed(before), tail)
        root = self._fed(Rows(out_BRC.flatten(0, 1), tail.root_B1, step=out_BRC.shape[1]))
        return whole(root)[:, None]

    def _below(self, view: View, frontier: Frontier, out_BFC: Tensor, depth: int) -> Tensor:
        """Outputs at the frontier's rows, `depth` below the roots; `out` are those above them."""
        position_BF = frontier.at_BF
        if position_BF is None:
            position_BF = (view.length_B[:, None] + depth).expand(-1, frontier.row_BF.shape[1])
        rows = Pass(frontier.tokens_BF, position_BF, self.cache.below(view, frontier.seen_BFN))
        above = Rows(out_BFC.flatten(0, 1), frontier.row_BF, step=out_BFC.shape[1])
        return self._score(self._fed(above), rows)

    def _fed(self, rows: Rows) -> Tensor | Fed:
        """Rows to feed the network with; where a kernel reads them they are not picked before."""
        return rows.picked() if self._beside is None else Fed(rows, self._beside)

    def _score(self, state: Tensor | Fed, rows: Pass) -> Tensor:
        """Outputs [B, R, C] at these rows, fed with the states before them."""
        known_T = rows.tokens_BR.flatten()
        # tokens that the target alone knows read as the network's last one; `Fed` sees to that
        if not self._reads_all and isinstance(state, Tensor):
            known_T = known_T.clamp_max(self.network.vocab - 1)
        out_TC = self.network(
            known_T,
            state,
            rows.position_BR.flatten(),
            self.cache.attend(rows.sight),
        )
        return out_TC.view(*rows.tokens_BR.shape, -1)

    def _logits(self, out_BFC: Tensor) -> Tensor:
        return self.network.logits(out_BFC.flatten(0, 1)).view(*out_BFC.shape[:2], -1)


def _on_path(tokens_B1: Tensor, depth: int) -> Frontier:
    """One row a request, `depth` below the root, that sees all rows before it."""
    certain_B1, first_B1 = torch.zeros_like(tokens_B1, dtype=torch.float32), tokens_B1 * 0
    seen_B1N = torch.ones(*tokens_B1.shape, 1 + depth, dtype=torch.bool, device=tokens_B1.device)
    return Frontier(tokens_B1, certain_B1, certain_B1, first_B1, first_B1, seen_B1N)

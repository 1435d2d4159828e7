"""The round on one page: draft, score, verify, commit; then the draft of the next round.

Everything between the first line and the last is a tensor program of fixed shape: the host reads
nothing before the round has ended, so that it can be captured as one graph.

Legend: B requests, R rows, D levels, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from furcate.drafters.base import Drafter, View
from furcate.engine.emitted import Emitted
from furcate.engine.state import State
from furcate.engine.target import Scored, Span, Target
from furcate.kernels.draft import Draft
from furcate.kernels.entries import Entries
from furcate.kernels.pools import put
from furcate.kernels.select import lone_roots
from furcate.verify.coupled import verify
from furcate.verify.law import Needs, Rows
from furcate.verify.logprobs import processed_logprobs, raw_logprobs

__all__ = ["Batch", "Emitted", "Round"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Who takes part in a round, and its sizes; all of it is known to the host beforehand."""

    slot_B: Tensor
    allowance_B: Tensor  # int64, rows each request may use
    rows: int
    columns: int  # at least the longest request's tokens, its rows, and the next root
    needs: Needs
    run: int | None = None  # first slot of a lone request whose pages follow one another
    levels: int = 0  # of the next round's draft; 0: none is made
    raw_top: int | None = None  # likeliest tokens to report of the model's own law; None: nothing
    processed_top: int | None = None  # the same of the law as sampled

    def on(self, device: torch.device) -> Batch:
        """The same with its tensors on a device."""
        slot_B, allowance_B = self.slot_B.to(device), self.allowance_B.to(device)
        return replace(self, slot_B=slot_B, allowance_B=allowance_B)


class Round:
    """One draft-verify-commit over a batch."""

    def __init__(self, state: State, target: Target, drafter: Drafter, most_nodes: int) -> None:
        self.state = state
        self.target = target
        self.drafter = drafter
        self.most_nodes = most_nodes
        self.kernels = target.cache.kernels
        self.put_why = self.kernels.put_why(state.shape.pool)
        self._put = self.kernels.put if self.put_why is None else put

    def play(self, batch: Batch, *, at_work: bool = False) -> Emitted:
        """Play one round; the state is committed and the next draft proposed.

        With `at_work` the dummy takes the part of those whose answer has finished meanwhile.
        """
        found = self.state.entries(batch.slot_B, at_work=at_work)
        batch = replace(batch, slot_B=found.slot_B)
        view = self.state.seen(found, batch.columns, batch.needs)
        draft = self._draft(found, batch)
        scored = self.target.score(view, draft, Span(batch.columns - 1, batch.run))
        verified = verify(
            scored.logits_BRV, view.law, self._rows(view, draft, scored), self.kernels
        )
        gains = self.most_nodes if batch.levels else 0
        settled = self.state.commit(found, draft, verified.verdict, needs=batch.needs, gains=gains)
        cut = replace(verified.verdict, count_B=settled.count_B)
        if batch.rows > 1:
            self.target.cache.move(scored.slot_BR, cut)
        self.drafter.learn(view, draft, verified.verdict, scored.features_BRF)
        self._propose(batch, settled.gain_BN)
        raw, processed = batch.raw_top, batch.processed_top
        return Emitted(
            **{field.name: getattr(settled, field.name) for field in fields(settled)},
            raw=None if raw is None else raw_logprobs(scored.logits_BRV, cut, raw),
            processed=None
            if processed is None
            else processed_logprobs(verified.processed, view.law, cut, processed),
        )

    def propose(self, batch: Batch) -> Tensor:
        """Draft the next round; the values of its nodes, best first: float32 [B, N].

        Where no level is asked for there are no nodes: N is 0.
        """
        most = self.most_nodes if batch.levels else 0
        gain_BN = torch.empty(len(batch.slot_B), most, device=self.state.device)
        self._propose(batch, gain_BN)
        return gain_BN

    def prefill(self, view: View, rows: Draft, span: Span) -> None:
        """Score a stretch of a prompt, for its keys and values alone; the drafter reads it too."""
        self.drafter.keep(view, rows, self.target.prefill(view, rows, span))
        self.drafter.read(view, rows)

    def _draft(self, found: Entries, batch: Batch) -> Draft:
        """The tree to score: the most valuable nodes of what was proposed."""
        if batch.rows == 1:
            return found.alone or lone_roots(found.root_B)
        proposal, allowance_B = self.state.proposal, batch.allowance_B
        return self.kernels.select(
            proposal, found.root_B, batch.rows, allowance_B, slot_B=batch.slot_B
        )

    def _rows(self, view: View, draft: Draft, scored: Scored) -> Rows:
        depth = min(self.drafter.depth, draft.tokens_BR.shape[1] - 1)
        return Rows(draft, view.length_B, depth, next_BR=scored.next_BR)

    def _propose(self, batch: Batch, gain_BN: Tensor) -> None:
        if not batch.levels:
            return
        view = self.state.view(batch.slot_B, batch.columns, batch.needs)
        proposal = self.drafter.propose(view, batch.levels)
        self._put(self.state.proposal, batch.slot_B, proposal, gain_BN)

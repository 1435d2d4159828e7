"""The round on one page: draft, score, verify, commit; then the draft of the next round.

Everything between the first line and the last is a tensor program of fixed shape: the host reads
nothing before the round has ended, so that it can be captured as one graph.

Legend: B requests, R rows, D levels, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from furcate.drafters.base import Drafter, View
from furcate.engine.emitted import Emitted
from furcate.engine.state import State
from furcate.engine.target import Span, Target
from furcate.kernels.draft import Draft
from furcate.kernels.entries import Entries
from furcate.kernels.select import gains, lone_roots
from furcate.verify.coupled import verify
from furcate.verify.law import Needs, Rows
from furcate.verify.logprobs import processed_logprobs, raw_logprobs
from furcate.verify.stops import Cut, truncate

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
    propose: bool = True  # draft the next round
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

    def play(self, batch: Batch, *, at_work: bool = False) -> Emitted:
        """Play one round; the state is committed and the next draft proposed.

        With `at_work` the dummy takes the part of those whose answer has finished meanwhile.
        """
        found = self.state.entries(batch.slot_B, at_work=at_work)
        batch = replace(batch, slot_B=found.slot_B)
        view = self.state.seen(found, batch.columns, batch.needs)
        draft = self._draft(found, batch)
        scored = self.target.score(view, draft, Span(batch.columns - 1, batch.run))
        verified = verify(scored.logits_BRV, view.law, self._rows(view, draft), self.kernels)
        cut = truncate(verified.verdict, view.law, found.room_B)
        self._commit(view, scored.slot_BR, cut)
        self.drafter.learn(view, draft, verified.verdict, scored.features_BRF)
        path_BD, accepted_B = verified.verdict.path_BD, verified.verdict.accepted_B
        last_B1 = path_BD.gather(1, accepted_B[:, None])
        raw, processed = batch.raw_top, batch.processed_top
        return Emitted(
            tokens_BD=cut.verdict.emitted_BD,
            count_B=cut.verdict.count_B,
            accepted_B=accepted_B,
            finish_B=cut.finish_B,
            drafted_B=draft.live_B - 1,
            offered_B=(draft.end_BR.gather(1, last_B1) > last_B1 + 1)[:, 0],
            strayed_B=last_B1[:, 0] != accepted_B,
            broken_B=verified.broken_B,
            gain_BN=self.propose(batch) if batch.propose else self.withdraw(batch),
            raw=None if raw is None else raw_logprobs(scored.logits_BRV, cut.verdict, raw),
            processed=None
            if processed is None
            else processed_logprobs(verified.processed, view.law, cut.verdict, processed),
        )

    def propose(self, batch: Batch) -> Tensor:
        """Draft the next round; the values of its nodes, best first: float32 [B, N]."""
        if self.drafter.depth == 0:
            return torch.zeros(len(batch.slot_B), 0, device=self.state.device)
        view = self.state.view(batch.slot_B, batch.columns, batch.needs)
        proposal = self.drafter.propose(view)
        self.state.propose(batch.slot_B, proposal)
        return gains(proposal, self.most_nodes)

    def withdraw(self, batch: Batch) -> Tensor:
        """Propose nothing for the next round: float32 [B, 0]."""
        # not by assignment: a number put at indices is first copied from the host
        self.state.proposal.value_BP.index_fill_(0, batch.slot_B, -torch.inf)
        return torch.zeros(len(batch.slot_B), 0, device=self.state.device)

    def prefill(self, view: View, rows: Draft, span: Span) -> None:
        """Score a stretch of a prompt, for its keys and values alone; the drafter reads it too."""
        self.drafter.keep(view, rows, self.target.prefill(view, rows, span))
        self.drafter.read(view, rows)

    def _draft(self, found: Entries, batch: Batch) -> Draft:
        """The tree to score: the most valuable nodes of what was proposed."""
        if batch.rows == 1:
            return found.alone or lone_roots(found.root_B)
        proposal = self.state.proposed(batch.slot_B)
        return self.kernels.select(proposal, found.root_B, batch.rows, batch.allowance_B)

    def _rows(self, view: View, draft: Draft) -> Rows:
        depth = min(self.drafter.depth, draft.tokens_BR.shape[1] - 1)
        return Rows(draft, view.length_B, depth)

    def _commit(self, view: View, slot_BR: Tensor, cut: Cut) -> None:
        """Keep what the verdict accepts: tokens, lengths and counts, keys and values in place."""
        self.state.commit(view, cut.verdict, cut.finish_B)
        if slot_BR.shape[1] > 1:
            self.target.cache.move(slot_BR, cut.verdict)

"""How good heads are on conversations kept away from training, depth by depth.

Legend: T rows of a batch, N rows with a loss, K steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furcate.heads.output import Shared
from furcate.kernels.soft_cross_entropy import Objective, Scores
from furcate.models.decoder import Decoder
from furcate.train.batches import Batch, lay_out
from furcate.train.corpus import Conversation, Corpus
from furcate.train.learner import Learner
from furcate.train.loss import Teacher, grade
from furcate.train.loss_vocabulary import Columns
from furcate.train.step import Watched
from furcate.train.unroll import unroll

__all__ = ["Depths", "HeldOut", "Tally"]

_PLAIN = Objective()


@dataclass(frozen=True, slots=True)
class Depths:
    """Of one head, step by step.

    A hit is that the head's best token is the target's best token at a position, both over the
    whole vocabulary and behind the true tokens. `agreement` is the share of hits; `conditional`
    the share of hits among roots with hits at all smaller depths, as a chain is accepted; `chain`
    the tokens per round of a chain so deep, the bonus included; `overlap` the mean of
    Σ min(p, q), how often a sampled token of a chain is accepted at temperature 1.
    """

    cross_entropy: tuple[float, ...]
    overlap: tuple[float, ...]
    agreement: tuple[float, ...]
    conditional: tuple[float, ...]
    chain: float


class HeldOut:
    """Measures heads on the same conversations every time.

    Args:
        target: frozen.
        corpus: where the conversations are.
        held_out_I: which they are.
        rows: about how many tokens are looked at at once.
    """

    def __init__(
        self, target: Decoder, corpus: Corpus, held_out_I: NDArray[np.int64], rows: int
    ) -> None:
        self._target = target
        self._corpus = corpus
        self._held_out_I = held_out_I
        self._rows = rows
        self._output_VC = Shared.of(target).output_VC
        vocab = torch.arange(len(self._output_VC), device=target.device)
        self._columns = Columns(vocab, torch.zeros(len(vocab), device=target.device))

    @torch.no_grad()
    def measure(self, learners: Sequence[Learner]) -> dict[str, Depths]:
        """Every head, by name."""
        layers = [layer for one in learners for layer in one.head.layers]
        lookahead = max(one.plan.steps for one in learners)
        device = self._target.device
        tallies = {one.plan.name: Tally(one.plan.steps, device) for one in learners}
        for talks in self._groups():
            batch = lay_out(talks, lookahead, device)
            if not len(batch.at_N):
                continue
            watched = Watched(self._target, batch, layers)
            teacher = Teacher.of(
                watched.last_TC[batch.at_N], self._output_VC, self._columns, self._rows
            )
            for one in learners:
                features_TF = watched.features(one.head.layers)
                tallies[one.plan.name].add(self._graded(one, features_TF, batch, teacher), batch)
        return {name: tally.depths() for name, tally in tallies.items()}

    def _graded(
        self, learner: Learner, features_TF: Tensor, batch: Batch, teacher: Teacher
    ) -> Iterator[Scores]:
        none_N = torch.zeros(len(batch.at_N), device=features_TF.device)
        for final_NC in unroll(learner.head, features_TF, batch, learner.plan.steps):
            yield grade(final_NC, teacher, none_N, _PLAIN, self._rows).scores

    def _groups(self) -> Iterator[list[Conversation]]:
        """Conversations of about `rows` tokens together."""
        group: list[Conversation] = []
        held = 0
        for index in self._held_out_I:
            talk = self._corpus[int(index)]
            if group and held + len(talk.tokens) > self._rows:
                yield group
                group, held = [], 0
            group.append(talk)
            held += len(talk.tokens)
        yield group


class Tally:
    """Sums over batches, on the device."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self._sums_K3 = torch.zeros(steps, 3, dtype=torch.float64, device=device)
        self._rows_K = torch.zeros(steps, dtype=torch.float64, device=device)
        self._reached_K = torch.zeros_like(self._rows_K)
        self._passed_K = torch.zeros_like(self._rows_K)

    def add(self, graded: Iterator[Scores], batch: Batch) -> None:
        """One batch; a root stays alive while every depth was there and was a hit."""
        roots = len(batch.positions_T) + 1  # the last one is none
        alive_T = torch.ones(roots, dtype=torch.bool, device=batch.at_N.device)
        for k, scores in enumerate(graded):
            row_N = batch.rows(k + 1)
            valid_N = row_N < roots - 1
            all_3N = torch.stack((scores.loss_N, scores.overlap_N, scores.agree_N))
            self._sums_K3[k] += (all_3N * valid_N).sum(1)
            self._rows_K[k] += valid_N.sum()
            reached_N = alive_T[row_N] & valid_N
            passed_N = reached_N & (scores.agree_N > 0)
            self._reached_K[k] += reached_N.sum()
            self._passed_K[k] += passed_N.sum()
            alive_T = torch.zeros_like(alive_T).index_fill_(0, row_N[passed_N], True)

    def depths(self) -> Depths:
        """The means."""
        means_K3 = self._sums_K3 / self._rows_K.clamp(min=1)[:, None]
        conditional = (self._passed_K / self._reached_K.clamp(min=1)).tolist()
        loss, overlap, agreement = (tuple(column) for column in means_K3.t().tolist())
        chain = 1.0 + sum(accumulate(conditional, mul))
        return Depths(loss, overlap, agreement, tuple(conditional), chain)

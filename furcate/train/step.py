"""One step of training: a frozen pass of the target, and every head learns from it.

Legend: T rows of a batch, F features of all layers asked for, V vocabulary, K steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furcate.heads.output import Shared
from furcate.models.decoder import Decoder
from furcate.train.attention import packed_attend
from furcate.train.batches import Batch
from furcate.train.learner import Learner
from furcate.train.loss import Teacher
from furcate.train.loss_vocabulary import Chooser
from furcate.train.recipe import Recipe

__all__ = ["Learned", "Lessons", "Watched"]

Learned = dict[str, Tensor]
"""By head: [K, 3] means of cross entropy, overlap and agreement; then its gradient's norm [1]."""


class Watched:
    """The target's states over a batch: the last ones, and features of any of the layers."""

    def __init__(self, target: Decoder, batch: Batch, layers: Sequence[int]) -> None:
        self._layers = tuple(sorted(set(layers)))
        tokens_T = batch.tokens_TA[: len(batch.positions_T)]
        with torch.no_grad():
            states = target.states(
                tokens_T, batch.positions_T, packed_attend(batch.packing), self._layers
            )
        self.last_TC = states.last_TC
        self._parts = states.features_TF.chunk(len(self._layers), 1)

    def features(self, layers: Sequence[int]) -> Tensor:
        """Of these layers, side by side: [T, F]."""
        return torch.cat([self._parts[self._layers.index(layer)] for layer in layers], 1)


class Lessons:
    """What is the same in every step: the target, the columns of the loss, the heads.

    Args:
        target: frozen.
        learners: the heads.
        recipe: of the run.
        frequent_V: all ids by falling frequency.
    """

    def __init__(
        self,
        target: Decoder,
        learners: Sequence[Learner],
        recipe: Recipe,
        frequent_V: NDArray[np.int64],
    ) -> None:
        self.learners = tuple(learners)
        self._target = target
        self._recipe = recipe
        self._output_VC = Shared.of(target).output_VC
        self._chooser = Chooser(frequent_V, recipe.loss_vocab, recipe.seed, target.device)
        self._layers = [layer for one in learners for layer in one.head.layers]

    def watch(self, batch: Batch) -> Watched:
        """The target's pass over a batch."""
        return Watched(self._target, batch, self._layers)

    def teacher(self, watched: Watched, batch: Batch, number: int) -> Teacher:
        """The target's laws for step `number`."""
        columns = self._chooser.choose(batch.tokens_TA[batch.at_N + 1], number)
        last_NC = watched.last_TC[batch.at_N]
        with torch.no_grad():
            return Teacher.of(last_NC, self._output_VC, columns, self._recipe.loss_rows)

    def step(self, batch: Batch, number: int, rate: float) -> Learned:
        """Every head learns from the batch; nothing waits for the device."""
        watched = self.watch(batch)
        teacher = self.teacher(watched, batch, number)
        learned = {}
        for learner in self.learners:
            features_TF = watched.features(learner.head.layers)
            means_K3 = learner.learn(features_TF, batch, teacher)
            learned[learner.plan.name] = torch.cat(
                (means_K3.flatten(), learner.masters.step(rate).float()[None])
            )
        return learned

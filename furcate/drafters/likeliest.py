"""The likeliest children of frontier rows: in torch, or by a kernel that draws noise on the fly.

Legend: B requests, F frontier rows (or one row that serves all of them), V draft vocabulary,
C children of a row, D levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from furcate.drafters.base import View
from furcate.drafters.plausible import Plausible
from furcate.drafters.vocabulary import Vocabulary
from furcate.kernels.backend import DraftHead, Kernels
from furcate.kernels.draws import Draws
from furcate.kernels.grow import Likeliest

__all__ = ["Reader", "Reading", "reading"]

LEAST = -1e30  # a log that is still a number


class Reading(Protocol):
    """The children of rows, C each, that stand at a depth, and at `position_BF` if known."""

    def __call__(
        self, logits_BFV: Tensor, depth: int, count: int, position_BF: Tensor | None = None
    ) -> Likeliest: ...


@dataclass(frozen=True, slots=True)
class Reader:
    """How a drafter's scores are read."""

    words: Vocabulary
    plausible: Plausible
    kernels: Kernels
    entropy: bool  # asked for
    coupled: bool = True  # the target's noise is known to it


def reading(reader: Reader, view: View, levels: int) -> Reading:
    """How scores are read in one round of `levels` levels.

    A kernel knows neither bias nor allowed tokens, and always draws the noise; the law of a round
    with any of these, or of one that is not coupled, is spelled out.
    """
    head, law = reader.kernels.draft_head, view.law
    if not reader.coupled or head is None or law.bias_BV is not None or law.allowed_BV is not None:
        return _spelled_out(reader, view, levels)
    return _on_the_fly(reader, view, head)


def _spelled_out(reader: Reader, view: View, levels: int) -> Reading:
    noise_BDV = reader.words.noise(view, levels) if reader.coupled else None

    def read(
        logits_BFV: Tensor, depth: int, count: int, position_BF: Tensor | None = None
    ) -> Likeliest:
        noise_BV = None if noise_BDV is None else noise_BDV[:, depth - 1]
        lawful_BFV = reader.words.lawful(logits_BFV, view.law)
        weights_BFV = reader.plausible.log_weights(
            lawful_BFV, view.law.temperature_B, noise_BV, depth
        )
        weight_BFC, word_BFC = weights_BFV.topk(count, dim=2)
        entropy_BF = _entropy(weights_BFV) if reader.entropy else None
        return Likeliest(word_BFC, weight_BFC, entropy_BF)

    return read


def _on_the_fly(reader: Reader, view: View, head: DraftHead) -> Reading:
    law, words = view.law, reader.words

    def read(
        logits_BFV: Tensor, depth: int, count: int, position_BF: Tensor | None = None
    ) -> Likeliest:
        batch, rows = logits_BFV.shape[:2]
        if position_BF is None or position_BF.shape[1] != rows:
            position_BF = (view.length_B + depth)[:, None].expand(-1, rows).contiguous()
        draws = Draws(law.temperature_B, law.seed_B, law.choice_B, position_BF.flatten())
        scale = reader.plausible.calibration.scale(depth)
        logits_NV = logits_BFV.flatten(0, 1)[:, : words.size]
        found = head(logits_NV, draws, scale, count, words.token_D)
        shape = (batch, rows, count)
        return Likeliest(
            found.word_NC.view(shape), found.weight_NC.view(shape), found.entropy_N.view(shape[:2])
        )

    return read


def _entropy(weights_BFV: Tensor) -> Tensor:
    """Of each row's law, from its logs."""
    chance_BFV = weights_BFV.exp()
    entropy_BF: Tensor = -(chance_BFV * weights_BFV.clamp_min(LEAST)).sum(2)
    return entropy_BF

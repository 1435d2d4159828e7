"""What stands between the target's logits and its choice: edits of scores, and filters' floors.

What kernels are told of a law; `verify.process` is their reference. Legend: B requests, R rows of
a draft, V vocabulary, T = B * R flat rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from furcate.kernels.draft import Draft

__all__ = ["Edits", "Filters", "Limited", "Limiter", "Penalties"]


@dataclass(frozen=True, slots=True)
class Penalties:
    """See `SamplingParams`; counts are those of the committed output, a row's path comes on top."""

    repetition_B: Tensor  # float32, off: 1
    presence_B: Tensor  # float32, off: 0
    frequency_B: Tensor  # float32, off: 0
    prompt_BV: Tensor  # bool, the token occurs in the prompt
    counts_BV: Tensor  # int64


@dataclass(frozen=True, slots=True)
class Edits:
    """What changes the scores themselves, in this order; None: nobody asks for it."""

    bias_BV: Tensor | None = None  # float32
    penalties: Penalties | None = None
    allowed_BV: Tensor | None = None  # bool
    going_BV: Tensor | None = None  # bool, those of the allowed that do not end the request
    bars_BR: Tensor | None = None  # bool, rows to which `going` applies

    @property
    def masks(self) -> bool:
        """Whether any token may be forbidden."""
        return self.allowed_BV is not None or self.going_BV is not None

    def __bool__(self) -> bool:
        """Whether there is any."""
        return self.masks or self.bias_BV is not None or self.penalties is not None


@dataclass(frozen=True, slots=True)
class Filters:
    """Thresholds on the scores, in this order; None: nobody asks for it."""

    temperature_B: Tensor  # float32, 0: greedy, which no filter touches
    top_k_B: Tensor | None = None  # int64, off: 0, -1 or V
    top_p_B: Tensor | None = None  # float32, off: 1
    min_p_B: Tensor | None = None  # float32, off: 0

    def __bool__(self) -> bool:
        """Whether there is any."""
        return any(x is not None for x in (self.top_k_B, self.top_p_B, self.min_p_B))


@dataclass(frozen=True, slots=True)
class Limited:
    """Scores to choose from. A forbidden token has -inf; one below its row's floor is filtered.

    Where no filter is asked for, an allowed token has a finite score at least: it goes before all
    forbidden ones. A floor is NaN where a row's best score is not finite: nothing reaches it.
    """

    logits_BRV: Tensor
    floor_BR: Tensor | None = None  # float32


Limiter = Callable[[Tensor, Draft, Edits, Filters], Limited]
"""(logits_BRV, the draft whose rows they are, edits, filters)."""

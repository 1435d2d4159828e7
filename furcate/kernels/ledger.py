"""What a verdict does to the requests in a round, and what the host is told of it.

Legend: B requests, D levels, C slots, P pool nodes, N nodes of the next proposal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from furcate.kernels.draft import Draft, Verdict
from furcate.kernels.entries import Book, Entries

__all__ = ["Settle", "Settled"]


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome of a round for each request, in the order in which the host reads it."""

    tokens_BD: Tensor  # int64, what the verdict emits; `count` of them are kept
    count_B: Tensor  # int64
    accepted_B: Tensor  # int64, before any stop rule
    finish_B: Tensor  # int64, a `Finish`
    drafted_B: Tensor  # int64, nodes
    gain_BN: Tensor  # float32, not written yet: room for `Put`
    offered_B: Tensor  # bool: the accepted path had a further child to try
    strayed_B: Tensor  # bool: the accepted path was not the likeliest
    broken_B: Tensor  # bool: the verdict ended where a row's logits allow no choice


class Settle(Protocol):
    """Cut a verdict and write it into the book; the reference is `verify.stops.settle`."""

    def __call__(
        self,
        book: Book,
        found: Entries,
        draft: Draft,
        verdict: Verdict,
        value_CP: Tensor | None = None,
        gains: int = 0,
    ) -> Settled:
        """
        Args:
            book: written to: tokens behind the root, lengths, and who has finished.
            found: who takes part; several may be the dummy.
            draft: what was scored.
            verdict: by the target's choices, uncut.
            value_CP: values of proposals, of which those of these requests die.
            gains: N.
        """
        ...

"""The seam between a drafter and the round.

Legend: B requests, C slots, W width of the token buffer, S pages of a table, R rows, P pool nodes,
F features of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from furcate.drafters.footprint import Footprint
from furcate.kernels.draft import Draft, Proposal, Verdict
from furcate.verify.law import Law

__all__ = ["Drafter", "Tokens", "View"]


class Tokens:
    """The requests' tokens where they lie: only who asks for all of them has them copied."""

    def __init__(
        self, tokens_CW: Tensor, slot_B: Tensor | None = None, columns: int | None = None
    ) -> None:
        """Row `slot[b]` is request b's, without `slot_B` row b; cut to `columns`."""
        self._tokens_CW = tokens_CW
        self._slot_B = slot_B
        self.columns = tokens_CW.shape[1] if columns is None else columns

    @cached_property
    def all_BW(self) -> Tensor:
        """One behind the other, int64."""
        cut_CW = self._tokens_CW[:, : self.columns]
        return cut_CW if self._slot_B is None else cut_CW.index_select(0, self._slot_B)


@dataclass(frozen=True, slots=True)
class View:
    """What a drafter may see of the requests in a round; all of it lies on the device."""

    slot_B: Tensor  # int64, where each request's state lives, 0..capacity (the last is a dummy)
    tokens: Tokens  # prompt and output; columns past the root have no meaning
    length_B: Tensor  # int64, L: tokens whose KV is cached; the root is tokens[L]
    table_BS: Tensor  # int64, page of each page-sized stretch of the request
    law: Law  # sampling options; the noise that the verifier will use

    @property
    def tokens_BW(self) -> Tensor:
        """All of their tokens, int64; copied where nobody has asked for them before."""
        return self.tokens.all_BW


class Drafter(Protocol):
    """Proposes trees. Whatever it proposes, the emitted tokens stay the same.

    `propose` and `learn` are tensor programs of fixed shape: no host synchronisation, no branch
    on a value, so that a round can be captured.
    """

    depth: int  # deepest level it proposes; 0: never proposes
    depths: tuple[int, ...]  # levels that it can be asked for, ascending; (): never proposes
    pool: int  # P, nodes of a proposal
    light: bool  # proposing costs next to nothing: it is asked after every round
    layers: tuple[int, ...]  # target states it needs, counted as transformers' `hidden_states` are

    @property
    def footprint(self) -> Footprint:
        """What it holds of the device's memory."""
        ...

    def keep(self, view: View, rows: Draft, features_BRF: Tensor) -> None:
        """The target has scored this chain of prompt tokens, from position `view.length` on.

        Take what will be needed of its features: those of `layers`, one behind the other; F is 0
        where there are none.
        """
        ...

    def read(self, view: View, rows: Draft) -> None:
        """Catch up with this chain of committed tokens, whose features were kept before.

        For drafters with keys of their own: prompts, stretch by stretch, and what was committed
        while they rested.
        """
        ...

    def propose(self, view: View, levels: int) -> Proposal:
        """Candidates below each request's root; `levels` is one of `depths`.

        With fewer than the most it is what a drafter of that many would propose, and may be
        narrower than `pool`.
        """
        ...

    def learn(self, view: View, draft: Draft, verdict: Verdict, features_BRF: Tensor) -> None:
        """Take note of what was accepted; `view` is the state before the commit.

        Told after every round, rounds of one row and those during a rest included, so that no
        position's features are missed.
        """
        ...

    def forget(self, slot: int) -> None:
        """The request in `slot` is gone, or another takes its place."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """A page of the cache was copied; a drafter with keys of its own copies them too."""
        ...

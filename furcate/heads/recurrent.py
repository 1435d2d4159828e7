"""What every recurrent draft network has in common: EAGLE, MTP, and a whole small model.

Legend: T flat rows, F features of the target, C size of a state, D draft vocabulary, I columns that
are laid side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from furcate.kernels.beside import Angles, Beside, Part, Rows
from furcate.models.decoder import Attend
from furcate.models.norm import RmsNorm
from furcate.models.rope import Rope, Turn

__all__ = ["Fed", "KvSizes", "Recurrent", "whole"]


@dataclass(frozen=True, slots=True)
class Fed:
    """What a network is fed with, still to be picked, and the kernel that picks it.

    For inference only.
    """

    rows: Rows  # of states, or of the target's features
    beside: Beside

    def by(self, norm: RmsNorm | None) -> Part:
        """The rows behind a norm."""
        return self.rows, norm

    def named(self, table_SC: Tensor, number_T: Tensor, norm: RmsNorm | None) -> Part:
        """Rows of a table that all requests share, one for each of these; the last row stands for
        numbers behind it."""
        number_BR = number_T.view_as(self.rows.number_BR)
        return Rows(table_SC, number_BR, last=len(table_SC) - 1), norm

    def read(
        self, parts: Sequence[Part], rope: Rope, positions_T: Tensor
    ) -> tuple[Tensor, Tensor, Turn]:
        """(parts side by side [T, I], the last as it is [T, C], their turn): how a pass begins."""
        angles = Angles(positions_T, rope.freq_F, rope.spec.attention_factor)
        laid = self.beside(parts, angles)
        assert laid.angles is not None
        return laid.all_TI, laid.last_TC, Turn(*laid.angles)

    def parts(self, norms: Sequence[RmsNorm]) -> Tensor:
        """The rows cut into as many parts of one width, each behind its norm: [T, F]."""
        rows = self.rows
        chunks = rows.x_SC.chunk(len(norms), 1)
        cut = [Rows(chunk, rows.number_BR, rows.step) for chunk in chunks]
        return self.beside(tuple(zip(cut, norms, strict=True))).all_TI


@dataclass(frozen=True, slots=True)
class KvSizes:
    """Keys and values that a network keeps for every token."""

    layers: int
    heads: int  # query heads
    kv_heads: int
    head_dim: int


class Recurrent(Protocol):
    """Reads a token and the state before it, gives the state behind it.

    At position p it reads token p and the state g of position p - 1, where g is `fuse` of the
    target's features there; what comes out predicts token p + 1. Below the root the target has not
    been yet: the state is then what this network itself gave for the parent node. So what it keeps
    for position p depends on tokens 0..p alone. Position 0 has no state before it and is not read
    by a network with `state_size` > 0.
    """

    layers: tuple[int, ...]  # features it needs, counted as transformers' `hidden_states` are
    state_size: int  # C of the state it is fed; 0: it needs none
    kv: KvSizes
    vocab: int  # token ids it can read: 0..vocab - 1

    @property
    def token_D(self) -> Tensor | None:
        """Target id of each draft id, int64 [D], ascending; None: the same ids."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, states and logits."""
        ...

    def parameters(self) -> Iterator[Tensor]:
        """Its weights, as a `torch.nn.Module` has them; `buffers` may be the target's."""
        ...

    def buffers(self) -> Iterator[Tensor]: ...

    def fuse(self, features: Tensor | Fed) -> Tensor:
        """States [T, C] from the target's features."""
        ...

    def __call__(
        self, tokens_T: Tensor, state: Tensor | Fed, positions_T: Tensor, attend: Attend
    ) -> Tensor:
        """States behind these tokens: [T, C'], to be fed on and to be scored.

        Of tokens that it cannot read the last one that it can is read where it is `Fed`.
        """
        ...

    def logits(self, state_TC: Tensor) -> Tensor:
        """Scores of the next token, [T, D], from what a call returns."""
        ...


def whole(fed: Tensor | Fed) -> Tensor:
    """What it is fed with, [T, C], picked and no more."""
    return fed.beside((fed.by(None),)).all_TI if isinstance(fed, Fed) else fed

"""States that a draft network keeps by position: what a round begins with, and what it leaves.

Legend: B requests, W token columns, R rows of one pass, X rows to be kept, S slots, C size of a
state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from furcate.kernels.tree_attention import SCRATCH, Places, behind, slots_of

__all__ = ["Keep", "Tail", "TailOf", "keep", "tail"]


@dataclass(frozen=True, slots=True)
class Tail:
    """The last tokens up to the root, as many as are to be caught up with, as rows of a pass."""

    tokens_BR: Tensor  # int64
    position_BR: Tensor  # int64
    before_BR: Tensor  # int64, slots of the states before these positions; SCRATCH: there is none
    slot_BR: Tensor  # int64, where their keys go: the root's to its place among the drafted ones
    end_BR: Tensor  # int64, as a `Sight` has them
    live_B: Tensor  # int64, rows that are not pads; at least 1
    start_B: Tensor  # int64, position of the first row
    root_B1: Tensor  # int64, the row of the root
    below_B1: Tensor  # int64, position below it


TailOf = Callable[[Tensor, Places, tuple[int, int], int], Tail]
"""(tokens_BW, places of the requests, (first slot of what is drafted, slots of it by request), R):
the last R tokens up to the root, or all of them."""

Keep = Callable[[Tensor, Places, Tensor, Tensor], None]
"""(state_SC, places, count_B, state_TC): puts the first `count` of each request's X states to the
positions from `places.length_B` on, in place; T = B * X. The scratch slot stays as it is, zeros."""


def tail(tokens_BW: Tensor, places: Places, drafted: tuple[int, int], rows: int) -> Tail:
    """`TailOf` in torch."""
    length_B, (first, each) = places.length_B, drafted
    start_B = (length_B + 1 - rows).clamp_min(0)
    live_B = length_B + 1 - start_B
    row_R = torch.arange(rows, device=start_B.device)
    live_BR = row_R < live_B[:, None]
    end_BR = torch.where(live_BR, live_B[:, None], row_R + 1)
    position_BR = start_B[:, None] + torch.where(live_BR, row_R, 0)
    sight = behind(replace(places, length_B=start_B), end_BR, live_B)
    root_B1 = live_B[:, None] - 1
    scratch_B1 = (first + each * torch.arange(len(live_B), device=start_B.device))[:, None]
    return Tail(
        tokens_BR=tokens_BW.gather(1, position_BR),
        position_BR=position_BR,
        before_BR=slots_of(places, position_BR - 1),
        slot_BR=torch.where(row_R == root_B1, scratch_B1, sight.slot_BN),
        end_BR=end_BR,
        live_B=live_B,
        start_B=start_B,
        root_B1=root_B1,
        below_B1=length_B[:, None] + 1,
    )


def keep(state_SC: Tensor, places: Places, count_B: Tensor, state_TC: Tensor) -> None:
    """`Keep` in torch."""
    row_X = torch.arange(len(state_TC) // len(count_B), device=count_B.device)
    kept_BX = row_X < count_B[:, None]
    at_BX = torch.where(kept_BX, places.length_B[:, None] + row_X, -1)
    state_SC.index_copy_(0, slots_of(places, at_BX).flatten(), state_TC)
    state_SC[SCRATCH].zero_()  # a state that is not finite may have come there

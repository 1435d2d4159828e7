"""Select and order: cut a drafter's pool to the most valuable nodes and lay them out in preorder.

Legend: B requests, P pool nodes, N = R - 1 kept nodes, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from furcate.kernels.draft import Draft, Proposal

__all__ = ["Select", "ancestors_of", "gains", "lone_roots", "ranks", "select"]


class Select(Protocol):
    """The best nodes as a draft; see `select`."""

    def __call__(
        self,
        proposal: Proposal,
        root_B: Tensor,
        rows: int,
        allowance_B: Tensor,
        slot_B: Tensor | None = None,
    ) -> Draft: ...


def select(
    proposal: Proposal,
    root_B: Tensor,
    rows: int,
    allowance_B: Tensor,
    slot_B: Tensor | None = None,
) -> Draft:
    """The top `rows - 1` nodes by value as a Draft; request b keeps at most `allowance[b]` rows.

    A child's value never exceeds its parent's, so the top N by (value, depth) is a connected tree
    and the best one for its size (OPT-Tree, arXiv:2406.17276, section 3). The torch reference: two
    stable sorts, pointer doubling, prefix sums; fixed shapes, no host synchronisation. With
    `slot_B` row `slot[b]` of the proposal is request b's.
    """
    if slot_B is not None:
        proposal = _of_slots(proposal, slot_B)
    kept_BN, rank_BP = _most_valuable(proposal, rows - 1)
    value_BN = proposal.value_BP.gather(1, kept_BN)
    slot_N = torch.arange(1, kept_BN.shape[1] + 1, device=root_B.device)
    alive_BN = (value_BN > -torch.inf) & (slot_N < allowance_B[:, None])
    live_B = alive_BN.sum(1) + 1

    parent_BR = _with_root(_local_parent(proposal, kept_BN, rank_BP, alive_BN), 0)
    alive_BR = _with_root(alive_BN, True)
    place_BR, size_BR = _preorder(parent_BR, alive_BR)

    tag = proposal.tag_BP
    order_BR = torch.empty_like(place_BR).scatter_(1, place_BR, _index_like(place_BR))
    old = _Rows(
        tokens=torch.cat([root_B[:, None], proposal.tokens_BP.gather(1, kept_BN)], 1),
        depth=_with_root(torch.where(alive_BN, proposal.depth_BP.gather(1, kept_BN), 0), 0),
        value=_with_root(torch.where(alive_BN, value_BN, -torch.inf), 0.0),
        tag=None
        if tag is None
        else _with_root(torch.where(alive_BN, tag.gather(1, kept_BN), -1), -1),
    )
    draft = Draft(
        tokens_BR=old.tokens.gather(1, order_BR),
        parent_BR=place_BR.gather(1, parent_BR).gather(1, order_BR),
        depth_BR=old.depth.gather(1, order_BR),
        end_BR=(place_BR + size_BR).gather(1, order_BR),
        value_BR=old.value.gather(1, order_BR),
        live_B=live_B,
        tag_BR=None if old.tag is None else old.tag.gather(1, order_BR),
    )
    return _padded(draft, rows)


def lone_roots(root_B: Tensor) -> Draft:
    """A draft of the root alone: plain decoding is the same round with one row."""
    zero_B1 = torch.zeros_like(root_B)[:, None]
    return Draft(
        tokens_BR=root_B[:, None],
        parent_BR=zero_B1,
        depth_BR=zero_B1,
        end_BR=zero_B1 + 1,
        value_BR=zero_B1.float(),
        live_B=torch.ones_like(root_B),
        tag_BR=zero_B1 - 1,
    )


def gains(proposal: Proposal, most: int) -> Tensor:
    """Acceptance probabilities of the `most` best nodes, descending: float32 [B, most]."""
    top = proposal.value_BP.exp().sort(dim=1, descending=True).values[:, :most]
    return torch.nn.functional.pad(top, (0, most - top.shape[1]))


def ranks(value_BP: Tensor, depth_BP: Tensor) -> Tensor:
    """Place of every pool node in the order in which `select` takes them: int64 [B, P]."""
    return _inverse(_by_value(value_BP, depth_BP))


def ancestors_of(end_BR: Tensor) -> Tensor:
    """bool [B, R, R]: entry (i, j) says that row j is an ancestor of row i, or i itself."""
    i_R = torch.arange(end_BR.shape[1], device=end_BR.device)
    return (i_R[None, :] <= i_R[:, None])[None] & (i_R[None, :, None] < end_BR[:, None, :])


@dataclass(frozen=True, slots=True)
class _Rows:
    """The kept nodes before they are put in preorder."""

    tokens: Tensor
    depth: Tensor
    value: Tensor
    tag: Tensor | None


def _of_slots(p: Proposal, slot_B: Tensor) -> Proposal:
    return Proposal(
        tokens_BP=p.tokens_BP[slot_B],
        parent_BP=p.parent_BP[slot_B],
        depth_BP=p.depth_BP[slot_B],
        value_BP=p.value_BP[slot_B],
        tag_BP=None if p.tag_BP is None else p.tag_BP[slot_B],
    )


def _most_valuable(proposal: Proposal, nodes: int) -> tuple[Tensor, Tensor]:
    """(pool indices of the best `nodes`, best first; rank of every pool node)."""
    order_BP = _by_value(proposal.value_BP, proposal.depth_BP)
    return order_BP[:, :nodes], _inverse(order_BP)


def _by_value(value_BP: Tensor, depth_BP: Tensor) -> Tensor:
    """Pool indices by falling value; of equal values the shallower first, then the lower index."""
    by_depth_BP = depth_BP.sort(dim=1, stable=True).indices
    by_value_BP = value_BP.gather(1, by_depth_BP).sort(dim=1, descending=True, stable=True).indices
    return by_depth_BP.gather(1, by_value_BP)


def _inverse(order_BP: Tensor) -> Tensor:
    return torch.empty_like(order_BP).scatter_(1, order_BP, _index_like(order_BP))


def _local_parent(proposal: Proposal, kept_BN: Tensor, rank_BP: Tensor, alive_BN: Tensor) -> Tensor:
    """Row index of each kept node's parent, rows in order of value; 0 for the root's and dead."""
    parent_BN = proposal.parent_BP.gather(1, kept_BN)
    rank_BN = rank_BP.gather(1, parent_BN.clamp_min(0))
    return torch.where(alive_BN & (parent_BN >= 0), rank_BN + 1, 0)


def _preorder(parent_BR: Tensor, alive_BR: Tensor) -> tuple[Tensor, Tensor]:
    """(place of each row in DFS preorder, size of its subtree); dead rows keep their place."""
    rows = parent_BR.shape[1]
    i_R = torch.arange(rows, device=parent_BR.device)
    above_BRR = torch.eye(rows, device=parent_BR.device).expand(len(parent_BR), rows, rows).clone()
    above_BRR.scatter_(2, parent_BR[:, :, None], 1.0)
    above_BRR = torch.where(alive_BR[:, :, None], above_BRR, torch.eye(rows, device=i_R.device))
    for _ in range(max(1, (rows - 1).bit_length())):
        above_BRR = (above_BRR @ above_BRR).clamp_max(1.0)
    size_BR = above_BRR.sum(1)

    sibling_BRR = (parent_BR[:, :, None] == parent_BR[:, None, :]) & (i_R[None, :] < i_R[:, None])
    sibling_BRR &= (alive_BR[:, :, None] & alive_BR[:, None, :]) & (i_R > 0)
    earlier_BR = (sibling_BRR * size_BR[:, None, :]).sum(2)
    step_BR = torch.where(i_R > 0, 1.0 + earlier_BR, 0.0)
    place_BR = (above_BRR @ step_BR[:, :, None])[:, :, 0].round().long()
    return torch.where(alive_BR, place_BR, i_R), torch.where(alive_BR, size_BR.round().long(), 1)


def _with_root(x_BN: Tensor, root: float | bool) -> Tensor:
    return torch.nn.functional.pad(x_BN, (1, 0), value=root)


def _index_like(x_BN: Tensor) -> Tensor:
    return torch.arange(x_BN.shape[1], device=x_BN.device).expand_as(x_BN)


def _padded(draft: Draft, rows: int) -> Draft:
    """`draft` widened to `rows` rows by pads; a pool may hold fewer nodes than asked for."""
    have = draft.tokens_BR.shape[1]
    if have == rows:
        return draft
    pad = (0, rows - have)
    end_R = torch.arange(have + 1, rows + 1, device=draft.end_BR.device)
    fill = torch.nn.functional.pad
    return Draft(
        tokens_BR=fill(draft.tokens_BR, pad),
        parent_BR=fill(draft.parent_BR, pad),
        depth_BR=fill(draft.depth_BR, pad),
        end_BR=torch.cat([draft.end_BR, end_R.expand(len(draft.end_BR), -1)], 1),
        value_BR=fill(draft.value_BR, pad, value=-torch.inf),
        live_B=draft.live_B,
        tag_BR=None if draft.tag_BR is None else fill(draft.tag_BR, pad, value=-1),
    )

"""How many nodes a tree needs to hold the target's own continuation, from one proposal.

Legend: B roots, P pool nodes, D levels, N node budgets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from furcate.kernels.draft import Proposal
from furcate.kernels.select import ranks

__all__ = ["ABSENT", "accepted_of", "on_path", "path_ranks"]

ABSENT = 32767  # rank of a node that the pool does not hold


def path_ranks(proposal: Proposal, next_BD: Tensor, deepest: int) -> Tensor:
    """Rank of the node on the target's path at each depth, int64 [B, D]; ABSENT where none is.

    A tree of N nodes holds exactly the nodes of rank < N, and ranks grow along a path: so one
    proposal tells the accepted length for every N. Levels below `deepest` are left out first.

    Args:
        next_BD: int64, the tokens that follow each root; -1 past the end of the stream.
    """
    depth_BP, levels = proposal.depth_BP, next_BD.shape[1]
    dead_BP = (depth_BP > min(deepest, levels)) | (proposal.value_BP == -torch.inf)
    value_BP = proposal.value_BP.masked_fill(dead_BP, -torch.inf)
    on_BP = on_path(proposal, next_BD) & ~dead_BP
    rank_BP = torch.where(on_BP, ranks(value_BP, depth_BP), ABSENT)
    out_BD = torch.full_like(next_BD, ABSENT)
    return out_BD.scatter_reduce(1, (depth_BP - 1).clamp(0, levels - 1), rank_BP, "amin")


def on_path(proposal: Proposal, next_BD: Tensor) -> Tensor:
    """Which pool nodes stand on the target's path, bool [B, P]; `next_BD` as in `path_ranks`."""
    levels, parent_BP = next_BD.shape[1], proposal.parent_BP
    level_BP = (proposal.depth_BP - 1).clamp(0, levels - 1)
    match_BP = (proposal.tokens_BP == next_BD.gather(1, level_BP)) & (proposal.depth_BP <= levels)
    on_BP = match_BP & (parent_BP < 0)
    for _ in range(1, levels):
        on_BP = match_BP & ((parent_BP < 0) | on_BP.gather(1, parent_BP.clamp_min(0)))
    return on_BP


def accepted_of(rank_BD: Tensor, nodes: Sequence[int]) -> Tensor:
    """Accepted nodes of each root with a budget of `nodes`: int64 [B, N]."""
    budget_N = torch.as_tensor(nodes, device=rank_BD.device)
    return (rank_BD[:, :, None] < budget_N).sum(1)

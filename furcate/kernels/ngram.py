"""What followed the same words earlier in a text, as a tree with values; the torch reference.

Legend: B requests, W width of the token buffer, M matches followed, D levels, P = M * D pool nodes,
N longest suffix compared everywhere, F longest suffix measured at the chosen matches, K cells of
the table of rates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from furcate.kernels.draft import Proposal

__all__ = [
    "HEAT",
    "HIGHEST",
    "HOTTEST",
    "LENGTHS",
    "MEASURED",
    "PRIOR_WEIGHT",
    "Chains",
    "Evidence",
    "Lookup",
    "RateTable",
    "Search",
    "find_chains",
    "lookup",
    "match_lengths",
    "rates",
    "tags",
]

MEASURED = 16  # a match is measured up to this length; longer ones are alike
PRIOR_WEIGHT = 16.0  # tried nodes that the prior is worth
HIGHEST = 0.995  # so that a child's value stays strictly below its parent's

# The prior is of greedy answers. At a temperature T it is raised to 1 + HEAT * T^4: a drawn token
# follows an older text less often, and least where the match is weak. On 32 answers of the target
# to prompts of its own at each temperature the likeliest powers were 1.1 at 0.7, 1.3 at 1 and 1.8
# at 1.2, where the prior itself promised 492 nodes and 196 came.
HEAT = 0.35
HOTTEST = 2.0  # temperatures above are alike

# Columns of the table: context length, that is the tokens that match plus the levels above, from
LENGTHS = (1, 2, 3, 4, 5, 7, 10, 16)


@dataclass(frozen=True, slots=True)
class Search:
    """What is looked for."""

    depth: int  # D
    matches: int  # M
    shortest: int  # least length of a match
    longest: int  # N


@dataclass(frozen=True, slots=True)
class RateTable:
    """Acceptance rates per cell; rows are those of `_standing`, columns are `LENGTHS`."""

    prior_K: Tensor  # float32, of greedy answers
    edges: Tensor  # int64, `LENGTHS` but the first
    tried_K: Tensor  # float32, decayed counts
    right_K: Tensor  # float32


Lookup = Callable[[Tensor, Tensor, Tensor, Search, RateTable], Proposal]
"""(tokens_BW, length_B, temperature_B, search, table) -> the merged continuations, with tags: M
chains of D nodes, one behind the other."""


@dataclass(frozen=True, slots=True)
class Chains:
    """The continuations of the best matches, siblings merged; all [B, M, D] but `length_BM`."""

    tokens_BMD: Tensor  # int64
    alive_BMD: Tensor  # bool, the first of all chains that begin with these d tokens
    first_BMD: Tensor  # int64, the chain that speaks for this prefix
    support_BMD: Tensor  # int64, how many chains begin with these d tokens; 0: no chain
    length_BM: Tensor  # int64, tokens of the suffix that match, at most F; 0: no match


@dataclass(frozen=True, slots=True)
class Evidence:
    """What speaks for each node of the merged chains."""

    length_BM: Tensor  # int64, tokens of the suffix that match
    support_BMD: Tensor  # int64, chains that go through the node
    rivals_BMD: Tensor  # int64, chains that go through its parent
    leads_BMD: Tensor  # bool, the node is its parent's first child: that of the longest match


def lookup(
    tokens_BW: Tensor, length_B: Tensor, temperature_B: Tensor, search: Search, table: RateTable
) -> Proposal:
    """The continuations of the best matches of each request's last tokens as one tree.

    The best are the longest, then the latest. The root is `tokens[length]`; columns behind it have
    no meaning. Fixed shapes, no host synchronisation.
    """
    tokens_BW = pad(tokens_BW, (0, max(0, search.matches - tokens_BW.shape[1])))
    at_BM, length_BM = _best_matches(tokens_BW, length_B, search)
    chains = find_chains(tokens_BW, length_B, at_BM, length_BM, search.depth)
    tag_BMD = tags(_evidence(chains), table.edges)
    # a chain's node may be another chain's: the path runs through the nodes that stand for it
    log_BK = rates(temperature_B, table).log()
    step_BMD = log_BK.gather(1, tag_BMD.flatten(1)).view_as(tag_BMD).gather(1, chains.first_BMD)
    value_BMD = torch.where(chains.alive_BMD, step_BMD.cumsum(2), -torch.inf)
    level_D = torch.arange(search.depth, device=value_BMD.device)
    parent_BMD = pad(chains.first_BMD[..., :-1] * search.depth + level_D[:-1], (1, 0), value=-1)
    return Proposal(
        tokens_BP=chains.tokens_BMD.flatten(1),
        parent_BP=parent_BMD.flatten(1),
        depth_BP=(level_D + 1).expand_as(parent_BMD).flatten(1),
        value_BP=value_BMD.flatten(1),
        tag_BP=tag_BMD.flatten(1),
    )


def match_lengths(tokens_BW: Tensor, length_B: Tensor, longest: int) -> Tensor:
    """How many tokens up to column j equal the last ones up to the root, at most `longest`.

    int64 [B, W]; 0 from the root's column on, since the root matches only itself there.
    """
    width = tokens_BW.shape[1]
    back_N = torch.arange(longest, device=tokens_BW.device)
    tail_BN = _tokens_at(tokens_BW, length_B[:, None] - back_N, missing=-2)
    wide_BW = pad(tokens_BW, (longest - 1, 0), value=-1)
    alive_BW = torch.arange(width, device=tokens_BW.device) < length_B[:, None]
    length_BW = torch.zeros_like(tokens_BW)
    for back in range(longest):
        begin = longest - 1 - back
        alive_BW = alive_BW & (wide_BW[:, begin : begin + width] == tail_BN[:, back, None])
        length_BW += alive_BW
    return length_BW


def find_chains(
    tokens_BW: Tensor, length_B: Tensor, at_BM: Tensor, length_BM: Tensor, depth: int
) -> Chains:
    """The `depth` tokens after each match, and which of them begin alike.

    Only committed tokens are copied: a continuation that reaches the root goes on from its own
    beginning, as a text does that repeats with this period.
    """
    matches = at_BM.shape[1]
    period_BM1 = (length_B[:, None] - at_BM).clamp_min(1)[..., None]
    step_D = torch.arange(depth, device=at_BM.device)
    source_BMD = at_BM[..., None] + 1 + step_D % period_BM1
    live_BM = length_BM > 0
    tokens_BMD = _tokens_at(tokens_BW, source_BMD.flatten(1), missing=0).view_as(source_BMD)
    tokens_BMD = torch.where(live_BM[..., None], tokens_BMD, 0)

    both_BMM1 = (live_BM[:, :, None] & live_BM[:, None, :])[..., None]
    equal_BMMD = (tokens_BMD[:, :, None] == tokens_BMD[:, None]) & both_BMM1
    alike_BMMD = equal_BMMD.long().cumprod(3)
    first_BMD = alike_BMMD.argmax(2)
    own_M1 = torch.arange(matches, device=at_BM.device)[:, None]
    return Chains(
        tokens_BMD=tokens_BMD,
        alive_BMD=live_BM[..., None] & (first_BMD == own_M1),
        first_BMD=first_BMD,
        support_BMD=alike_BMMD.sum(2),
        length_BM=length_BM,
    )


def tags(evidence: Evidence, edges: Tensor) -> Tensor:
    """The cell that holds each node's rate: int64 [B, M, D].

    A node at level d below a match of n tokens, once its path is accepted, continues a match
    of n + d - 1 tokens; measured rates depend on that sum and not on n or d by themselves.
    """
    level_D = torch.arange(evidence.support_BMD.shape[2], device=evidence.length_BM.device)
    context_BMD = evidence.length_BM[..., None] + level_D
    column_BMD = torch.bucketize(context_BMD, edges, right=True)
    return _standing(evidence) * len(LENGTHS) + column_BMD


def rates(temperature_B: Tensor, table: RateTable) -> Tensor:
    """Posterior mean of each cell's rate for requests of these temperatures: float32 [B, K]."""
    power_B1 = 1 + HEAT * temperature_B.clamp_max(HOTTEST).pow(4)[:, None]
    prior_BK = table.prior_K.pow(power_B1)
    rate_BK = (PRIOR_WEIGHT * prior_BK + table.right_K) / (PRIOR_WEIGHT + table.tried_K)
    return rate_BK.clamp_max(HIGHEST)


def _best_matches(tokens_BW: Tensor, length_B: Tensor, search: Search) -> tuple[Tensor, Tensor]:
    """(ends of the M best matches, longest first and then latest; their lengths, 0: none)."""
    width = tokens_BW.shape[1]
    length_BW = match_lengths(tokens_BW, length_B, search.longest)
    at_W = torch.arange(width, device=tokens_BW.device)
    found_BW = torch.where(length_BW >= search.shortest, length_BW * width + at_W, -1)
    found_BM, at_BM = found_BW.topk(search.matches, dim=1)
    length_BM = torch.where(found_BM >= 0, _measure(tokens_BW, length_B, at_BM), 0)
    order_BM = (length_BM * width + at_BM).argsort(dim=1, descending=True)
    return at_BM.gather(1, order_BM), length_BM.gather(1, order_BM)


def _measure(tokens_BW: Tensor, length_B: Tensor, at_BM: Tensor) -> Tensor:
    """Match lengths at a few columns, up to F: a rate must know a copied passage from a phrase."""
    back_F = torch.arange(MEASURED, device=at_BM.device)
    tail_BF = _tokens_at(tokens_BW, length_B[:, None] - back_F, missing=-2)
    here_BMF = at_BM[..., None] - back_F
    here = _tokens_at(tokens_BW, here_BMF.flatten(1), missing=-1).view_as(here_BMF)
    return (here == tail_BF[:, None]).long().cumprod(2).sum(2)


def _tokens_at(tokens_BW: Tensor, at_BX: Tensor, *, missing: int) -> Tensor:
    """Tokens at these columns; `missing` where a column lies outside the buffer."""
    last = tokens_BW.shape[1] - 1
    inside_BX = (at_BX >= 0) & (at_BX <= last)
    return torch.where(inside_BX, tokens_BW.gather(1, at_BX.clamp(0, last)), missing)


def _evidence(chains: Chains) -> Evidence:
    matched_B = (chains.length_BM > 0).sum(1)
    above = chains.support_BMD[..., :-1]
    matches = above.shape[1]
    own_M1 = torch.arange(matches, device=above.device)[:, None]
    leads_BMD = pad(chains.first_BMD[..., :-1] == own_M1, (1, 0), value=False)
    leads_BMD[:, 0, 0] = True  # below the root the longest match comes first
    return Evidence(
        length_BM=chains.length_BM,
        support_BMD=chains.support_BMD,
        rivals_BMD=torch.cat([matched_B[:, None, None].expand(-1, matches, 1), above], 2),
        leads_BMD=leads_BMD,
    )


def _standing(evidence: Evidence) -> Tensor:
    """Row of the table. First child: share of its parent's chains up to a third, up to 0.6, more,
    the only chain, both of two, all of three or more; later child: up to 0.15, up to a third, more.
    """
    support, rivals = evidence.support_BMD, evidence.rivals_BMD
    share = support / rivals.clamp_min(1)
    split = (share > 0.34).long() + (share > 0.6)
    leading = torch.where(support == rivals, 2 + support.clamp(1, 3), split)
    trailing = 6 + (share > 0.15).long() + (share > 0.34)
    return torch.where(evidence.leads_BMD, leading, trailing)

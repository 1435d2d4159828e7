"""N-gram matches as a tree in Triton: one launch over the text, one over the chains.

Twin of `furcate.kernels.ngram.lookup`. Legend: B requests, W columns of the text, N of them a
program, M matches, padded to a power of two, C of their chains a program, D levels, padded
likewise, F tokens by which a match is measured, X keys of the best matches of all stretches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.draft import Proposal
from furcate.kernels.ngram import (
    HEAT,
    HIGHEST,
    HOTTEST,
    LENGTHS,
    MEASURED,
    PRIOR_WEIGHT,
    RateTable,
    Search,
)

__all__ = ["lookup"]

_LONGEST = 1 << 26  # columns, so that a length and a column fit an int32
_CHAINS = 1 << 12  # entries of all chains' tokens beside some chains' own
_MEASURED = tl.constexpr(MEASURED)
_PRIOR = tl.constexpr(PRIOR_WEIGHT)
_HIGHEST = tl.constexpr(HIGHEST)
_HEAT = tl.constexpr(HEAT)
_HOTTEST = tl.constexpr(HOTTEST)
_COLUMNS = tl.constexpr(len(LENGTHS))
_NEVER = tl.constexpr(float("-inf"))


def lookup(
    tokens_BW: Tensor, length_B: Tensor, temperature_B: Tensor, search: Search, table: RateTable
) -> Proposal:
    """As `furcate.kernels.ngram.lookup`, in two launches; all tensors lie dense."""
    batch, width = tokens_BW.shape
    rates = (table.prior_K, table.tried_K, table.right_K)
    given = (tokens_BW, length_B, temperature_B, *rates)
    assert all(x.is_contiguous() for x in given) and width < _LONGEST
    pool = search.matches * search.depth
    # a long text has longer stretches, so that their best matches stay few
    stretch = min(2048, max(256, triton.next_power_of_2(width) // 32))
    stretches = triton.cdiv(width, stretch)
    key_BX = length_B.new_empty((batch, stretches * search.matches), dtype=torch.int32)
    _matches[(batch, stretches)](
        tokens_BW,
        length_B,
        key_BX,
        width,
        search.matches,
        search.shortest,
        search.longest,
        N=stretch,
        num_warps=max(1, stretch // 256),
    )
    tokens_BP, parent_BP, depth_BP, tag_BP = length_B.new_empty((4, batch, pool)).unbind()
    value_BP = torch.empty((batch, pool), dtype=torch.float32, device=length_B.device)
    lanes = max(2, triton.next_power_of_2(search.matches))
    levels = max(2, triton.next_power_of_2(search.depth))
    chains = max(1, min(lanes, _CHAINS // (lanes * levels)))
    _chains[(batch, triton.cdiv(search.matches, chains))](
        *given,
        key_BX,
        tokens_BP,
        parent_BP,
        depth_BP,
        value_BP,
        tag_BP,
        width,
        key_BX.shape[1],
        search.matches,
        search.depth,
        X=max(2, triton.next_power_of_2(key_BX.shape[1])),
        M=lanes,
        C=chains,
        D=levels,
        EDGES=LENGTHS[1:],
        num_warps=min(8, max(1, chains * lanes * levels // 512)),
        enable_fp_fusion=False,
    )
    return Proposal(tokens_BP, parent_BP, depth_BP, value_BP, tag_BP)


@triton.jit
def _matches(tokens_ptr, length_ptr, key_ptr, width, matches, shortest, longest, N: tl.constexpr):
    """The best matches of a stretch of text as keys, best first: length * width + end, or -1."""
    b = tl.program_id(0).to(tl.int64)
    stretch = tl.program_id(1)
    text_ptr = tokens_ptr + b * width
    root = tl.load(length_ptr + b).to(tl.int32)
    at_N = stretch * N + tl.arange(0, N)
    alive_N = at_N < tl.minimum(root, width)
    length_N = tl.zeros((N,), tl.int32)
    for back in range(longest):
        known = (root >= back) & (root - back < width)
        last = tl.load(text_ptr + root - back, mask=known, other=-2)
        here_N = tl.load(text_ptr + at_N - back, mask=alive_N & (at_N >= back), other=-1)
        alive_N = alive_N & (here_N == last)
        length_N += alive_N.to(tl.int32)
    key_N = tl.where(length_N >= shortest, length_N * width + at_N, -1)
    out_ptr = key_ptr + (b * tl.num_programs(1) + stretch) * matches
    for m in range(matches):
        best = tl.max(key_N, 0)
        tl.store(out_ptr + m, best)
        key_N = tl.where(key_N == best, -1, key_N)


@triton.jit
def _chains(
    tokens_ptr,
    length_ptr,
    temperature_ptr,
    prior_ptr,
    tried_ptr,
    right_ptr,
    key_ptr,
    out_tokens_ptr,
    out_parent_ptr,
    out_depth_ptr,
    out_value_ptr,
    out_tag_ptr,
    width,
    keys,
    matches,
    depth,
    X: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    EDGES: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    text_ptr = tokens_ptr + b * width
    root = tl.load(length_ptr + b).to(tl.int32)
    at_M, length_M = _best(text_ptr, key_ptr + b * keys, root, width, keys, matches, X, M)
    m_M = tl.arange(0, M)
    c_C = tl.program_id(1) * C + tl.arange(0, C)
    mine_CM = c_C[:, None] == m_M[None, :]
    at_C = tl.sum(tl.where(mine_CM, at_M[None, :], 0), 1)
    length_C = tl.sum(tl.where(mine_CM, length_M[None, :], 0), 1)

    d_D = tl.arange(0, D)
    token_CD = _continued(text_ptr, at_C, length_C, d_D, root, width)
    token_MD = _continued(text_ptr, at_M, length_M, d_D, root, width)
    parted_CMD = (token_CD[:, None, :] != token_MD[None, :, :]) & (d_D < depth)[None, None, :]
    common_CM = tl.min(tl.where(parted_CMD, d_D[None, None, :], D), 2)
    both_CM = (length_C > 0)[:, None] & (length_M > 0)[None, :]
    common_CM = tl.where(both_CM, common_CM, 0)
    # chains that share a prefix share all that is said of it, so each speaks of its own path
    alike_CMD = common_CM[:, :, None] > d_D[None, None, :]
    above_CMD = both_CM[:, :, None] & (common_CM[:, :, None] >= d_D[None, None, :])
    first_CD = _first(alike_CMD, M)
    above_CD = tl.where(d_D[None, :] > 0, _first(above_CMD, M), 0)
    support_CD = tl.sum(alike_CMD.to(tl.int32), 1)
    matched = tl.sum((length_M > 0).to(tl.int32), 0)
    rivals_CD = tl.where(d_D[None, :] > 0, tl.sum(above_CMD.to(tl.int32), 1), matched)
    speaks_CMD = first_CD[:, None, :] == m_M[None, :, None]
    speaker_CD = tl.sum(tl.where(speaks_CMD, length_M[None, :, None], 0), 1)

    leads_CD = above_CD == c_C[:, None]
    tag_CD = _cell(support_CD, rivals_CD, leads_CD, length_C[:, None] + d_D[None, :], EDGES)
    first_leads_CD = above_CD == first_CD
    spoken_CD = speaker_CD + d_D[None, :]
    cell_CD = _cell(support_CD, rivals_CD, first_leads_CD, spoken_CD, EDGES)
    temperature = tl.minimum(tl.load(temperature_ptr + b), _HOTTEST)
    squared = temperature * temperature
    power = 1 + _HEAT * (squared * squared)
    log_CD = _log_rate(prior_ptr, tried_ptr, right_ptr, cell_CD, power)
    alive_CD = (length_C > 0)[:, None] & (first_CD == c_C[:, None])
    value_CD = tl.where(alive_CD, tl.cumsum(log_CD, 1), _NEVER)

    out_CD = (b * matches + c_C[:, None]) * depth + d_D[None, :]
    here_CD = (c_C < matches)[:, None] & (d_D < depth)[None, :]
    zero_CD = tl.zeros((C, D), tl.int64)
    up_CD = tl.where(d_D[None, :] > 0, above_CD * depth + d_D[None, :] - 1, -1)
    tl.store(out_tokens_ptr + out_CD, token_CD, mask=here_CD)
    tl.store(out_parent_ptr + out_CD, zero_CD + up_CD, mask=here_CD)
    tl.store(out_depth_ptr + out_CD, zero_CD + d_D[None, :] + 1, mask=here_CD)
    tl.store(out_value_ptr + out_CD, value_CD, mask=here_CD)
    tl.store(out_tag_ptr + out_CD, zero_CD + tag_CD, mask=here_CD)


@triton.jit
def _best(text_ptr, key_ptr, root, width, keys, matches, X: tl.constexpr, M: tl.constexpr):
    """(ends of the best matches of all stretches, their lengths), longest first, then latest."""
    x_X = tl.arange(0, X)
    m_M = tl.arange(0, M)
    key_X = tl.load(key_ptr + x_X, mask=x_X < keys, other=-1)
    key_M = tl.full((M,), -1, tl.int32)
    for m in range(matches):
        best = tl.max(key_X, 0)
        key_M = tl.where(m_M == m, best, key_M)
        key_X = tl.where(key_X == best, -1, key_X)
    live_M = key_M >= 0
    at_M = tl.where(live_M, key_M % width, 0)
    f_F = tl.arange(0, _MEASURED)
    last_F = tl.load(text_ptr + root - f_F, mask=(root >= f_F) & (root - f_F < width), other=-2)
    inside_MF = live_M[:, None] & (at_M[:, None] >= f_F[None, :])
    here_MF = tl.load(text_ptr + at_M[:, None] - f_F[None, :], mask=inside_MF, other=-1)
    parted_MF = here_MF != last_F[None, :]
    length_M = tl.min(tl.where(parted_MF, f_F[None, :], _MEASURED), 1)
    length_M = tl.where(live_M, length_M, 0)
    # places by counting: ends differ, and what is no match stands behind all that are
    order_M = tl.where(live_M, length_M * width + at_M, -1 - m_M)
    rank_M = tl.sum((order_M[:, None] > order_M[None, :]).to(tl.int32), 0)
    moved_MM = rank_M[:, None] == m_M[None, :]
    at_M = tl.sum(tl.where(moved_MM, at_M[:, None], 0), 0)
    return at_M, tl.sum(tl.where(moved_MM, length_M[:, None], 0), 0)


@triton.jit
def _continued(text_ptr, at_C, length_C, d_D, root, width):
    """Tokens behind each match, round and round at the root; 0 behind none."""
    period_C = tl.maximum(root - at_C, 1)
    from_CD = at_C[:, None] + 1 + d_D[None, :] % period_C[:, None]
    inside_CD = (length_C > 0)[:, None] & (from_CD < width)
    return tl.load(text_ptr + from_CD, mask=inside_CD, other=0)


@triton.jit
def _first(alike_CMD, M: tl.constexpr):
    """The first chain that is alike; 0 where none is."""
    m_M = tl.arange(0, M)
    first_CD = tl.min(tl.where(alike_CMD, m_M[None, :, None], M), 1)
    return tl.where(first_CD == M, 0, first_CD)


@triton.jit
def _cell(support_CD, rivals_CD, leads_CD, context_CD, EDGES: tl.constexpr):
    """The cell of the table: `furcate.kernels.ngram.tags`."""
    share_CD = tl.div_rn(support_CD.to(tl.float32), tl.maximum(rivals_CD, 1).to(tl.float32))
    third_CD = (share_CD > 0.34).to(tl.int32)
    split_CD = third_CD + (share_CD > 0.6).to(tl.int32)
    whole_CD = 2 + tl.minimum(tl.maximum(support_CD, 1), 3)
    leading_CD = tl.where(support_CD == rivals_CD, whole_CD, split_CD)
    trailing_CD = 6 + (share_CD > 0.15).to(tl.int32) + third_CD
    cell_CD = tl.where(leads_CD, leading_CD, trailing_CD) * _COLUMNS
    for k in tl.static_range(_COLUMNS - 1):
        cell_CD += (context_CD >= EDGES[k]).to(tl.int32)
    return cell_CD


@triton.jit
def _log_rate(prior_ptr, tried_ptr, right_ptr, cell_CD, power):
    """log of the posterior mean of each cell's rate."""
    prior_CD = tl.exp(power * tl.log(tl.load(prior_ptr + cell_CD)))
    right_CD = _PRIOR * prior_CD + tl.load(right_ptr + cell_CD)
    tried_CD = _PRIOR + tl.load(tried_ptr + cell_CD)
    return tl.log(tl.minimum(tl.div_rn(right_CD, tried_CD), _HIGHEST))

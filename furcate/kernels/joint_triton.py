"""A network's pool and that of the matches as one, in Triton: one block a request, level by level.

Twin of `furcate.kernels.joint.joined`. Legend: B requests, N nodes of the joint pool, X nodes of a
level of the network's pool, Y chains of matches, both padded to powers of two.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.draft import Proposal
from furcate.kernels.grow import BINS, HIGHEST, PRIOR_WEIGHT, STEPS
from furcate.kernels.joint import (
    BOTH,
    MATCH,
    MATCH_SAYS,
    NETWORK,
    NETWORK_ROOM,
    NETWORK_SAYS,
    OWN_ROOM,
    UNLISTED,
    Pools,
)

__all__ = ["MOST", "join"]

_BINS = tl.constexpr(BINS)
_STEPS = tl.constexpr(STEPS)
_PRIOR = tl.constexpr(PRIOR_WEIGHT)
_HIGHEST = tl.constexpr(HIGHEST)
_LEAST = tl.constexpr(1e-6)
_LOG_HIGHEST = tl.constexpr(math.log(HIGHEST))
_NETWORK, _MATCH, _BOTH = tl.constexpr(NETWORK), tl.constexpr(MATCH), tl.constexpr(BOTH)
_NETWORK_SAYS, _MATCH_SAYS = tl.constexpr(NETWORK_SAYS), tl.constexpr(MATCH_SAYS)
_UNLISTED = tl.constexpr(UNLISTED)
_OWN_ROOM, _NETWORK_ROOM = tl.constexpr(OWN_ROOM), tl.constexpr(NETWORK_ROOM)
_NEVER, _ENDLESS = tl.constexpr(float("-inf")), tl.constexpr(float("inf"))
_NOWHERE = tl.constexpr(2**31 - 1)
MOST = 1 << 15  # chains times nodes of a level, both padded, that one program compares


def join(
    first: Proposal, second: Proposal, pools: Pools, counts: tuple[Tensor, Tensor]
) -> Proposal:
    """As `furcate.kernels.joint.Join`, in one launch; all tensors lie dense.

    A node of a chain hangs on a node one level above it, and so does one of the network's. Both
    are narrow enough for one program (`Kernels.join_why`).
    """
    (batch, pool), nodes = first.tokens_BP.shape, second.tokens_BP.shape[1]
    chains = nodes // pools.chain
    lanes = max(2, triton.next_power_of_2(chains)), max(2, triton.next_power_of_2(max(pools.sizes)))
    assert lanes[0] * lanes[1] <= MOST
    read = [(x.tokens_BP, x.parent_BP, x.depth_BP, x.value_BP, x.tag_BP) for x in (first, second)]
    given = [*read[0], *read[1], pools.begin_L, *counts]
    assert all(x is not None and x.is_contiguous() for x in given)
    size = (batch, pool + nodes)
    tokens_BN, parent_BN, depth_BN, tag_BN = first.tokens_BP.new_empty((4, *size)).unbind()
    value_BN = torch.empty(size, dtype=torch.float32, device=first.value_BP.device)
    _join[(batch,)](
        *given,
        tokens_BN,
        parent_BN,
        depth_BN,
        value_BN,
        tag_BN,
        pool,
        len(pools.sizes),
        chains,
        pools.chain,
        Y=lanes[0],
        X=lanes[1],
        num_warps=min(16, max(1, lanes[0] * lanes[1] // 256)),
        enable_fp_fusion=False,
    )
    return Proposal(tokens_BN, parent_BN, depth_BN, value_BN, tag_BN)


@triton.jit
def _join(
    first_tokens_ptr,
    first_parent_ptr,
    first_depth_ptr,
    first_value_ptr,
    first_tag_ptr,
    tokens_ptr,
    parent_ptr,
    depth_ptr,
    value_ptr,
    tag_ptr,
    begin_ptr,
    expected_ptr,
    accepted_ptr,
    out_tokens_ptr,
    out_parent_ptr,
    out_depth_ptr,
    out_value_ptr,
    out_tag_ptr,
    pool,
    levels,
    chains,
    steps,
    Y: tl.constexpr,
    X: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    out = b * (pool + chains * steps)
    x_X = tl.arange(0, X)
    # of the level above: where nodes of chains stand, joint values, and each pool's own
    place_Y = tl.full((Y,), -1, tl.int32)
    value_Y = tl.zeros((Y,), tl.float32)
    said_Y = tl.zeros((Y,), tl.float32)
    value_X = tl.zeros((X,), tl.float32)
    said_X = tl.zeros((X,), tl.float32)
    above = 0
    for d in range(levels):
        begin = tl.load(begin_ptr + d)
        on_X = x_X < tl.load(begin_ptr + d + 1) - begin
        from_X = b * pool + begin + x_X
        token_X = tl.load(first_tokens_ptr + from_X, mask=on_X, other=-1)
        parent_X = tl.load(first_parent_ptr + from_X, mask=on_X, other=-2).to(tl.int32)
        depth_X = tl.load(first_depth_ptr + from_X, mask=on_X, other=0)
        own_X = tl.load(first_value_ptr + from_X, mask=on_X, other=_NEVER)
        note_X = tl.load(first_tag_ptr + from_X, mask=on_X, other=-1)
        alive_X = on_X & (own_X > _NEVER)
        note_X = tl.where(alive_X, note_X, -1)
        listed_X = note_X >= 0
        root_X = parent_X < 0
        up_X = tl.minimum(tl.maximum(parent_X - above, 0), X - 1)
        step_X = own_X - tl.where(root_X, 0.0, tl.gather(said_X, up_X, 0))
        network_X = tl.where(alive_X, tl.exp(step_X), 0.0)

        token_Y, up_Y, alive_Y, note_Y, match_Y, said_Y, higher_Y = _level(
            tokens_ptr,
            parent_ptr,
            value_ptr,
            tag_ptr,
            b,
            d,
            chains,
            steps,
            place_Y,
            value_Y,
            said_Y,
        )
        matched_Y = alive_Y & (note_Y >= 0)
        kin_YX = alive_Y[:, None] & (up_Y[:, None] == parent_X[None, :])
        same_YX = kin_YX & alive_X[None, :] & (token_Y[:, None] == token_X[None, :])
        twin_Y = tl.min(tl.where(same_YX, begin + x_X[None, :], _NOWHERE), 1)
        listed_Y = tl.sum((same_YX & listed_X[None, :]).to(tl.int32), 1) > 0
        network_Y = tl.sum(tl.where(same_YX & listed_X[None, :], network_X[None, :], 0.0), 1)
        known_YX = kin_YX & listed_X[None, :]
        least_Y = tl.min(tl.where(known_YX, network_X[None, :], _ENDLESS), 1)
        claimed_Y, share_Y = _claims(match_Y, matched_Y, network_Y, listed_Y, least_Y, up_Y, Y)
        kind_Y = tl.where(listed_Y, _BOTH, _MATCH)
        step_Y, tag_Y = _corrected(tl.log(claimed_Y), kind_Y, expected_ptr, accepted_ptr)
        value_Y = higher_Y + step_Y
        tag_Y = (note_Y + 1) * (_NETWORK_ROOM * _OWN_ROOM) + tag_Y

        taken_YX = same_YX & matched_Y[:, None]
        met_X = tl.sum(taken_YX.to(tl.int32), 0) > 0
        left_YX = tl.where(kin_YX & matched_Y[:, None], share_Y[:, None], 1.0)
        plain_X, tag_X = _corrected(
            tl.log(network_X * tl.min(left_YX, 0)), _NETWORK, expected_ptr, accepted_ptr
        )
        worth_X = tl.where(met_X, tl.sum(tl.where(taken_YX, step_Y[:, None], 0.0), 0), plain_X)
        value_X = tl.where(root_X, 0.0, tl.gather(value_X, up_X, 0)) + worth_X
        value_X = tl.where(alive_X, value_X, _NEVER)
        tag_X = tl.where(met_X, tl.sum(tl.where(taken_YX, tag_Y[:, None], 0), 0), tag_X)
        tag_X += (note_X + 1) * _OWN_ROOM
        said_X = own_X

        to_X = out + begin + x_X
        tl.store(out_tokens_ptr + to_X, token_X, mask=on_X)
        tl.store(out_parent_ptr + to_X, parent_X.to(tl.int64), mask=on_X)
        tl.store(out_depth_ptr + to_X, depth_X, mask=on_X)
        tl.store(out_value_ptr + to_X, value_X, mask=on_X)
        tl.store(out_tag_ptr + to_X, tl.where(alive_X, tag_X, 0), mask=on_X)
        alone_Y = matched_Y & (twin_Y == _NOWHERE)
        place_Y = tl.where(twin_Y == _NOWHERE, pool + tl.arange(0, Y) * steps + d, twin_Y)
        _write_level(
            out_tokens_ptr + out + pool,
            out_parent_ptr + out + pool,
            out_depth_ptr + out + pool,
            out_value_ptr + out + pool,
            out_tag_ptr + out + pool,
            depth_ptr + b * chains * steps,
            token_Y,
            up_Y,
            tl.where(alone_Y, value_Y, _NEVER),
            tl.where(alone_Y, tag_Y, 0),
            d,
            chains,
            steps,
        )
        above = begin

    for d in range(levels, steps):  # matches go on where the network ends
        token_Y, up_Y, alive_Y, note_Y, match_Y, said_Y, higher_Y = _level(
            tokens_ptr,
            parent_ptr,
            value_ptr,
            tag_ptr,
            b,
            d,
            chains,
            steps,
            place_Y,
            value_Y,
            said_Y,
        )
        matched_Y = alive_Y & (note_Y >= 0)
        zero_Y = tl.zeros((Y,), tl.float32)
        claimed_Y, share_Y = _claims(
            match_Y, matched_Y, zero_Y, zero_Y > 0, zero_Y + _ENDLESS, up_Y, Y
        )
        kind_Y = tl.zeros((Y,), tl.int32) + _MATCH
        step_Y, tag_Y = _corrected(tl.log(claimed_Y), kind_Y, expected_ptr, accepted_ptr)
        value_Y = higher_Y + step_Y
        tag_Y = (note_Y + 1) * (_NETWORK_ROOM * _OWN_ROOM) + tag_Y
        place_Y = pool + tl.arange(0, Y) * steps + d
        _write_level(
            out_tokens_ptr + out + pool,
            out_parent_ptr + out + pool,
            out_depth_ptr + out + pool,
            out_value_ptr + out + pool,
            out_tag_ptr + out + pool,
            depth_ptr + b * chains * steps,
            token_Y,
            up_Y,
            tl.where(matched_Y, value_Y, _NEVER),
            tl.where(matched_Y, tag_Y, 0),
            d,
            chains,
            steps,
        )


@triton.jit
def _level(
    tokens_ptr, parent_ptr, value_ptr, tag_ptr, b, d, chains, steps, place_Y, value_Y, said_Y
):
    """One level of all chains: tokens, places of the parents, alive or not, notes, P(accepted |
    its parent is), the chains' own values, and the joint values of the parents."""
    Y: tl.constexpr = place_Y.shape[0]
    y_Y = tl.arange(0, Y)
    on_Y = (y_Y < chains) & (d < steps)
    from_Y = (b * chains + y_Y) * steps + d
    token_Y = tl.load(tokens_ptr + from_Y, mask=on_Y, other=-1)
    parent_Y = tl.load(parent_ptr + from_Y, mask=on_Y, other=-1).to(tl.int32)
    own_Y = tl.load(value_ptr + from_Y, mask=on_Y, other=_NEVER)
    note_Y = tl.load(tag_ptr + from_Y, mask=on_Y, other=-1)
    alive_Y = on_Y & (own_Y > _NEVER)
    root_Y = parent_Y < 0
    chain_Y = tl.minimum(tl.maximum(parent_Y, 0) // steps, Y - 1)
    up_Y = tl.where(root_Y, -1, tl.gather(place_Y, chain_Y, 0))
    above_Y = tl.where(root_Y, 0.0, tl.gather(said_Y, chain_Y, 0))
    higher_Y = tl.where(root_Y, 0.0, tl.gather(value_Y, chain_Y, 0))
    match_Y = tl.where(alive_Y, tl.exp(own_Y - above_Y), 0.0)
    note_Y = tl.where(alive_Y, note_Y, -1)
    return token_Y, up_Y, alive_Y, note_Y, match_Y, own_Y, higher_Y


@triton.jit
def _claims(match_Y, matched_Y, network_Y, listed_Y, least_Y, up_Y, Y: tl.constexpr):
    """(what each match claims, what that leaves to the network's other children, a share)."""
    thinks_Y = tl.where(listed_Y, network_Y, _UNLISTED * least_Y)
    says_Y = _NETWORK_SAYS * _odds(thinks_Y) + _MATCH_SAYS * _odds(match_Y)
    both_Y = tl.minimum(tl.sigmoid(says_Y), _HIGHEST)
    both_Y = tl.maximum(both_Y, tl.where(listed_Y, network_Y, 0.0))
    claimed_Y = tl.where(least_Y < _ENDLESS, both_Y, match_Y)
    claimed_Y = tl.where(matched_Y, claimed_Y, 0.0)
    kin_YY = (up_Y[:, None] == up_Y[None, :]) & matched_Y[:, None]
    total_Y = tl.sum(tl.where(kin_YY, claimed_Y[:, None], 0.0), 0)
    heard_YY = kin_YY & listed_Y[:, None]
    had_Y = 1 - tl.sum(tl.where(heard_YY, network_Y[:, None], 0.0), 0)
    claimed_Y = tl.div_rn(claimed_Y, tl.maximum(total_Y, 1.0))
    share_Y = tl.div_rn(1 - tl.minimum(total_Y, 1.0), tl.maximum(had_Y, _LEAST))
    return claimed_Y, tl.minimum(tl.maximum(share_Y, _LEAST), 1.0)


@triton.jit
def _odds(chance_Y):
    """Log odds of a probability, kept finite."""
    chance_Y = tl.minimum(tl.maximum(chance_Y, _LEAST), _HIGHEST)
    return tl.log(chance_Y) - tl.log(1 - chance_Y)


@triton.jit
def _corrected(step_Y, kind_Y, expected_ptr, accepted_ptr):
    """(log of the calibrated probability, the note) of nodes of these logs and kinds."""
    tag_Y = (tl.exp(step_Y) * (_STEPS - 1)).to(tl.int64) + kind_Y * _STEPS
    bin_Y = tag_Y * _BINS // _STEPS
    accepted_Y = _PRIOR + tl.load(accepted_ptr + bin_Y)
    expected_Y = _PRIOR + tl.load(expected_ptr + bin_Y)
    ratio_Y = tl.log(tl.div_rn(accepted_Y, expected_Y))
    return tl.minimum(step_Y + ratio_Y, _LOG_HIGHEST), tag_Y


@triton.jit
def _write_level(
    tokens_ptr,
    parent_ptr,
    depth_ptr,
    value_ptr,
    tag_ptr,
    from_ptr,
    token_Y,
    up_Y,
    value_Y,
    tag_Y,
    d,
    chains,
    steps,
):
    """One level of all chains as entries of the joint pool, alive or not."""
    y_Y = tl.arange(0, token_Y.shape[0])
    on_Y = (y_Y < chains) & (d < steps)
    at_Y = y_Y * steps + d
    depth_Y = tl.load(from_ptr + at_Y, mask=on_Y, other=0)
    tl.store(tokens_ptr + at_Y, token_Y, mask=on_Y)
    tl.store(parent_ptr + at_Y, up_Y.to(tl.int64), mask=on_Y)
    tl.store(depth_ptr + at_Y, depth_Y, mask=on_Y)
    tl.store(value_ptr + at_Y, value_Y, mask=on_Y)
    tl.store(tag_ptr + at_Y, tag_Y, mask=on_Y)

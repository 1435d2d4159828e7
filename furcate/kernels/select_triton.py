"""Select and order in Triton: the best nodes of a pool in preorder, one block a request.

Twin of `select`. Legend: B requests, P pool nodes, N lanes: the kept nodes, padded to a power of
two, by falling value; W words of 32 lanes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.draft import Draft, Proposal

__all__ = ["select"]

_MOST = 1 << 16  # pool nodes, and levels: what half a word of a sort key holds
_NOBODY = tl.constexpr(-(2**63))


def select(
    proposal: Proposal,
    root_B: Tensor,
    rows: int,
    allowance_B: Tensor,
    slot_B: Tensor | None = None,
) -> Draft:
    """As `furcate.kernels.select.select`, in one launch; all tensors lie dense, P up to 65,536."""
    batch, pool = len(root_B), proposal.value_BP.shape[1]
    assert pool <= _MOST and proposal.value_BP.dtype == torch.float32
    fields = (proposal.tokens_BP, proposal.parent_BP, proposal.depth_BP, proposal.value_BP)
    tag_BP = proposal.tag_BP
    given = (*fields, root_B, allowance_B, tag_BP, slot_B)
    assert all(x is None or x.is_contiguous() for x in given)
    tokens_BR, parent_BR, depth_BR, end_BR = (root_B.new_empty((batch, rows)) for _ in "tpde")
    value_BR = proposal.value_BP.new_empty((batch, rows))
    tag_BR = None if tag_BP is None else root_B.new_empty((batch, rows))
    live_B = root_B.new_empty(batch)
    lanes = max(32, triton.next_power_of_2(rows - 1))
    width = max(lanes, triton.next_power_of_2(pool))
    _select[(batch,)](
        *fields,
        tag_BP,
        root_B,
        allowance_B,
        slot_B,
        tokens_BR,
        parent_BR,
        depth_BR,
        end_BR,
        value_BR,
        tag_BR,
        live_B,
        pool,
        rows,
        P=width,
        N=lanes,
        DOUBLINGS=lanes.bit_length() - 1,
        num_warps=min(32, max(4, lanes * lanes // 1024, width // 256)),
    )
    return Draft(tokens_BR, parent_BR, depth_BR, end_BR, value_BR, live_B, tag_BR)


@triton.jit
def _select(
    tokens_ptr,
    parent_ptr,
    depth_ptr,
    value_ptr,
    tag_ptr,
    root_ptr,
    allowance_ptr,
    slot_ptr,
    out_tokens_ptr,
    out_parent_ptr,
    out_depth_ptr,
    out_end_ptr,
    out_value_ptr,
    out_tag_ptr,
    live_ptr,
    pool,
    rows,
    P: tl.constexpr,
    N: tl.constexpr,
    DOUBLINGS: tl.constexpr,
):
    b = tl.program_id(0)
    first = b.to(tl.int64) * pool
    if slot_ptr is not None:
        first = tl.load(slot_ptr + b) * pool
    id_P = tl.arange(0, P)
    at_P = first + id_P
    value_P = tl.load(value_ptr + at_P, mask=id_P < pool, other=0.0)
    depth_P = tl.load(depth_ptr + at_P, mask=id_P < pool, other=0)
    key_P = tl.where(id_P < pool, _key(value_P, depth_P, id_P), _NOBODY)
    key_N = tl.topk(key_P, N)

    lane_N = tl.arange(0, N)
    kept_N = (key_N != _NOBODY) & (lane_N < rows - 1)
    id_N = 0xFFFF - (key_N & 0xFFFF).to(tl.int32)
    from_N = first + id_N
    value_N = tl.load(value_ptr + from_N, mask=kept_N, other=float("-inf"))
    alive_N = (value_N > float("-inf")) & (lane_N + 1 < tl.load(allowance_ptr + b))
    parent_N = tl.load(parent_ptr + from_N, mask=alive_N, other=-1).to(tl.int32)
    parent_N = tl.maximum(parent_N, -1)

    up_N = tl.where(alive_N, _lane_of(parent_N, id_N), -1)
    size_N = _sizes(up_N, DOUBLINGS)
    elder_NN = (parent_N[:, None] == parent_N[None, :]) & (lane_N[:, None] < lane_N[None, :])
    # a node stands behind its parent and all that hangs on its elder siblings
    step_N = 1 + tl.sum(tl.where(elder_NN & alive_N[:, None], size_N[:, None], 0), 0)
    place_N = tl.where(alive_N, _sum_upwards(step_N, up_N, DOUBLINGS), lane_N + 1)

    out_N = b * rows + place_N
    # a pool that breaks its promise, a child above its parent, must not write to its neighbour
    here_N = (lane_N < rows - 1) & (place_N < rows)
    token_N = tl.load(tokens_ptr + from_N, mask=kept_N, other=0)
    level_N = tl.load(depth_ptr + from_N, mask=alive_N, other=0)
    above_N = tl.where(alive_N, place_N - step_N, 0)
    end_N = place_N + tl.where(alive_N, size_N, 1)
    tl.store(out_tokens_ptr + out_N, token_N, mask=here_N)
    tl.store(out_parent_ptr + out_N, above_N.to(tl.int64), mask=here_N)
    tl.store(out_depth_ptr + out_N, level_N, mask=here_N)
    tl.store(out_end_ptr + out_N, end_N.to(tl.int64), mask=here_N)
    tl.store(out_value_ptr + out_N, tl.where(alive_N, value_N, float("-inf")), mask=here_N)

    root = b * rows
    live = tl.sum(alive_N.to(tl.int64), 0) + 1
    tl.store(live_ptr + b, live)
    tl.store(out_tokens_ptr + root, tl.load(root_ptr + b))
    tl.store(out_parent_ptr + root, live * 0)
    tl.store(out_depth_ptr + root, live * 0)
    tl.store(out_end_ptr + root, live)
    tl.store(out_value_ptr + root, 0.0)
    if tag_ptr is not None:
        tag_N = tl.load(tag_ptr + from_N, mask=alive_N, other=-1)
        tl.store(out_tag_ptr + out_N, tag_N, mask=here_N)
        tl.store(out_tag_ptr + root, live * 0 - 1)


@triton.jit
def _key(value_P, depth_P, id_P):
    """int64, larger for what is taken first: by value, then the shallower, then the lower id."""
    bits_P = tl.where(value_P == 0, 0.0, value_P).to(tl.int32, bitcast=True)  # -0 equals 0
    order_P = tl.where(bits_P < 0, bits_P ^ 0x7FFFFFFF, bits_P).to(tl.int64)
    return (order_P << 32) | ((0xFFFF - depth_P) << 16) | (0xFFFF - id_P)


# Sums run over the first axis, which lies in a thread's own registers: all lanes add.


@triton.jit
def _lane_of(parent_N, id_N):
    """Lane of each node's parent; -1 for the children of the root."""
    lane_N = tl.arange(0, parent_N.shape[0])
    match_NN = id_N[:, None] == parent_N[None, :]
    return tl.where(parent_N < 0, -1, tl.sum(tl.where(match_NN, lane_N[:, None], 0), 0))


@triton.jit
def _sizes(up_N, DOUBLINGS: tl.constexpr):
    """Nodes of each subtree, by pointer doubling on words of 32 lanes: bit j of i's words says
    that j is i, or above it."""
    N: tl.constexpr = up_N.shape[0]
    W: tl.constexpr = N // 32
    lane_N1 = tl.arange(0, N)[:, None]
    above_NW = tl.where(lane_N1 // 32 == tl.arange(0, W)[None, :], 1 << (lane_N1 % 32), 0)
    for _ in tl.static_range(DOUBLINGS):
        at_N = tl.maximum(up_N, 0)
        further_NW = tl.gather(above_NW, tl.broadcast_to(at_N[:, None], N, W), 0)
        above_NW |= tl.where(up_N[:, None] >= 0, further_NW, 0)
        up_N = tl.where(up_N >= 0, tl.gather(up_N, at_N, 0), -1)
    bit_NW32 = (above_NW[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
    return tl.sum(bit_NW32.reshape(N, N), 0)


@triton.jit
def _sum_upwards(x_N, up_N, DOUBLINGS: tl.constexpr):
    """The sum of `x` over each lane and all above it, by pointer doubling."""
    for _ in tl.static_range(DOUBLINGS):
        at_N = tl.maximum(up_N, 0)
        x_N += tl.where(up_N >= 0, tl.gather(x_N, at_N, 0), 0)
        up_N = tl.where(up_N >= 0, tl.gather(up_N, at_N, 0), -1)
    return x_N

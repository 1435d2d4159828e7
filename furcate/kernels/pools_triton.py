"""New proposals put into a state's pool, and their gains, in Triton: one block a request.

Twin of `pools`. Legend: B requests, P nodes of the pool and N best ones, padded to powers of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.draft import Proposal

__all__ = ["MOST", "put"]

MOST = 1 << 14  # nodes that one program sorts


def put(pool: Proposal, slot_B: Tensor, new: Proposal, gain_BN: Tensor) -> None:
    """As `furcate.kernels.pools.Put`; pool and gains lie dense, of at most MOST nodes a request."""
    (batch, nodes), most = new.value_BP.shape, gain_BN.shape[1]
    room = pool.value_BP.shape[1]
    assert room <= MOST
    assert new.value_BP.dtype == pool.value_BP.dtype == gain_BN.dtype == torch.float32
    assert gain_BN.is_contiguous() and slot_B.is_contiguous() and nodes <= room
    read, written = [x if x is None else x.contiguous() for x in _fields(new)], _fields(pool)
    assert all(x is None or x.is_contiguous() for x in written)
    lanes = triton.next_power_of_2(max(most, room, 2))
    _put[(batch,)](
        *read,
        *written,
        slot_B,
        gain_BN,
        nodes,
        room,
        most,
        P=lanes,
        N=max(2, triton.next_power_of_2(most)),
        num_warps=min(8, max(1, lanes // 64)),
    )


def _fields(proposal: Proposal) -> tuple[Tensor | None, ...]:
    p = proposal
    return p.tokens_BP, p.parent_BP, p.depth_BP, p.value_BP, p.tag_BP


@triton.jit(do_not_specialize_on_alignment=["gain_ptr"])  # within a block it may lie anywhere
def _put(
    tokens_ptr,
    parent_ptr,
    depth_ptr,
    value_ptr,
    tag_ptr,
    pool_tokens_ptr,
    pool_parent_ptr,
    pool_depth_ptr,
    pool_value_ptr,
    pool_tag_ptr,
    slot_ptr,
    gain_ptr,
    nodes,
    room,
    most,
    P: tl.constexpr,
    N: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    id_P = tl.arange(0, P)
    used_P = id_P < nodes
    from_P = b * nodes + id_P
    to_P = tl.load(slot_ptr + b) * room + id_P
    token_P = tl.load(tokens_ptr + from_P, mask=used_P)
    parent_P = tl.load(parent_ptr + from_P, mask=used_P)
    depth_P = tl.load(depth_ptr + from_P, mask=used_P)
    value_P = tl.load(value_ptr + from_P, mask=used_P, other=float("-inf"))
    tl.store(pool_tokens_ptr + to_P, token_P, mask=used_P)
    tl.store(pool_parent_ptr + to_P, parent_P, mask=used_P)
    tl.store(pool_depth_ptr + to_P, depth_P, mask=used_P)
    tl.store(pool_value_ptr + to_P, value_P, mask=id_P < room)
    if pool_tag_ptr is not None:
        tag_P = tl.zeros((P,), tl.int64)
        if tag_ptr is not None:
            tag_P = tl.load(tag_ptr + from_P, mask=used_P, other=0)
        tl.store(pool_tag_ptr + to_P, tag_P, mask=used_P)
    n_N = tl.arange(0, N)
    # chances are not negative, so that their bits are in order as whole numbers, NaN on top
    bits_P = tl.where(used_P, tl.exp(value_P), 0.0).to(tl.int32, bitcast=True)
    best_N = tl.topk(bits_P, N).to(tl.float32, bitcast=True)
    tl.store(gain_ptr + b * most + n_N, best_N, mask=n_N < most)

"""A proposal kept for the next round in Triton: one launch, a program a request.

Twin of `keep`. Legend: C slots, B requests, P pool nodes, N nodes that the host is told of.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.draft import Proposal

__all__ = ["keep"]


def keep(kept: Proposal, slot_B: Tensor, new: Proposal, most: int) -> Tensor:
    """As `furcate.kernels.keep.keep`; `kept` lies dense."""
    batch, pool = new.value_BP.shape
    old = (kept.tokens_BP, kept.parent_BP, kept.depth_BP, kept.value_BP)
    fresh = (new.tokens_BP, new.parent_BP, new.depth_BP, new.value_BP)
    assert kept.value_BP.shape[1] == pool and slot_B.is_contiguous()
    assert all(x.is_contiguous() for x in (*old, *(() if kept.tag_BP is None else (kept.tag_BP,))))
    gain_BN = new.value_BP.new_empty((batch, most))
    lanes = triton.next_power_of_2(max(most, 2))
    width = max(lanes, triton.next_power_of_2(pool))
    _keep[(batch,)](
        slot_B,
        *(x_BP.contiguous() for x_BP in fresh),
        None if new.tag_BP is None else new.tag_BP.contiguous(),
        *old,
        kept.tag_BP,
        gain_BN,
        pool,
        most,
        P=width,
        N=lanes,
        num_warps=min(16, max(4, width // 256)),
    )
    return gain_BN


@triton.jit
def _keep(
    slot_ptr,
    tokens_ptr,
    parent_ptr,
    depth_ptr,
    value_ptr,
    tag_ptr,
    kept_tokens_ptr,
    kept_parent_ptr,
    kept_depth_ptr,
    kept_value_ptr,
    kept_tag_ptr,
    gain_ptr,
    pool,
    most,
    P: tl.constexpr,
    N: tl.constexpr,
):
    b = tl.program_id(0)
    id_P = tl.arange(0, P)
    used_P = id_P < pool
    at_P = b * pool + id_P
    to_P = tl.load(slot_ptr + b) * pool + id_P
    value_P = tl.load(value_ptr + at_P, mask=used_P, other=float("-inf"))
    tl.store(kept_value_ptr + to_P, value_P, mask=used_P)
    tl.store(kept_tokens_ptr + to_P, tl.load(tokens_ptr + at_P, mask=used_P), mask=used_P)
    tl.store(kept_parent_ptr + to_P, tl.load(parent_ptr + at_P, mask=used_P), mask=used_P)
    tl.store(kept_depth_ptr + to_P, tl.load(depth_ptr + at_P, mask=used_P), mask=used_P)
    if kept_tag_ptr is not None:
        if tag_ptr is None:
            tl.store(kept_tag_ptr + to_P, tl.zeros((P,), tl.int64), mask=used_P)
        else:
            tl.store(kept_tag_ptr + to_P, tl.load(tag_ptr + at_P, mask=used_P), mask=used_P)
    n_N = tl.arange(0, N)
    gain_N = tl.exp(tl.topk(value_P, N))
    tl.store(gain_ptr + b * most + n_N, gain_N, mask=n_N < most)

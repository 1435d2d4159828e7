"""How often nodes of each weight were accepted, in Triton: one launch a round.

Twin of `furcate.drafters.judge` and `Trust.update`. Legend: B requests, R rows of a draft, N rows
of all requests a turn, K bins padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.draft import Draft, Verdict
from furcate.kernels.grow import BINS, DECAY, STEPS

__all__ = ["tally"]

_BINS = tl.constexpr(BINS)
_DECAY = tl.constexpr(DECAY)
_STEPS = tl.constexpr(STEPS)
_MOST = 512  # rows a turn


def tally(
    draft: Draft, verdict: Verdict, slot_B: Tensor, dummy: int, counts: tuple[Tensor, Tensor]
) -> None:
    """As `furcate.kernels.grow.Tally`; all tensors lie dense."""
    batch, rows = draft.tokens_BR.shape
    assert draft.tag_BR is not None
    given = (draft.tag_BR, draft.parent_BR, draft.live_B, verdict.path_BD, slot_B, *counts)
    assert all(x.is_contiguous() for x in given)
    lanes = min(_MOST, max(32, triton.next_power_of_2(batch * rows)))
    _tally[(1,)](
        *given,
        batch * rows,
        rows,
        verdict.path_BD.shape[1],
        dummy,
        len(counts[0]),
        N=lanes,
        K=triton.next_power_of_2(len(counts[0])),
        num_warps=max(1, lanes // 64),
    )


@triton.jit
def _tally(
    tag_ptr,
    parent_ptr,
    live_ptr,
    path_ptr,
    slot_ptr,
    expected_ptr,
    accepted_ptr,
    total,
    rows,
    width,
    dummy,
    bins,
    N: tl.constexpr,
    K: tl.constexpr,
):
    k_K = tl.arange(0, K)
    used_K = k_K < bins
    expected_K = tl.load(expected_ptr + k_K, mask=used_K, other=0.0) * _DECAY
    accepted_K = tl.load(accepted_ptr + k_K, mask=used_K, other=0.0) * _DECAY
    for first in range(0, total, N):
        at_N = first + tl.arange(0, N)
        inside_N = at_N < total
        b_N = at_N // rows
        row_N = at_N % rows
        tag_N = tl.load(tag_ptr + at_N, mask=inside_N, other=-1)
        parent_N = tl.load(parent_ptr + at_N, mask=inside_N, other=-1)
        live_N = tl.load(live_ptr + b_N, mask=inside_N, other=0)
        slot_N = tl.load(slot_ptr + b_N, mask=inside_N, other=0)
        drafted_N = inside_N & (row_N > 0) & (row_N < live_N) & (slot_N != dummy) & (tag_N >= 0)
        hits_N = tl.zeros((N,), tl.int32)
        above_N = tl.zeros((N,), tl.int32)
        for d in range(width):
            path_N = tl.load(path_ptr + b_N * width + d, mask=inside_N, other=-2)
            hits_N |= (path_N == row_N).to(tl.int32)
            above_N |= (path_N == parent_N).to(tl.int32)
        tried_N = drafted_N & (above_N > 0)
        right_N = tried_N & (hits_N > 0)
        weight_N = tl.div_rn((tag_N % _STEPS).to(tl.float32), _STEPS - 1.0)
        mine_NK = (tag_N * _BINS // _STEPS)[:, None] == k_K[None, :]
        expected_K += tl.sum(tl.where(mine_NK & tried_N[:, None], weight_N[:, None], 0.0), 0)
        accepted_K += tl.sum((mine_NK & right_N[:, None]).to(tl.float32), 0)
    tl.store(expected_ptr + k_K, expected_K, mask=used_K)
    tl.store(accepted_ptr + k_K, accepted_K, mask=used_K)

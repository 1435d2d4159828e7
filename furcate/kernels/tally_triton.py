"""How often nodes of each kind were accepted, in Triton: one launch a round.

Twin of `furcate.drafters.judge`, `Trust.update` and `Rates.update`. Legend: B requests, R rows of
a draft, N rows of all requests a turn, K bins padded to a power of two, or cells of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.draft import Draft, Verdict
from furcate.kernels.grow import BINS, DECAY, STEPS

__all__ = ["judged", "tally", "tally_rates"]

_BINS = tl.constexpr(BINS)
_DECAY = tl.constexpr(DECAY)
_STEPS = tl.constexpr(STEPS)
_MOST = 512  # rows a turn
_CELLS = 16  # a program


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


def tally_rates(
    draft: Draft, verdict: Verdict, slot_B: Tensor, dummy: int, counts: tuple[Tensor, Tensor]
) -> None:
    """As `furcate.kernels.grow.Tally`, counting the tried and the right by tag."""
    batch, rows = draft.tokens_BR.shape
    assert draft.tag_BR is not None
    given = (draft.tag_BR, draft.parent_BR, draft.live_B, verdict.path_BD, slot_B, *counts)
    assert all(x.is_contiguous() for x in given)
    lanes = min(_MOST, max(32, triton.next_power_of_2(batch * rows)))
    _tally_rates[(triton.cdiv(len(counts[0]), _CELLS),)](
        *given,
        batch * rows,
        rows,
        verdict.path_BD.shape[1],
        dummy,
        len(counts[0]),
        N=lanes,
        K=_CELLS,
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
        tag_N = tl.load(tag_ptr + at_N, mask=at_N < total, other=-1)
        tried_N, right_N = judged(
            tag_N, at_N, parent_ptr, live_ptr, path_ptr, slot_ptr, total, rows, width, dummy
        )
        weight_N = tl.div_rn((tag_N % _STEPS).to(tl.float32), _STEPS - 1.0)
        mine_NK = (tag_N * _BINS // _STEPS)[:, None] == k_K[None, :]
        expected_K += tl.sum(tl.where(mine_NK & tried_N[:, None], weight_N[:, None], 0.0), 0)
        accepted_K += tl.sum((mine_NK & right_N[:, None]).to(tl.float32), 0)
    tl.store(expected_ptr + k_K, expected_K, mask=used_K)
    tl.store(accepted_ptr + k_K, accepted_K, mask=used_K)


@triton.jit
def _tally_rates(
    tag_ptr,
    parent_ptr,
    live_ptr,
    path_ptr,
    slot_ptr,
    tried_ptr,
    right_ptr,
    total,
    rows,
    width,
    dummy,
    cells,
    N: tl.constexpr,
    K: tl.constexpr,
):
    k_K = tl.program_id(0) * K + tl.arange(0, K)
    used_K = k_K < cells
    tried_K = tl.load(tried_ptr + k_K, mask=used_K, other=0.0) * _DECAY
    right_K = tl.load(right_ptr + k_K, mask=used_K, other=0.0) * _DECAY
    for first in range(0, total, N):
        at_N = first + tl.arange(0, N)
        tag_N = tl.load(tag_ptr + at_N, mask=at_N < total, other=-1)
        tried_N, right_N = judged(
            tag_N, at_N, parent_ptr, live_ptr, path_ptr, slot_ptr, total, rows, width, dummy
        )
        mine_NK = tag_N[:, None] == k_K[None, :]
        tried_K += tl.sum((mine_NK & tried_N[:, None]).to(tl.float32), 0)
        right_K += tl.sum((mine_NK & right_N[:, None]).to(tl.float32), 0)
    tl.store(tried_ptr + k_K, tried_K, mask=used_K)
    tl.store(right_ptr + k_K, right_K, mask=used_K)


@triton.jit
def judged(tag_N, at_N, parent_ptr, live_ptr, path_ptr, slot_ptr, total, rows, width, dummy):
    """Rows that were drafted and whose parents were accepted, and which of them were, as bools.

    A row of the dummy's counts for nothing, nor does one of tag -1.
    """
    inside_N = at_N < total
    b_N = at_N // rows
    row_N = at_N % rows
    parent_N = tl.load(parent_ptr + at_N, mask=inside_N, other=-1)
    live_N = tl.load(live_ptr + b_N, mask=inside_N, other=0)
    slot_N = tl.load(slot_ptr + b_N, mask=inside_N, other=0)
    drafted_N = inside_N & (row_N > 0) & (row_N < live_N) & (slot_N != dummy) & (tag_N >= 0)
    hits_N = tl.zeros_like(at_N)
    above_N = tl.zeros_like(at_N)
    for d in range(width):
        path_N = tl.load(path_ptr + b_N * width + d, mask=inside_N, other=-2)
        hits_N |= (path_N == row_N).to(tl.int32)
        above_N |= (path_N == parent_N).to(tl.int32)
    tried_N = drafted_N & (above_N > 0)
    return tried_N, tried_N & (hits_N > 0)

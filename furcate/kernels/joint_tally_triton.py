"""What a round says of a hybrid's joint values and of its matches, in Triton: one launch.

Twin of `furcate.drafters.hybrid`'s learning. Legend: B requests, R rows of a draft, N rows of all
requests a turn, K bins or cells of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.draft import Draft, Verdict
from furcate.kernels.grow import BINS, DECAY, STEPS
from furcate.kernels.joint import NETWORK_ROOM, OWN_ROOM
from furcate.kernels.tally_triton import judged

__all__ = ["tally_joint"]

_MOST = 512  # rows a turn
_CELLS = 16  # a program
_BINS = tl.constexpr(BINS)
_STEPS = tl.constexpr(STEPS)
_DECAY = tl.constexpr(DECAY)
_OWN_ROOM, _NETWORK_ROOM = tl.constexpr(OWN_ROOM), tl.constexpr(NETWORK_ROOM)


def tally_joint(
    draft: Draft,
    verdict: Verdict,
    slot_B: Tensor,
    dummy: int,
    joint: tuple[Tensor, Tensor],
    matches: tuple[Tensor, Tensor],
) -> Tensor:
    """As `furcate.kernels.joint.JointTally`, in one launch; all tensors lie dense."""
    batch, rows = draft.tokens_BR.shape
    assert draft.tag_BR is not None
    given = (draft.tag_BR, draft.parent_BR, draft.live_B, verdict.path_BD, slot_B)
    assert all(x.is_contiguous() for x in (*given, *joint, *matches))
    network_BR = draft.tag_BR.new_empty((batch, rows))
    lanes = min(_MOST, max(32, triton.next_power_of_2(batch * rows)))
    bins, cells = len(joint[0]), len(matches[0])
    blocks = triton.cdiv(bins, _CELLS), triton.cdiv(cells, _CELLS)
    _tally_joint[(sum(blocks),)](
        *given,
        *joint,
        *matches,
        network_BR,
        batch * rows,
        rows,
        verdict.path_BD.shape[1],
        dummy,
        bins,
        cells,
        blocks[0],
        N=lanes,
        K=_CELLS,
        num_warps=max(1, lanes // 64),
    )
    return network_BR


@triton.jit
def _tally_joint(
    tag_ptr,
    parent_ptr,
    live_ptr,
    path_ptr,
    slot_ptr,
    expected_ptr,
    accepted_ptr,
    tried_ptr,
    right_ptr,
    network_ptr,
    total,
    rows,
    width,
    dummy,
    bins,
    cells,
    blocks,
    N: tl.constexpr,
    K: tl.constexpr,
):
    block = tl.program_id(0)
    joint = block < blocks
    k_K = tl.where(joint, block, block - blocks) * K + tl.arange(0, K)
    used_K = k_K < tl.where(joint, bins, cells)
    all_ptr = tl.where(joint, expected_ptr, tried_ptr)
    good_ptr = tl.where(joint, accepted_ptr, right_ptr)
    all_K = tl.load(all_ptr + k_K, mask=used_K, other=0.0) * _DECAY
    good_K = tl.load(good_ptr + k_K, mask=used_K, other=0.0) * _DECAY
    for first in range(0, total, N):
        at_N = first + tl.arange(0, N)
        tag_N = tl.load(tag_ptr + at_N, mask=at_N < total, other=-1)
        own_N = tag_N % _OWN_ROOM
        both_N = tl.maximum(tag_N, 0) // _OWN_ROOM
        tl.store(network_ptr + at_N, both_N % _NETWORK_ROOM - 1, mask=(at_N < total) & (block == 0))
        note_N = tl.where(joint, tag_N, both_N // _NETWORK_ROOM - 1)
        tried_N, right_N = judged(
            note_N, at_N, parent_ptr, live_ptr, path_ptr, slot_ptr, total, rows, width, dummy
        )
        weight_N = tl.where(joint, tl.div_rn((own_N % _STEPS).to(tl.float32), _STEPS - 1.0), 1.0)
        mine_NK = tl.where(joint, own_N * _BINS // _STEPS, note_N)[:, None] == k_K[None, :]
        all_K += tl.sum(tl.where(mine_NK & tried_N[:, None], weight_N[:, None], 0.0), 0)
        good_K += tl.sum((mine_NK & right_N[:, None]).to(tl.float32), 0)
    tl.store(all_ptr + k_K, all_K, mask=used_K)
    tl.store(good_ptr + k_K, good_K, mask=used_K)
